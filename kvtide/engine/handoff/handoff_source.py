"""What a request says about its handoff."""

from __future__ import annotations

from typing import NamedTuple


class HandoffSource(NamedTuple):
    """Another server prefills the prompt.

    peer  that server's handoff address, host:port
    room  names the handoff there
    asks  the request is sent to it; otherwise a router has done so
    """

    peer: str
    room: str
    asks: bool = False


class HandoffTarget(NamedTuple):
    """The prompt is prefilled for another server, which asks for this room.

    asked  that server sent the request, and ends it
    """

    room: str
    asked: bool = False
