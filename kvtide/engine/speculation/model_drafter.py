"""Drafts by a draft model (EAGLE3, MTP) whose KV lies in the target's pages.

After every step the draft is extended over the step's tokens, with what the target computed there:
an entry at position t needs the token at t + 1. Its last row predicts the first draft; each further
draft takes a pass of one row, on the draft's own hidden state. Those rows are written behind the
extended ones, and the next extension overwrites them.

A page of the prefix without its draft sidecar is left out of the draft's page table: the draft then
attends to the others. Keys are rotated before they are stored, so that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.graph_capture import no_wait
from kvtide.engine.page_tables import Numbers, Table, batch_tables
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampler import SamplingInput, is_greedy, sample_all
from kvtide.engine.scheduler import ScheduledChunk
from kvtide.engine.speculation.drafter import DraftWish
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.models.draft import DraftModel

_ALONE = RankTopology()


class DraftRow(NamedTuple):
    """New rows of one sequence: tokens at `position` + 1 and on, and their features."""

    lease: Lease
    position: int
    tokens: Sequence[int]
    features: Tensor


@dataclass(slots=True)
class _Extended:
    """How far a lease's draft is extended, and the hidden state of the last row, (1, …)."""

    end: int
    hidden: Tensor


@dataclass(slots=True)
class _Drafting:
    """A request and its drafts so far."""

    request: Request
    limit: int
    drafts: list[int] = field(default_factory=list)

    def row(self, feature: Tensor) -> DraftRow:
        """The pass behind the last draft, on the hidden state that it was sampled from."""
        position = self.request.length - 2 + len(self.drafts)
        return DraftRow(self.request.held, position, self.drafts[-1:], feature)

    @property
    def sampling_input(self) -> SamplingInput:
        params = self.request.params
        sampling = replace(params.sampling, logprobs=0)
        return SamplingInput(sampling, params.tokens, self.request.tokens, self.drafts)


