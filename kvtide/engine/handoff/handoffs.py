"""Both sides of handoffs, as the engine calls them.

A server may decode for its clients and prefill for peers at once: `incoming` and `outgoing` know
nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtide.cache import TieredCache
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.incoming import IncomingHandoffs
from kvtide.engine.handoff.messages import Done, Message, Reserve, StopWriting
from kvtide.engine.handoff.outgoing import OutgoingHandoffs
from kvtide.engine.request import Finish, Request, RequestError
from kvtide.engine.updates import Update, append

HANDOFF_MIN_TOKENS = 256
"""Prompts that miss fewer tokens are prefilled where they are decoded, unless said otherwise."""


class Handoffs:
    """`abort` ends a request that its peer gave up. `resumed` is called with requests that begin
    behind their prompt. `drafts`: a draft writes its own state of a request's tokens."""

    def __init__(
        self,
        cache: TieredCache,
        min_tokens: int,
        abort: Callable[[Request], None],
        resumed: Callable[[Request], None],
        drafts: Callable[[Request], bool],
    ) -> None:
        self.incoming = IncomingHandoffs(cache, min_tokens, drafts)
        self.outgoing = OutgoingHandoffs(cache, drafts)
        self._abort, self._resumed = abort, resumed
        self._first_tokens: list[Update] = []

    # -- from the engine --------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a room that another request has."""
        target = request.params.handoff_to
        if target is not None and not self.outgoing.takes(target.room):
            raise RequestError(
                f"room {target.room} is in use by another request; use a new one for each",
                param="bootstrap_room",
            )

    def queued(self, request: Request) -> None:
        if request.params.handoff_from is not None:
            self.incoming.offer(request)
        if request.params.handoff_to is not None:
            self.outgoing.open(request)

    def admitted(self, request: Request) -> None:
        """Have an admitted request begin behind its prompt, if a peer has computed that."""
        if request.handoff is None or request.handoff.state is not HandoffState.LANDED:
            return
        if (first := self.incoming.resume(request)) is not None:
            request.computed = len(request.params.tokens)
            self._resumed(request)
            self._first_tokens += append(request, [first])

    def take_first_tokens(self) -> list[Update]:
        """First tokens that peers sampled, of requests admitted since."""
        updates, self._first_tokens = self._first_tokens, []
        return updates

    def ending(self, request: Request, finish: Finish) -> None:
        """A request is about to leave the scheduler; a running one still has its lease."""
        self.incoming.abort(request)
        self.outgoing.finished(request, finish)

    def ended(self, request: Request) -> None:
        self.outgoing.ended_request(request)

    # -- from peers -------------------------------------------------------------------------

    def receive(self, peer: str, message: Message) -> None:
        """A message of a peer, by the name of its connection."""
        if isinstance(message, (Reserve, StopWriting, Done)):
            if (request := self.outgoing.receive(peer, message)) is not None:
                self._abort(request)
        else:
            self.incoming.receive(message)

    def peer_lost(self, peer: str) -> None:
        """A decode server's connection has ended."""
        for request in self.outgoing.peer_lost(peer):
            self._abort(request)
