"""Drafts by a draft model (EAGLE3, MTP) whose KV lies in the target's pages.

After a step the draft is extended over the step's tokens, with what the target computed there: an
entry at position t needs the token at t + 1. While there are no drafts this waits for several steps
(`deferred_rows`). Its last row predicts the first draft; each further draft takes a pass of one
row, on the draft's own hidden state. Those rows are written behind the extended ones, and the next
extension overwrites them. Where steps run as CUDA graphs, so do these passes (`draft_graphs`), but
for the tokens of prefill chunks, and for those that waited.

A page of the prefix without its draft sidecar is left out of the draft's page table: the draft then
attends to the others. Keys are rotated before they are stored, so that nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.graphs.graph_capture import GraphCapture, no_wait
from kvtide.engine.graphs.graph_inputs import GraphRow
from kvtide.engine.page_tables import Numbers, Table, TableVersion, batch_tables
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampling.sampler import SamplingInput, sample_all, sampling_columns
from kvtide.engine.speculation.deferred_rows import DeferredRows, DraftRow
from kvtide.engine.speculation.draft_graphs import DraftGraphRow, DraftGraphs
from kvtide.engine.speculation.drafter import DraftLimits, DraftWish, UnreadDrafts, UnreadStep
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.models.draft import DraftModel

_ALONE = RankTopology()


@dataclass(slots=True)
class _Extended:
    """How far a lease's draft is extended, and the hidden state of the last row, (1, …); None
    where a graph has it."""

    end: int
    hidden: Tensor | None


class _DraftTable(NamedTuple):
    """A lease's slots without pages that lack the draft; `past` counts without them."""

    version: TableVersion
    slots: Table
    past: int


