"""What a request says of its handoff, whichever convention its router has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from kvtide.engine import RequestParams
from kvtide.engine.handoff.handoff_source import HandoffSource
from kvtide.engine.handoff.request_fields import for_prefill


class HandoffSide(Enum):
    """What this server does for the request."""

    PREFILL = "prefill"
    DECODE = "decode"


class Convention(Enum):
    """How routers name a handoff.

    BOOTSTRAP    the same body goes to both sides at once, with `bootstrap_host`, `_port`, `_room`
    KV_TRANSFER  prefill first, with `kv_transfer_params`; the decode side gets its answer's
    """

    BOOTSTRAP = "bootstrap"
    KV_TRANSFER = "kv_transfer_params"


class HandoffAddress(NamedTuple):
    """Where a prefill server listens for decode servers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HandoffFields:
    """One choice's handoff.

    peer  the prefill side's address: the other server's on the decode side, else this one's
    room  names the handoff on both sides
    """

    side: HandoffSide
    peer: HandoffAddress
    room: str
    convention: Convention

    def apply(self, params: RequestParams) -> RequestParams:
        """The engine's request: for one token and a peer, or with a prompt that a peer prefills."""
        if self.side is HandoffSide.PREFILL:
            return for_prefill(params, self.room)
        return replace(params, handoff_from=HandoffSource(str(self.peer), self.room))
