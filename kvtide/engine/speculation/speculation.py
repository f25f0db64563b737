"""Speculation as the engine calls it.

before           keeps the states that a step's drafts change
unread           what the device accepts by itself, behind a step that the host has yet to read
commit_verified  ends a request's computed tokens where acceptance ended (`draft_acceptance`), and
                 puts states back
extend, propose  draft for the next step; `draft_ahead` does before the host has read this one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import PlannedStep, ScheduledChunk, unread_draft
from kvtide.engine.grammar.step_masks import cut_drafts
from kvtide.engine.graphs.graph_capture import GraphCapture
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.accept_length_guard import AcceptLengthGuard
from kvtide.engine.speculation.accept_length_stats import AcceptLengthStats
from kvtide.engine.speculation.draft_acceptance import accepted_on_device
from kvtide.engine.speculation.draft_length import DraftLength
from kvtide.engine.speculation.drafter import (
    Drafter,
    DraftLimits,
    DraftWish,
    UnreadDrafts,
    UnreadStep,
)
from kvtide.engine.speculation.round_prices import RoundPrices, StepRows
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


class _Resumed(NamedTuple):
    """A lease behind a prompt that a peer has computed, and what that `captured` of the last
    token."""

    lease: Lease
    captured: Tensor


class Speculation:
    """`lengths`: what verify steps gave. `guard`: compares them by origin, where a draft
    model keeps state in pages: here, or on the last stage.

    hidden  a hidden state of the target, (1, …)
    """

    def __init__(
        self,
        cache: TieredCache,
        scheduler: Scheduler,
        drafter: Drafter,
        hidden: Tensor,
        draft_tokens: int,
        *,
        fixed_drafts: bool = False,
    ) -> None:
        assert 1 <= draft_tokens <= MAX_DRAFTS, f"{draft_tokens} drafts; use 1 to {MAX_DRAFTS}"
        self.lengths = AcceptLengthStats()
        self.guard = _guard(cache, drafter) if drafter.writes else None
        self._scheduler = scheduler
        self._drafter = drafter
        self._states = SavedStates(cache)
        rows = self._verify_rows(draft_tokens)
        prices = None if fixed_drafts else RoundPrices(cache.agreement, rows)
        self._draft_length = DraftLength(
            draft_tokens, drafter.cost, fixed=fixed_drafts, prices=prices
        )
        self._staging = Staging(cache.config.torch_device)
        self._wishes: list[DraftWish] = []
        self._leases: dict[Request, Lease] = {}
        self._drafted_ahead = False
        self._hidden = hidden
        self._captured: WeakKeyDictionary[Request, Callable[[], list[Tensor]]] = WeakKeyDictionary()
        self._resumed: dict[Request, _Resumed] = {}

    @property
    def verify_rows(self) -> int:
        """Tokens of a request in a verify step, at the most."""
        return self._verify_rows(self._draft_length.longest)

    def _verify_rows(self, drafts: int) -> int:
        """The last token and the drafts. Where recurrent states are put back, accepted tokens are
        computed again beside them."""
        return 1 + drafts + (drafts if self._states.needed else 0)

    def use_graphs(self, capture: GraphCapture, max_sequences: int) -> None:
        """Steps run as CUDA graphs."""
        limits = DraftLimits(max_sequences, self._draft_length.longest, self._hidden)
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

    def commit_verified(self, chunks: Sequence[VerifiedChunk]) -> None:
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
        self._keep_captured(chunks, output)
        self._draft_length.ran(_rows_of(chunks, output), self._scheduler.running)
        if self._drafted_ahead:
            self._drafted_ahead = False
            worth = {request for request in decoding if self._worth_drafts(request)}
            self._wishes = [wish for wish in self._wishes if wish.request in worth]
            self._drafter.extend(chunks, output, ())
            return
        self._wish_for(decoding)
        self._drafter.extend(chunks, output, self._wishes)

    def _wish_for(self, decoding: Iterable[Request]) -> None:
        """Note how many drafts each of these may have, and take slots for them."""
        self._draft_length.decide_for(self._scheduler.running)
        self._wishes = []
        for request in decoding:
            wanted = self.wanted(request) if self._worth_drafts(request) else 0
            if count := self._scheduler.slots_for_drafts(request, wanted) if wanted else 0:
                self._wishes.append(DraftWish(request, count))
        self._leases = {wish.request: wish.request.held for wish in self._wishes}

    def _keep_captured(self, chunks: Sequence[ScheduledChunk], output: StepOutput) -> None:
        """Of prompts that are handed over: what the target captured of their last token."""
        for number, chunk in enumerate(chunks):
            request = chunk.request
            handed_over = request.params.handoff_to is not None and self.writes(request)
            if handed_over and chunk.end == len(request.params.tokens):
                read = self._drafter.captured(output, number)
                if read is not None:
                    self._captured[request] = read

    def captured(self, request: Request) -> Callable[[], bytes] | None:
        """What the target captured of the last token of a prompt that is handed over."""
        read = self._captured.pop(request, None)
        if read is None:
            return None
        return lambda: read()[0].flatten().view(torch.uint8).numpy().tobytes()

    def resume(self, request: Request, captured: bytes) -> None:
        """A peer has computed the prompt, with the draft's state of it, and `captured` its last
        token: without that, there are drafts behind the first step only."""
        self._drafter.resume(request)
        width = self._hidden.shape[-1] * len(self._drafter.captures)
        shape = *self._hidden.shape[:-1], width
        if len(captured) == math.prod(shape) * self._hidden.itemsize:
            numbers = torch.from_numpy(np.frombuffer(captured, np.int32).copy())
            row = self._staging.upload(numbers).view(self._hidden.dtype).view(shape)
            self._resumed[request] = _Resumed(request.held, row)

    def draft_resumed(self) -> None:
        """Before a step is scheduled: give requests that resume behind their prompt their first
        drafts. If its prefix is still loading, a request waits, or takes part without any."""
        ready = dict[Request, Tensor]()
        for request, (lease, captured) in list(self._resumed.items()):
            is_first = request.length == len(request.params.tokens) + 1
            if not lease.loading or request.lease is not lease or not is_first:
                del self._resumed[request]
                if request.lease is lease and is_first:
                    ready[request] = captured
        if not ready:
            return
        self._wish_for(ready)
        captured_rows = [ready[request] for request, _ in self._wishes]
        if captured_rows:
            self._drafter.extend_resumed(self._wishes, captured_rows)
            self.propose()

    @property
    def can_draft_ahead(self) -> bool:
        return self._drafter.can_draft_ahead

    @property
    def drafted_ahead(self) -> bool:
        """Drafts are on their way behind tokens that the host has yet to read."""
        return self._drafted_ahead

    def unread(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, tokens: Tensor
    ) -> UnreadStep:
        """A verify step of these chunks, of whose sampled `tokens` the device accepts by itself."""
        longest = self._draft_length.longest
        accepted = accepted_on_device(chunks, tokens, longest, self._staging)
        return UnreadStep(chunks, output, accepted)

    def draft_ahead(
        self, step: UnreadStep, planned: PlannedStep
    ) -> tuple[PlannedStep, Tensor] | None:
        """Draft for the step planned behind an unread one. The planned step with its unread drafts,
        and the drafts; None where the host has to read first."""
        wishes = [DraftWish(each.request, len(each.drafts)) for each in planned.chunks]
        wishes = [wish for wish in wishes if wish.limit]
        drafts = self._drafter.draft_ahead(step, wishes)
        if drafts is None:
            return None
        self._drafted_ahead, self._wishes = True, wishes
        self._leases = {wish.request: wish.request.held for wish in wishes}
        behind = [
            chunk._replace(drafts=_unread_drafts(drafts, chunk.request, len(chunk.drafts)))
            for chunk in planned.chunks
        ]
        return replace(planned, chunks=behind), drafts.tokens

    def undo_ahead(self, request: Request) -> None:
        """The device has another token than was sampled: its drafts are void."""
        if not self._drafted_ahead:
            return
        self._wishes = [wish for wish in self._wishes if wish.request is not request]
        self._drafter.undo_ahead(request)

    def wanted(self, request: Request) -> int:
        """Drafts that a request should have."""
        return self._draft_length.of(request) if request.params.speculate else 0

    def wanted_ahead(self, request: Request) -> int:
        """The same before the outcome of its present drafts is known: a trial is not repeated."""
        return self._draft_length.paying(request) if request.params.speculate else 0

    def take_unread(self) -> Tensor | None:
        """Give the requests `unread_draft`s of this tensor on the device, for a step that is
        launched before `propose`; None where the host has to propose first, for these or for a
        request that resumes behind its prompt."""
        unread = self._drafter.unread if self._wishes and not self._resumed else None
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


def _guard(cache: TieredCache, drafter: Drafter) -> AcceptLengthGuard:
    return AcceptLengthGuard(
        drafter.writes, lambda prompt: next(cache.index.page_keys(prompt, 1)).key
    )


def _rows_of(chunks: Sequence[ScheduledChunk], output: StepOutput) -> StepRows:
    rows = [output.token_count(number) for number in range(len(chunks))]
    return StepRows(rows, sum(len(chunk.drafts) for chunk in chunks))


def _unread_drafts(unread: UnreadDrafts, request: Request, count: int) -> tuple[int, ...]:
    """Stand for a request's first drafts on the device."""
    if not count:
        return ()
    first = unread.rows[request] * unread.tokens.shape[1]
    return tuple(unread_draft(first + number) for number in range(count))