class ModelDrafter:
    """`cost`: a pass of the draft and a row of the verify step, in decode steps.

    draft       beside the target's last stage; None on ranks of earlier stages
    captures    the draft's, on every rank
    vocabulary  tokens of the target

    The ranks of the last stage run the draft together. All ranks take the drafts that the logits
    rank samples.
    """

    cost = 0.12

    def __init__(
        self,
        draft: DraftModel | None,
        captures: tuple[int, ...],
        cache: TieredCache,
        vocabulary: int,
        topology: RankTopology = _ALONE,
    ) -> None:
        self.model, self._cache, self._vocabulary = draft, cache, vocabulary
        self._topology = topology
        self._staging = Staging(cache.config.torch_device)
        self._extended: WeakKeyDictionary[Lease, _Extended] = WeakKeyDictionary()
        self.captures, self.writes = captures, cache.memory.draft_sidecars

    # -- extension --------------------------------------------------------------------------

    def extend(self, chunks: Sequence[ScheduledChunk], output: StepOutput) -> None:
        """Extend the draft over those tokens of a step whose next token is known."""
        if self.model is None:
            return
        rows = []
        for number, chunk in enumerate(chunks):
            if chunk.request.params.speculate:
                first, captured = output.captured(number)
                if (row := self._row(self.model, chunk.request, first, captured)) is not None:
                    rows.append(row)
        if not rows:
            return
        hidden = self._forward(self.model, rows)
        end = 0
        for row in rows:
            end += len(row.tokens)
            reached = row.position + len(row.tokens)
            self._extended[row.lease] = _Extended(reached, hidden[end - 1 : end])

    def _row(
        self, draft: DraftModel, request: Request, first: int, captured: Tensor
    ) -> DraftRow | None:
        """What is new to the draft of a step's rows from position `first` on."""
        lease = request.held
        known = self._extended.get(lease)
        begin = lease.cached_tokens if known is None else known.end
        assert first <= begin, "the target skipped tokens that the draft has yet to see"
        end = min(first + len(captured), request.length - 1)
        if end <= begin:
            return None
        features = draft.features(captured[begin - first : end - first])
        return DraftRow(lease, begin, request.tokens[begin + 1 : end + 1], features)

    # -- proposal ---------------------------------------------------------------------------

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        drafting = [_Drafting(*wish) for wish in wishes]
        hidden = None
        if self.model is not None:
            hidden = torch.cat([self._extended[each.request.held].hidden for each in drafting])
        active = drafting
        while active:
            self._draft_next(active, hidden)
            going_on = [n for n, each in enumerate(active) if len(each.drafts) < each.limit]
            active = [active[n] for n in going_on]
            if active and self.model is not None and hidden is not None:
                features = hidden[self._staging.indices(going_on)]
                rows = [each.row(features[n : n + 1]) for n, each in enumerate(active)]
                hidden = self._forward(self.model, rows)
        return [tuple(each.drafts) for each in drafting]

    def _draft_next(self, active: Sequence[_Drafting], hidden: Tensor | None) -> None:
        """One more draft for each, the same on all ranks."""
        device = self._cache.config.torch_device
        tokens = torch.empty(len(active), dtype=torch.int64, device=device)
        if self._topology.is_logits_rank:
            assert self.model is not None and hidden is not None, "it has the last stage"
            tokens = self._sampled(self.model, active, hidden)
        chosen = self._topology.broadcast_logits(tokens).tolist()
        for each, token in zip(active, chosen, strict=True):
            each.drafts.append(token)

    def _sampled(self, draft: DraftModel, active: Sequence[_Drafting], hidden: Tensor) -> Tensor:
        """The next draft of each, with the random numbers that the target samples with."""
        logits, vocabulary = draft.logits(hidden), draft.vocabulary
        if all(is_greedy(each.request.params.sampling) for each in active):
            best = logits.argmax(-1)
            return best if vocabulary is None else vocabulary[best]
        if vocabulary is not None:
            wide = logits.new_full((len(logits), self._vocabulary), -torch.inf)
            logits = wide.index_copy_(1, vocabulary, logits)
        sampled = sample_all(logits, [each.sampling_input for each in active])
        return self._staging.indices([one.token for one in sampled])

    # -- a pass -----------------------------------------------------------------------------

    def _forward(self, draft: DraftModel, rows: Sequence[DraftRow]) -> Tensor:
        """The draft's hidden states, a row for every token."""
        counts = [len(row.tokens) for row in rows]
        ends = np.cumsum(counts)
        tables, past = [], []
        for row in rows:
            table, before = self._table(row)
            tables.append(table)
            past.append(before)
        spans = np.stack([ends - counts, ends, past], axis=1).astype(np.int32)
        tokens = np.concatenate([row.tokens for row in rows])
        positions = [
            row.position + np.arange(count) for row, count in zip(rows, counts, strict=True)
        ]
        both = np.stack([tokens, np.concatenate(positions)]).astype(np.int32)
        sequences, batch = batch_tables(spans, tables, self._staging)
        ids, at = self._staging.to_device(both)[0].long()
        page, view = self._cache.memory.page_tokens, self._cache.view
        step = Step(ids, at, sequences, page, view, no_wait, batch)
        return draft.forward(step, torch.cat([row.features for row in rows]))

    def _table(self, row: DraftRow) -> tuple[Table, int]:
        """The lease's slots without pages that lack the draft, and the tokens before the row.

        Pages behind a window have no slot and are left out, too: those that lack the draft move
        the window back.
        """
        page, lease = self._cache.memory.page_tokens, row.lease
        table: dict[str, Numbers] = {}
        past = row.position
        for pool in self.writes:
            anchor = self._cache.memory.pool(pool).follows
            assert anchor is not None, "a draft's pool follows an anchor"
            if anchor in table:
                continue
            slots = self._cache.page_table(lease, anchor).astype(np.int32)
            carried = self._cache.carries(lease, pool)
            absent = slots < 0
            absent[row.position // page :] = False
            absent[: len(carried)] |= ~carried
            past = row.position - page * int(absent[: row.position // page].sum())
            table[anchor] = slots[~absent]
        return table, past
