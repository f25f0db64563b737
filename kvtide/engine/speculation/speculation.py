"""Speculation as the engine calls it: `before` a step, `accepted` and `verified` after sampling,
then `extend` and `propose`; or `draft_behind` before the host has read what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import PlannedStep, ScheduledChunk, unread_draft
from kvtide.engine.grammar.step_masks import cut_drafts
from kvtide.engine.graphs.graph_capture import GraphCapture
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput, UnreadTokens
from kvtide.engine.sampler import SampledToken
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.accept_guard import AcceptGuard
from kvtide.engine.speculation.accept_lengths import AcceptLengths
from kvtide.engine.speculation.draft_length import DraftLength
from kvtide.engine.speculation.drafter import (
    Drafter,
    DraftLimits,
    DraftWish,
    UnreadDrafts,
    UnreadStep,
)
from kvtide.engine.speculation.saved_states import SavedStates
from kvtide.engine.staging import Staging

MAX_DRAFTS = 16
"""Drafts of a request in a step, at the most."""


class VerifiedChunk(NamedTuple):
    """How many of a chunk's drafts were accepted; `ended`: the request had its last token before
    all were compared."""

    chunk: ScheduledChunk
    accepted: int
    ended: bool


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
        self.guard = AcceptGuard(drafter.writes) if drafter.writes else None
        self._scheduler = scheduler
        self._drafter = drafter
        self._draft_length = DraftLength(
            draft_tokens, drafter.cost, cache.config.torch_device.type, fixed=fixed_drafts
        )
        self._states = SavedStates(cache)
        self._staging = Staging(cache.config.torch_device)
        self._wishes: list[DraftWish] = []
        self._leases: dict[Request, Lease] = {}
        self._behind = False

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
        return self.wanted(request) > 0

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

        `sampled` has the token after the chunk's last one, and one after every draft, or after the
        first ones.
        """
        count, max_accepted = 0, min(len(chunk.drafts), len(sampled) - 1)
        while count < max_accepted and sampled[count].token == chunk.drafts[count]:
            count += 1
        return sampled[: count + 1]

    def verified(self, chunks: Sequence[VerifiedChunk]) -> None:
        """These chunks' drafts are verified: the requests' computed tokens end with the last
        accepted one, or where their states are put back to."""
        rejected = []
        for chunk, accepted, ended in chunks:
            request, drafts = chunk.request, len(chunk.drafts)
            # Drafts behind a request's last token are neither right nor wrong.
            self._count(request, accepted if ended else drafts, accepted)
            if accepted == drafts or not self._states.needed:
                request.computed = chunk.end + accepted
            else:
                rejected.append(request)
        self._states.restore(rejected)

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        if not drafts:
            return
        self.lengths.verified(request, drafts, accepted)
        if self.guard is not None:
            self.guard.verified(request, accepted + 1)
        self._draft_length.verified(request, drafts, accepted)

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, decoding: Sequence[Request]
    ) -> None:
        """A step's tokens are sampled and accepted: the drafter writes its own state of them, and
        begins to draft for requests that decode next, unless it drafts behind them already."""
        self._draft_length.batch = max(1, len(self._scheduler.running))
        if self._behind:
            self._behind = False
            worth = {request for request in decoding if self._worth_drafts(request)}
            self._wishes = [wish for wish in self._wishes if wish.request in worth]
            self._drafter.extend(chunks, output, ())
            return
        self._wishes = []
        for request in decoding:
            if request.params.speculate:
                wanted = self.wanted(request) if self._worth_drafts(request) else 0
                if count := self._scheduler.slots_for_drafts(request, wanted) if wanted else 0:
                    self._wishes.append(DraftWish(request, count))
        self._leases = {wish.request: wish.request.held for wish in self._wishes}
        self._drafter.extend(chunks, output, self._wishes)

    def resume(self, request: Request) -> None:
        """A peer has computed the prompt, with the draft's state of it."""
        self._drafter.resume(request)

    @property
    def can_draft_behind(self) -> bool:
        return self._drafter.can_draft_behind

    @property
    def drafts_behind(self) -> bool:
        """Drafts are on their way behind tokens that the host has yet to read."""
        return self._behind

    def unread(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, tokens: Tensor
    ) -> UnreadStep:
        """A verify step of these chunks, of whose sampled `tokens` the device accepts by itself."""
        return UnreadStep(chunks, output, self._accepted_on_device(chunks, tokens))

    def draft_behind(
        self, step: UnreadStep, planned: PlannedStep
    ) -> tuple[PlannedStep, Tensor] | None:
        """Draft for the step planned behind an unread one. The planned step with its unread drafts,
        and the drafts; None where the host has to read first."""
        wishes = [DraftWish(each.request, len(each.drafts)) for each in planned.chunks]
        wishes = [wish for wish in wishes if wish.limit]
        drafts = self._drafter.draft_behind(step, wishes)
        if drafts is None:
            return None
        self._behind, self._wishes = True, wishes
        self._leases = {wish.request: wish.request.held for wish in wishes}
        behind = [
            chunk._replace(drafts=_unread_drafts(drafts, chunk.request, len(chunk.drafts)))
            for chunk in planned.chunks
        ]
        return replace(planned, chunks=behind), drafts.tokens

    def undo_behind(self, request: Request) -> None:
        """The device has another token than was sampled: its drafts are void."""
        if not self._behind:
            return
        self._wishes = [wish for wish in self._wishes if wish.request is not request]
        self._drafter.undo_behind(request)

    def wanted(self, request: Request) -> int:
        """Drafts that a request should have."""
        return self._draft_length.of(request) if request.params.speculate else 0

    def wanted_behind(self, request: Request) -> int:
        """The same before the outcome of its present drafts is known: a trial is not repeated."""
        return self._draft_length.paying(request) if request.params.speculate else 0

    def _accepted_on_device(self, chunks: Sequence[ScheduledChunk], tokens: Tensor) -> UnreadTokens:
        """As `accepted` does on the host."""
        longest = self._draft_length.longest
        table = np.full((len(chunks), 1 + longest), -1)
        counts = [1 + len(chunk.drafts) for chunk in chunks]
        table[:, 0] = np.cumsum(counts) - counts
        for row, chunk in zip(table, chunks, strict=True):
            row[1 : 1 + len(chunk.drafts)] = chunk.drafts
        (there,) = self._staging.to_device(table)
        places = there[:, :1] + torch.arange(longest, device=there.device)
        same = tokens[places.clamp(max=len(tokens) - 1)] == there[:, 1:]
        accepted = same.int().cumprod(1).sum(1).int()
        firsts = dict(zip((c.request for c in chunks), table[:, 0].tolist(), strict=True))
        return UnreadTokens(tokens, firsts, accepted)

    def take_unread(self) -> Tensor | None:
        """Give the requests `unread_draft`s of this tensor on the device, for a step that is
        launched before `propose`; None where the host has to propose first."""
        unread = self._drafter.unread if self._wishes else None
        if unread is None:
            return None
        for request, limit in self._wishes:
            request.drafts = _unread_drafts(unread, request, limit)
        return unread.tokens

    def read_drafts(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks with drafts in the place of unread ones."""
        if not self._wishes:
            return list(chunks)
        drafts, read = self._proposed(), list[ScheduledChunk]()
        for chunk in chunks:
            found = drafts.get(chunk.request, ())[: len(chunk.drafts)]
            assert len(found) == len(chunk.drafts), "a launched row has the drafts it ran on"
            read.append(chunk._replace(drafts=found))
        return read

    def propose(self) -> None:
        """Give the requests their drafts as far as their grammars allow them, unless they were
        retracted meanwhile."""
        for request, drafts in self._proposed().items():
            if request.drafts:
                request.drafts = cut_drafts(request.matcher, drafts)

    def _proposed(self) -> dict[Request, tuple[int, ...]]:
        wishes, self._wishes = self._wishes, []
        proposed = dict(
            zip((wish.request for wish in wishes), self._drafter.propose(wishes), strict=True)
        )
        for request, drafts in proposed.items():
            if request.lease is self._leases[request]:
                request.drafts = drafts
        return proposed

    def _worth_drafts(self, request: Request) -> bool:
        """Not while more tokens are to be computed again than drafts could win."""
        return request.length - request.computed - 1 <= self._draft_length.longest


def _unread_drafts(unread: UnreadDrafts, request: Request, count: int) -> tuple[int, ...]:
    """Stand for a request's first drafts on the device."""
    if not count:
        return ()
    first = unread.rows[request] * unread.tokens.shape[1]
    return tuple(unread_draft(first + number) for number in range(count))
