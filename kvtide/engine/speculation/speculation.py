"""Speculation as the engine calls it: `before` a step, `accepted` and `verified` after sampling,
then `extend` and `propose`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtide.cache import TieredCache
from kvtide.engine.graph_capture import GraphCapture
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampler import SampledToken
from kvtide.engine.scheduler import ScheduledChunk, Scheduler
from kvtide.engine.speculation.accept_guard import AcceptGuard
from kvtide.engine.speculation.accept_lengths import AcceptLengths
from kvtide.engine.speculation.draft_length import DraftLength
from kvtide.engine.speculation.drafter import Drafter, DraftLimits, DraftWish
from kvtide.engine.speculation.saved_states import SavedStates

MAX_DRAFTS = 16
"""Drafts of a request in a step, at the most."""


class Speculation:
    """`lengths`: what verify steps gave. `guard`: compares them by origin, where a draft
    model keeps state in pages: here, or on the last stage."""

    def __init__(
        self,
        cache: TieredCache,
        scheduler: Scheduler,
        drafter: Drafter,
        draft_tokens: int,
        *,
        fixed_drafts: bool = False,
    ) -> None:
        assert 1 <= draft_tokens <= MAX_DRAFTS, f"{draft_tokens} drafts; use 1 to {MAX_DRAFTS}"
        self.lengths = AcceptLengths()
        self.guard = AcceptGuard(drafter.writes) if drafter.captures else None
        self._scheduler = scheduler
        self._drafter = drafter
        self._draft_length = DraftLength(draft_tokens, drafter.cost, fixed=fixed_drafts)
        self._states = SavedStates(cache)
        self._wishes: list[DraftWish] = []

    @property
    def verify_rows(self) -> int:
        """Tokens of a request in a verify step, at the most: its last token and its drafts. Where
        running states are put back, accepted tokens are computed again beside them."""
        again = self._draft_length.longest if self._states.needed else 0
        return 1 + self._draft_length.longest + again

    def use_graphs(self, capture: GraphCapture, max_sequences: int, hidden: Tensor) -> None:
        """Steps run as CUDA graphs; `hidden` is a hidden state of the target."""
        limits = DraftLimits(max_sequences, self._draft_length.longest, hidden)
        self._drafter.use_graphs(capture, limits)

    def warm_up(self, longest: int) -> None:
        self._drafter.warm_up(longest)

    def wants(self, request: Request) -> bool:
        """The request may get drafts after this step, so that the next step cannot be planned."""
        return request.params.speculate and self._draft_length.of(request) > 0

    def writes(self, request: Request) -> bool:
        """Sidecars are written for this request."""
        return bool(self._drafter.writes) and request.params.speculate

    def before(self, chunks: Sequence[ScheduledChunk]) -> None:
        """A step is about to run: keep the states that its drafts change."""
        self._states.save([chunk.request for chunk in chunks if chunk.drafts])

    def accepted(
        self, chunk: ScheduledChunk, sampled: Sequence[SampledToken]
    ) -> Sequence[SampledToken]:
        """The sampled tokens up to the first that was not drafted.

        `sampled` has the token after the chunk's last one, and one after every draft.
        """
        count = 0
        while count < len(chunk.drafts) and sampled[count].token == chunk.drafts[count]:
            count += 1
        return sampled[: count + 1]

    def verified(self, chunks: Sequence[tuple[ScheduledChunk, int]]) -> None:
        """These chunks' drafts are verified, so many of each accepted: the requests' computed
        tokens end with the last accepted one, or where their states are put back to."""
        rejected = []
        for chunk, accepted in chunks:
            request, drafts = chunk.request, len(chunk.drafts)
            self.lengths.verified(request, drafts, accepted)
            if self.guard is not None:
                self.guard.verified(request, accepted + 1)
            self._draft_length.verified(request, drafts, accepted)
            if accepted == drafts or not self._states.needed:
                request.computed = chunk.end + accepted
            else:
                rejected.append(request)
        self._states.restore(rejected)

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, decoding: Sequence[Request]
    ) -> None:
        """A step's tokens are sampled and accepted: the drafter writes its own state of them, and
        begins to draft for requests that decode next."""
        self._wishes = []
        for request in decoding:
            request.drafts = ()  # Those behind the old tokens are void.
            if request.params.speculate:
                wanted = self._wanted(request)
                if count := self._scheduler.slots_for_drafts(request, wanted) if wanted else 0:
                    self._wishes.append(DraftWish(request, count))
        self._drafter.extend(chunks, output, self._wishes)

    def propose(self) -> None:
        """Give the requests their drafts."""
        wishes, self._wishes = self._wishes, []
        for wish, drafts in zip(wishes, self._drafter.propose(wishes), strict=True):
            wish.request.drafts = drafts

    def _wanted(self, request: Request) -> int:
        """None while more tokens are to be computed again than drafts could win."""
        again = request.length - request.computed - 1
        return self._draft_length.of(request) if again <= self._draft_length.longest else 0