class _Launched(NamedTuple):
    """A replay's drafts, and the call that waits for them."""

    drafts: UnreadDrafts
    read: Callable[[], list[Tensor]]

    def of(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        (tokens,), rows = self.read(), self.drafts.rows
        every = tokens.tolist()
        return [tuple(every[rows[request]][:limit]) for request, limit in wishes]


@dataclass(slots=True)
class _Drafting:
    """A request and its drafts so far."""

    request: Request
    limit: int
    drafts: list[int] = field(default_factory=list)

    def row(self, source: int) -> DraftRow:
        """The pass behind the last draft, on the hidden state that it was sampled from."""
        position = self.request.length - 2 + len(self.drafts)
        return DraftRow(self.request.held, position, self.drafts[-1:], source)

    @property
    def sampling_input(self) -> SamplingInput:
        return _sampling_input(self.request, self.drafts)


class ModelDrafter:
    """`cost`: of a pass of the draft, in decode steps.

    draft       beside the target's last stage; None on ranks of earlier stages
    captures    the draft's, on every rank
    vocabulary  tokens of the target

    The ranks of the last stage run the draft together. All ranks take the drafts that the logits
    rank samples.
    """

    cost = 0.07

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
        self._tables: WeakKeyDictionary[Lease, _DraftTable] = WeakKeyDictionary()
        self._graphs: DraftGraphs | None = None
        self._launched: _Launched | None = None
        self._drafted_ahead: set[Request] = set()
        self._deferred = DeferredRows(cache.memory.page_tokens, self._staging)
        self.captures, self.writes = captures, cache.memory.draft_sidecars

    def use_graphs(self, capture: GraphCapture, limits: DraftLimits) -> None:
        if self.model is not None:
            view = self._cache.view
            self._graphs = DraftGraphs(self.model, view, capture, self._staging, limits)

    def warm_up(self, longest: int) -> None:
        if self._graphs is not None:
            self._graphs.capture_all(longest)

    # -- extension --------------------------------------------------------------------------

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        """Extend the draft over those tokens of a step whose next token is known."""
        if self.model is None:
            return
        ahead, self._drafted_ahead, rows = self._drafted_ahead, set(), {}
        if not ahead:
            self._launched = None
        for number, chunk in enumerate(chunks):
            request = chunk.request
            if request in ahead:
                self._extended[request.held] = _Extended(request.length - 1, None)
            elif request.params.speculate:
                row = self._row(request, *output.span(number))
                if row is not None:
                    rows[request] = row
        if not rows:
            return
        if not wishes and not ahead and _are_decoded(rows):
            if self._deferred.add(rows, output.captured):
                self._catch_up(self.model)
            return
        self._catch_up(self.model)
        if self._graphs is not None and not ahead:
            self._launched = self._launch(self.model, self._graphs, rows, output.captured, wishes)
            return
        self._extend(self.model, list(rows.values()), output.captured)

    def _catch_up(self, draft: DraftModel) -> None:
        """Extend over all rows that were deferred."""
        if (deferred := self._deferred.take()) is not None:
            self._extend(draft, *deferred)

    def _extend(self, draft: DraftModel, rows: Sequence[DraftRow], captured: Tensor) -> None:
        """A pass over the rows outside of graphs."""
        hidden, end = self._forward_captured(draft, rows, captured), 0
        for row in rows:
            end += len(row.tokens)
            self._extended[row.lease] = _Extended(row.end, hidden[end - 1 : end])

    def captured(self, output: StepOutput, number: int) -> Callable[[], list[Tensor]] | None:
        if self.model is None or not self._topology.is_logits_rank:
            return None
        _, end, _ = output.span(number)
        return self._staging.read_back([output.captured[end - 1 : end]])

    def resume(self, request: Request) -> None:
        """The next step's tokens are the first to extend over, or the prompt's last one once more:
        then drafts come before that step."""
        self._extended[request.held] = _Extended(request.computed, None)

    def extend_resumed(self, wishes: Sequence[DraftWish], captured: Sequence[Tensor]) -> None:
        if self.model is None:
            return
        states = torch.cat([*captured])
        rows = {
            request: DraftRow(request.held, request.computed - 1, request.tokens[-1:], number)
            for number, (request, _) in enumerate(wishes)
        }
        if self._graphs is not None:
            self._launched = self._launch(self.model, self._graphs, rows, states, wishes)
        else:
            self._extend(self.model, list(rows.values()), states)

    def _row(self, request: Request, first: int, end: int, past: int) -> DraftRow | None:
        """What is new to the draft of the step's rows [first, end) after `past` tokens."""
        lease = request.held
        known, begin = self._extended.get(lease), self._deferred.end(request)
        if begin is None:
            begin = lease.cached_tokens if known is None else known.end
        assert past <= begin, "the target skipped tokens that the draft has yet to see"
        last = min(past + end - first, request.length - 1)
        if last <= begin:
            return None
        return DraftRow(lease, begin, request.tokens[begin + 1 : last + 1], first + begin - past)

    def _launch(
        self,
        draft: DraftModel,
        graphs: DraftGraphs,
        rows: Mapping[Request, DraftRow],
        captured: Tensor,
        wishes: Sequence[DraftWish],
    ) -> _Launched | None:
        """Launch the extension and all drafts of the wishes. Of a long row all but the last token
        are extended over before."""
        long = {each: row for each, row in rows.items() if len(row.tokens) > graphs.max_rows}
        if long:
            before = [row._replace(tokens=row.tokens[:-1]) for row in long.values()]
            self._forward_captured(draft, before, captured)
        limits = dict(wishes)
        graph_rows = []
        for request, row in rows.items():
            self._extended[row.lease] = _Extended(row.end, None)
            if request in long:
                done = len(row.tokens) - 1
                row = DraftRow(row.lease, row.position + done, row.tokens[-1:], row.source + done)
            limit = limits.get(request, 0)
            columns = self._columns(request) if limit else None
            graph_rows.append(DraftGraphRow(self._graph_row(row), row.source, limit, columns))
        graph = graphs.fitting(graph_rows, drafting=bool(wishes))
        tokens = graph.launch(graph_rows, captured)
        if not wishes:
            return None
        drafts = UnreadDrafts(tokens, {request: n for n, request in enumerate(rows)})
        return _Launched(drafts, self._staging.read_back([tokens]))

    @property
    def can_draft_ahead(self) -> bool:
        return self._graphs is not None

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        """Extend over all rows of the verify step: those behind the accepted ones are overwritten
        by the next extension. Drafts follow the last accepted token."""
        graphs, limits, rows = self._graphs, dict(wishes), list[DraftGraphRow]()
        if self.model is None or graphs is None:
            return None
        drafting: list[Request] = []
        for number, chunk in enumerate(step.chunks):
            request, count = chunk.request, 1 + len(chunk.drafts)
            if not request.params.speculate:
                continue
            known = self._extended.get(request.held)
            if known is None or known.end != request.length - 1 or count > graphs.max_rows:
                return None
            _, end, _ = step.output.span(number)
            first, limit = step.sampled.firsts[request], limits.get(request, 0)
            row = DraftRow(request.held, known.end, range(first, first + count), end - count)
            columns = self._columns(request, behind=True) if limit else None
            rows.append(DraftGraphRow(self._graph_row(row), row.source, limit, columns))
            drafting.append(request)
        graph = graphs.fitting(rows, drafting=True)
        _, accepted = step.sampled.of(drafting, self._staging)
        tokens = graph.launch_ahead(rows, step.output.captured, step.sampled.tokens, accepted)
        drafts = UnreadDrafts(tokens, {request: n for n, request in enumerate(drafting)})
        self._launched = _Launched(drafts, self._staging.read_back([tokens]))
        self._drafted_ahead = set(drafting)
        return drafts

    def undo_ahead(self, request: Request) -> None:
        self._drafted_ahead.discard(request)

    def _graph_row(self, row: DraftRow) -> GraphRow:
        version, table, past = self._table(row)
        return GraphRow(row.tokens, past, row.position, row.lease.number, version, table)

    def _columns(self, request: Request, *, behind: bool = False) -> NDArray[np.float64] | None:
        """How the request's drafts are sampled; None if greedily. `behind`: a token that is not
        read yet comes first, and up to as many drafts as there may be behind it."""
        if request.params.sampling.is_cold:
            return None
        assert self.model is not None and self._graphs is not None, "they are drafted here"
        vocabulary = self.model.vocabulary
        width = self._vocabulary if vocabulary is None else len(vocabulary)
        max_drafts = self._graphs.max_rows - 1
        drafted = range(1, 1 + 2 * max_drafts) if behind else range(max_drafts)
        inputs = [_sampling_input(request, [0] * count) for count in drafted]
        return sampling_columns(inputs, width).T

    @property
    def unread(self) -> UnreadDrafts | None:
        return None if self._launched is None else self._launched.drafts

    # -- proposal ---------------------------------------------------------------------------

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        if not wishes:
            return []
        if self._graphs is not None:
            assert self._launched is not None, "an extension comes before"
            return self._launched.of(wishes)
        drafting = [_Drafting(*wish) for wish in wishes]
        hidden = None
        if self.model is not None:
            states = [self._extended[each.request.held].hidden for each in drafting]
            hidden = torch.cat([state for state in states if state is not None])
        active = drafting
        while active:
            self._draft_next(active, hidden)
            going_on = [n for n, each in enumerate(active) if len(each.drafts) < each.limit]
            active = [active[n] for n in going_on]
            if active and self.model is not None and hidden is not None:
                rows = [each.row(n) for n, each in zip(going_on, active, strict=True)]
                features = hidden[self._staging.indices(going_on)]
                hidden = self._forward(self.model, rows, features)
        return [tuple(each.drafts) for each in drafting]

    def _draft_next(self, active: Sequence[_Drafting], hidden: Tensor | None) -> None:
        """One more draft for each, the same on all ranks."""
        device = self._cache.config.torch_device
        tokens = torch.empty(len(active), dtype=torch.int64, device=device)
        if self.model is not None and hidden is not None:
            logits = self.model.logits(hidden)
            if self._topology.is_logits_rank:
                tokens = self._sampled(self.model, active, logits)
        drafts = self._topology.broadcast_logits(tokens).tolist()
        for each, token in zip(active, drafts, strict=True):
            each.drafts.append(token)

    def _sampled(self, draft: DraftModel, active: Sequence[_Drafting], logits: Tensor) -> Tensor:
        """The next draft of each, with the noise of the target's tokens."""
        vocabulary = draft.vocabulary
        if all(each.request.params.sampling.is_greedy for each in active):
            best = logits.argmax(-1)
            return best if vocabulary is None else vocabulary[best]
        if vocabulary is not None:
            wide = logits.new_full((len(logits), self._vocabulary), -torch.inf)
            logits = wide.index_copy_(1, vocabulary, logits)
        sampled = sample_all(logits, [each.sampling_input for each in active])
        return self._staging.indices([one.token for one in sampled])

    # -- a pass -----------------------------------------------------------------------------

    def _forward_captured(
        self, draft: DraftModel, rows: Sequence[DraftRow], captured: Tensor
    ) -> Tensor:
        """A pass over rows on what the target computed there."""
        parts = [captured[row.source : row.source + len(row.tokens)] for row in rows]
        return self._forward(draft, rows, draft.features(torch.cat(parts)))

    def _forward(self, draft: DraftModel, rows: Sequence[DraftRow], features: Tensor) -> Tensor:
        """The draft's hidden states, a row for every token."""
        counts = [len(row.tokens) for row in rows]
        ends = np.cumsum(counts)
        found = [self._table(row) for row in rows]
        past = [table.past for table in found]
        spans = np.stack([ends - counts, ends, past], axis=1).astype(np.int32)
        tokens = np.concatenate([row.tokens for row in rows])
        positions = [
            row.position + np.arange(count) for row, count in zip(rows, counts, strict=True)
        ]
        both = np.stack([tokens, np.concatenate(positions)]).astype(np.int32)
        sequences, batch = batch_tables(spans, [table.slots for table in found], self._staging)
        ids, at = self._staging.to_device(both)[0].long()
        page, view = self._cache.memory.page_tokens, self._cache.view
        step = Step(ids, at, sequences, page, view, no_wait, batch)
        return draft.forward(step, features)

    def _table(self, row: DraftRow) -> _DraftTable:
        """The lease's slots without pages that lack the draft, and the tokens before the row.

        Pages behind a window have no slot and are left out, too: those that lack the draft move
        the window back.
        """
        page, lease = self._cache.memory.page_tokens, row.lease
        whole = row.position // page
        version = (*lease.table_version, whole, self._cache.index.sidecars_version)
        known = self._tables.get(lease)
        if known is None or known.version != version:
            known = self._tables[lease] = self._draft_table(lease, whole, version)
        return known._replace(past=row.position - page * known.past)

    def _draft_table(self, lease: Lease, whole: int, version: TableVersion) -> _DraftTable:
        """With `past`, the pages that are left out of the first `whole` ones."""
        slots_of: dict[str, Numbers] = {}
        left_out = 0
        for pool in self.writes:
            anchor = self._cache.memory.pool(pool).follows
            assert anchor is not None, "a draft's pool follows an anchor"
            if anchor in slots_of:
                continue
            slots = self._cache.page_table(lease, anchor).astype(np.int32)
            carried = self._cache.carries(lease, pool)
            absent = slots < 0
            absent[whole:] = False
            absent[: len(carried)] |= ~carried
            left_out = int(absent[:whole].sum())
            slots_of[anchor] = slots[~absent]
        return _DraftTable(version, slots_of, left_out)


def _are_decoded(rows: Mapping[Request, DraftRow]) -> bool:
    """Whether each is of one token that was decoded: what is behind a prompt's last token waits for
    nothing, and a peer may get it."""
    return all(
        len(row.tokens) == 1 and row.position >= len(request.params.tokens)
        for request, row in rows.items()
    )


def _sampling_input(request: Request, drafted: Sequence[int]) -> SamplingInput:
    params = request.params
    sampling = replace(params.sampling, logprobs=0)
    return SamplingInput(sampling, params.tokens, request.tokens, drafted)
