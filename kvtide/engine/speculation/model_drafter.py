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
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.graph_capture import no_wait
from kvtide.engine.page_tables import Numbers, Table, batch_tables
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampler import SamplingInput, is_greedy, sample_all
from kvtide.engine.scheduler import ScheduledChunk
from kvtide.engine.speculation.drafter import DraftWish
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.models.draft import DraftModel


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


class ModelDrafter:
    """`cost`: a pass of the draft and a row of the verify step, in decode steps."""

    cost = 0.12

    def __init__(self, draft: DraftModel, cache: TieredCache, vocabulary: int) -> None:
        self._draft, self._cache, self._vocabulary = draft, cache, vocabulary
        self._staging = Staging(cache.config.torch_device)
        self._extended: WeakKeyDictionary[Lease, _Extended] = WeakKeyDictionary()
        self.captures, self.writes = draft.captures, cache.memory.draft_sidecars

    # -- extension --------------------------------------------------------------------------

    def extend(self, chunks: Sequence[ScheduledChunk], output: StepOutput) -> None:
        """Extend the draft over those tokens of a step whose next token is known."""
        rows = []
        for number, chunk in enumerate(chunks):
            if chunk.request.params.speculate:
                first, captured = output.captured(number)
                if (row := self._row(chunk.request, first, captured)) is not None:
                    rows.append(row)
        if not rows:
            return
        hidden = self._forward(rows)
        end = 0
        for row in rows:
            end += len(row.tokens)
            reached = row.position + len(row.tokens)
            self._extended[row.lease] = _Extended(reached, hidden[end - 1 : end])

    def _row(self, request: Request, first: int, captured: Tensor) -> DraftRow | None:
        """What is new to the draft of a step's rows from position `first` on."""
        lease = request.held
        known = self._extended.get(lease)
        begin = lease.cached_tokens if known is None else known.end
        assert first <= begin, "the target skipped tokens that the draft has yet to see"
        end = min(first + len(captured), request.length - 1)
        if end <= begin:
            return None
        features = self._draft.features(captured[begin - first : end - first])
        return DraftRow(lease, begin, request.tokens[begin + 1 : end + 1], features)

    # -- proposal ---------------------------------------------------------------------------

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        drafts: list[list[int]] = [[] for _ in wishes]
        states = [self._extended[wish.request.held] for wish in wishes]
        hidden = torch.cat([state.hidden for state in states])
        active = list(range(len(wishes)))
        while active:
            chosen = self._sampled([(wishes[n].request, drafts[n]) for n in active], hidden)
            for number, token in zip(active, chosen, strict=True):
                drafts[number].append(token)
            going_on = [i for i, n in enumerate(active) if len(drafts[n]) < wishes[n].limit]
            active = [active[i] for i in going_on]
            if active:
                features = hidden[self._staging.indices(going_on)]
                rows = [
                    DraftRow(
                        wishes[n].request.held,
                        wishes[n].request.length - 2 + len(drafts[n]),
                        drafts[n][-1:],
                        features[i : i + 1],
                    )
                    for i, n in enumerate(active)
                ]
                hidden = self._forward(rows)
        return [tuple(each) for each in drafts]

    def _sampled(self, rows: Sequence[tuple[Request, Sequence[int]]], hidden: Tensor) -> list[int]:
        """The next draft of each, with the random numbers that the target samples with."""
        logits, vocabulary = self._draft.logits(hidden), self._draft.vocabulary
        if all(is_greedy(request.params.sampling) for request, _ in rows):
            best = logits.argmax(-1)
            chosen: list[int] = (best if vocabulary is None else vocabulary[best]).tolist()
            return chosen
        if vocabulary is not None:
            wide = logits.new_full((len(logits), self._vocabulary), -torch.inf)
            logits = wide.index_copy_(1, vocabulary, logits)
        inputs = [
            SamplingInput(
                replace(request.params.sampling, logprobs=0),
                request.params.tokens,
                request.tokens,
                drafts,
            )
            for request, drafts in rows
        ]
        return [sampled.token for sampled in sample_all(logits, inputs)]

    # -- a pass -----------------------------------------------------------------------------

    def _forward(self, rows: Sequence[DraftRow]) -> Tensor:
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
        return self._draft.forward(step, torch.cat([row.features for row in rows]))

    def _table(self, row: DraftRow) -> tuple[Table, int]:
        """The lease's slots without pages that lack the draft, and the tokens before the row."""
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
            absent = np.zeros(len(slots), bool)
            absent[: len(carried)] = ~carried & (slots[: len(carried)] >= 0)
            past = row.position - page * int(absent[: row.position // page].sum())
            table[anchor] = slots[~absent]
        return table, past
