"""Both sides of handoffs, as the engine calls them.

A server may decode for its clients and prefill for peers at once: `decode` and `prefill` know
nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtide.cache import TieredCache
from kvtide.engine.handoff.decode_handoffs import DecodeHandoffs
from kvtide.engine.handoff.handoff_state import HandoffState
from kvtide.engine.handoff.messages import Done, HandoffMessage, Reserve, StopWriting
from kvtide.engine.handoff.prefill_handoffs import PrefillHandoffs
from kvtide.engine.request import Finish, Request, RequestError, RequestState
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.speculation.speculation import Speculation
from kvtide.engine.updates import Update, append

HANDOFF_MIN_TOKENS = 256
"""The default: prompts that miss fewer tokens are prefilled where they are decoded."""


class Handoffs:
    """`abort` ends a request that its peer gave up. `speculation`: its draft's state of a prompt is
    handed over too."""

    def __init__(
        self,
        cache: TieredCache,
        min_tokens: int,
        abort: Callable[[Request], None],
        speculation: Speculation | None,
    ) -> None:
        drafts = speculation.writes if speculation is not None else _never
        self.decode = DecodeHandoffs(cache, min_tokens, drafts, self._first, self._over)
        self.prefill = PrefillHandoffs(cache, speculation)
        self._abort, self._speculation = abort, speculation
        self._updates: list[Update] = []
        self._last: dict[Request, Finish] = {}

    # -- from the engine --------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a room that another request has."""
        target = request.params.handoff_to
        if target is not None and not self.prefill.takes(target.room):
            raise RequestError(
                f"room {target.room} is in use by another request; use a new one for each",
                param="bootstrap_room",
            )

    def queued(self, request: Request) -> None:
        if request.params.handoff_from is not None:
            self.decode.offer(request)
        if request.params.handoff_to is not None:
            self.prefill.open(request)

    def admitted(self, request: Request) -> None:
        """Have an admitted request begin behind its prompt, if a peer has computed that."""
        if request.handoff is None or request.handoff.state is not HandoffState.LANDED:
            return
        if self.decode.resume(request):
            request.computed = len(request.params.tokens)
            if self._speculation is not None:
                self._speculation.resume(request, request.handoff.captured)

    def take_updates(self) -> list[Update]:
        """First tokens that peers have sampled, and ends of requests that have no other token."""
        updates, self._updates = self._updates, []
        return [each for each in updates if each.request.state is not RequestState.FINISHED]

    def ending(self, request: Request, finish: Finish) -> None:
        """A request is about to leave the scheduler; a running one still has its lease."""
        self.decode.abort(request)
        self.prefill.finished(request, finish)

    def ended(self, request: Request) -> None:
        self.prefill.ended_request(request)

    # -- first tokens -----------------------------------------------------------------------

    def _first(self, request: Request, sampled: SampledToken) -> None:
        """Its client gets the token at once. Where that is the last one, the request stays until
        its handoff is over: its pages serve later prompts."""
        assert request.handoff is not None
        (update,) = append(request, [sampled])
        if update.finish is not None:
            self._last[request], request.handoff.is_last = update.finish, True
        if update.sampled is not None or update.text:
            self._updates.append(update._replace(finish=None))

    def _over(self, request: Request) -> None:
        if (finish := self._last.pop(request, None)) is not None:
            self._updates.append(Update(request, None, "", finish))

    # -- from peers -------------------------------------------------------------------------

    def receive(self, peer: str, message: HandoffMessage) -> None:
        """A message of a peer, by the name of its connection."""
        if isinstance(message, (Reserve, StopWriting, Done)):
            if (request := self.prefill.receive(peer, message)) is not None:
                self._abort(request)
        else:
            self.decode.receive(message)

    def peer_lost(self, peer: str) -> None:
        """A decode server's connection has ended."""
        for request in self.prefill.peer_lost(peer):
            self._abort(request)


def _never(request: Request) -> bool:
    """Nothing drafts."""
    return False
