"""A step's chunks through the model: the only place where requests meet tensors.

A failed load does not stop a forward pass: other ranks would wait for this rank's part of an
all-reduce or for its hidden states. The pass goes on over whatever its slots hold; afterwards the
ranks agree whether all loads succeeded, and if not, none of its output is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.cache import Lease, TieredCache, TransferError
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.graphs.graph_capture import GraphCapture, Wait, graph_capture, no_wait
from kvtide.engine.graphs.graph_inputs import GraphKind, GraphRow
from kvtide.engine.graphs.step_graphs import StepGraph, StepGraphs
from kvtide.engine.page_tables import Numbers, Table, batch_tables, chunk_spans
from kvtide.engine.rank_topology import RankTopology
from kvtide.engine.request import Request
from kvtide.engine.residency.hot_counts import HotCounts
from kvtide.engine.residency.hot_residency import HotResidency
from kvtide.engine.sampling.sampler import score
from kvtide.engine.staging import Staging
from kvtide.layers import Step
from kvtide.models import Model
from kvtide.models.draft import CapturedStates

SCORED = 512
"""Prompt tokens scored at a time: each needs a row of logits."""
WARM_UP_PAST = 4096
"""Tokens before a warm-up pass: kernels are compiled alike for any longer context."""


class StepOutput(Protocol):
    """The output of a step that was launched; the device may still compute it."""

    def last(self, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Logits after the last tokens of these chunks: of each chunk as many rows as `counts`."""

    def rows(self, number: int, first: int, count: int) -> Tensor:
        """Logits after `count` tokens of a chunk, from its token `first` on."""

    @property
    def captured(self) -> Tensor:
        """What a draft takes of every row of the step."""

    def span(self, number: int) -> tuple[int, int, int]:
        """A chunk's first row and end row, and the tokens before it."""

    def token_count(self, number: int) -> int:
        """The tokens of a chunk that were computed."""

    def keep_captured(self) -> None:
        """Keep what is captured: a step launched before it is read overwrites the buffer."""

    def wait_until_late(self) -> bool:
        """Block until most of the step is done; False where the step cannot tell or is short."""


class HiddenOutput:
    """Hidden states of every token; logits are computed for the rows that are asked for."""

    def __init__(
        self,
        runner: Runner,
        hidden: Tensor,
        spans: Numbers,
        captured: Tensor | None = None,
        graph: StepGraph | None = None,
    ) -> None:
        self._runner, self._hidden, self._spans, self._graph = runner, hidden, spans, graph
        self._captured = captured

    def last(self, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        ends = [int(self._spans[number, 1]) for number in numbers]
        spans = zip(ends, counts, strict=True)
        rows = [row for end, count in spans for row in range(end - count, end)]
        return self._runner.logits(self._runner.select(self._hidden, rows))

    def rows(self, number: int, first: int, count: int) -> Tensor:
        start = int(self._spans[number, 0]) + first
        return self._runner.logits(self._hidden[start : start + count])

    @property
    def captured(self) -> Tensor:
        assert self._captured is not None, "nothing is captured, or on the last stage alone"
        return self._captured

    def span(self, number: int) -> tuple[int, int, int]:
        first, end, past = self._spans[number].tolist()
        return first, end, past

    def token_count(self, number: int) -> int:
        return int(self._spans[number, 1] - self._spans[number, 0])

    def keep_captured(self) -> None:
        if self._captured is not None:
            self._captured = self._captured.clone()

    def wait_until_late(self) -> bool:
        if self._graph is None or self._graph.kind is not GraphKind.MIXED:
            return False
        self._graph.wait_until_late()
        return True


class DecodeOutput:
    """Logits of a decode graph; chunk i has row `rows_of[i]`."""

    def __init__(self, runner: Runner, logits: Tensor, rows_of: Sequence[int]) -> None:
        self._runner, self._logits, self._rows_of = runner, logits, rows_of

    def last(self, numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
        assert all(count == 1 for count in counts), "a decode graph has one row per sequence"
        return self._runner.select(self._logits, [self._rows_of[number] for number in numbers])

    def rows(self, number: int, first: int, count: int) -> Tensor:
        row = self._rows_of[number] + first
        return self._logits[row : row + count]

    @property
    def captured(self) -> Tensor:
        raise AssertionError("a decode graph gives logits where nothing is captured")

    def span(self, number: int) -> tuple[int, int, int]:
        raise AssertionError("a decode graph gives logits where nothing is captured")

    def token_count(self, number: int) -> int:
        return 1

    def keep_captured(self) -> None:
        """Nothing is captured."""

    def wait_until_late(self) -> bool:
        return False


class PreparedStep(NamedTuple):
    """A graph whose inputs are written, except the tokens of its first `unsampled` chunks."""

    chunks: Sequence[ScheduledChunk]
    unsampled: int
    spans: Numbers
    graph: StepGraph


class LaunchedStep(NamedTuple):
    """A prepared step that runs on tokens which only the device knows yet."""

    prepared: PreparedStep
    result: Tensor


class UnreadTokens(NamedTuple):
    """What a verify step sampled, as only the device knows it.

    tokens    of all rows: behind a chunk's last token, and behind each of its drafts
    firsts    the first row of each request; on the host
    accepted  (requests,) int32, in the order of `firsts`: how many drafts were sampled
    """

    tokens: Tensor
    firsts: Mapping[Request, int]
    accepted: Tensor

    def of(self, requests: Sequence[Request], staging: Staging) -> tuple[Tensor, Tensor]:
        """The last accepted token of each of these, and how many drafts before it."""
        order = {request: number for number, request in enumerate(self.firsts)}
        numbers = [[order[request], self.firsts[request]] for request in requests]
        of_requests, firsts = staging.to_device(np.array(numbers))[0].unbind(1)
        accepted = self.accepted.index_select(0, of_requests)
        return self.tokens.index_select(0, firsts + accepted), accepted


class Loads:
    """The prefix loads of a step's leases; `error` if one failed."""

    def __init__(self, cache: TieredCache, leases: Sequence[Lease]) -> None:
        self.error: TransferError | None = None
        self._cache = cache
        self._leases = leases

    @property
    def any(self) -> bool:
        return bool(self._leases)

    def wait(self, layer: int) -> None:
        """Order this layer behind its own part of every load."""
        try:
            for lease in self._leases if self.error is None else ():
                self._cache.wait(lease, layer)
        except TransferError as error:
            self.error = error

    def check(self) -> None:
        """Raise on every rank if a load failed on any."""
        if self._leases and not all(self._cache.agreement.all_true([self.error is None])):
            raise self.error or TransferError("the prefix could not be loaded on another rank")


class Runner:
    """Runs steps of up to `max_sequences` sequences and `max_step_tokens` tokens.

    With `cuda_graphs` small steps run as CUDA graphs: one rank then has the whole model, and the
    model runs kernels. All others run eagerly. `launched` counts steps by kind: decode_graph,
    verify_graph, mixed_graph, eager.

    captures     the layers of the model whose inputs a draft takes
    verify_rows  tokens of a sequence in a verify step, at the most; 0 where there is none
    capture      captures graphs; None where all steps run eagerly
    hot_counts   hits and misses of hot pools
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        topology: RankTopology,
        max_sequences: int,
        max_step_tokens: int,
        staging: Staging,
        cuda_graphs: bool = True,
        captures: tuple[int, ...] = (),
        verify_rows: int = 0,
    ) -> None:
        self._captures = captures
        self._model = model
        self._cache = cache
        self._topology = topology
        self._device = cache.config.torch_device
        self._max_sequences, self._max_step_tokens = max_sequences, max_step_tokens
        self._hot = HotResidency(cache)
        self._staging = staging
        self.hot_counts = HotCounts(cache.hardware.hot, staging)
        self._logits_width: int | None = None
        self.launched: Counter[str] = Counter()
        self.capture: GraphCapture | None = None
        self._graphs: StepGraphs | None = None
        if cuda_graphs:
            self.capture = graph_capture(self._device)
            limits = max_sequences, max_step_tokens
            self._graphs = StepGraphs(
                model, cache.view, self.capture, *limits, captures, verify_rows, self._hot
            )

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    # -- warm-up ----------------------------------------------------------------------------

    def warm_up(self, longest: int) -> None:
        """Capture graphs and compile kernels for sequences of up to `longest` tokens."""
        if self._graphs is None:
            return
        self._graphs.capture_all(longest)
        page, size = self._cache.memory.page_tokens, self._graphs.max_step_tokens
        limit = min(self._max_step_tokens, self._max_sequences * longest)
        decodes = [1] * (self._max_sequences - 1)
        while size < limit:
            size = min(limit, size + size // 2)
            # The fewest prefill chunks of so many tokens, and the most.
            self._run_empty(_divided(size, -(-size // longest)), 0)
            self._run_empty(_divided(size, self._max_sequences), 0)
            first = min(size - len(decodes), longest)
            if past := min(WARM_UP_PAST, longest - first) // page * page:
                self._run_empty([first, *decodes], past)

    def _run_empty(self, counts: Sequence[int], past: int) -> None:
        """A pass of sequences with `counts` new tokens after `past`, which writes no page."""
        page, ends = self._cache.memory.page_tokens, np.cumsum(counts)
        rows = np.stack([ends - counts, ends, np.full(len(counts), past)], 1).astype(np.int32)
        tables = []
        for count in counts:
            slots = np.full(-(-(past + count) // page), -1, np.int32)
            slots[: past // page] = 0
            table = {anchor.name: slots for anchor in self._cache.memory.anchors}
            tables.append(table | self._hot.padding(len(slots)))
        positions = np.concatenate([np.arange(past, past + count) for count in counts])
        step = self._step(np.stack([np.zeros_like(positions), positions]), rows, tables, no_wait)
        self.logits(self._model.forward(step)[-1:])

    # -- a step -----------------------------------------------------------------------------

    def run(self, chunks: Sequence[ScheduledChunk]) -> StepOutput:
        """Launch the chunks as one step; raises `TransferError` if a prefix failed to load."""
        leases = [chunk.request.held for chunk in chunks if chunk.request.held.loading]
        loads = Loads(self._cache, leases)
        spans = chunk_spans(chunks)
        if (output := self._run_graph(chunks, spans, loads)) is not None:
            return output
        self.launched["eager"] += 1
        step = self._eager_step(chunks, spans, loads)
        captured = CapturedStates(self._captures)
        before = None
        if not self._model.memory.is_first_stage:
            before = self._receive(step.tokens, captured)
        hidden = self._model.forward(step, before, captured)
        self._topology.send_hidden(hidden)
        for state in captured.states.values():
            self._topology.send_hidden(state)
        loads.check()
        whole = bool(self._captures) and self._model.memory.is_last_stage
        return HiddenOutput(self, hidden, spans, captured.joined if whole else None)

    def _receive(self, tokens: Tensor, captured: CapturedStates) -> Tensor:
        """The output of the stage before, and what was captured up to there."""
        before = self._topology.receive_hidden(self._model.carried(tokens))
        first = self._model.memory.own_layers.start
        for layer in sorted({layer for layer in self._captures if layer < first}):
            captured.enter(layer, self._topology.receive_hidden(self._model.carried(tokens)))
        return before

    def prepare(self, chunks: Sequence[ScheduledChunk], max_accepted: int) -> PreparedStep | None:
        """Write the inputs of the next step into a graph, None if no graph fits. What is accepted
        in the current step moves the rows by up to `max_accepted` tokens.

        Chunks that end past their request's known tokens come first: these are sampled last.
        """
        if self._graphs is None:
            return None
        rows = self._graph_rows(chunks)
        graph = self._graphs.fitting(rows, False, max_accepted)
        if graph is None:
            return None
        graph.prepare(rows)
        unsampled = sum(not chunk.is_sampled for chunk in chunks)
        return PreparedStep(chunks, unsampled, chunk_spans(chunks), graph)

    def launch_prepared(self, step: PreparedStep) -> StepOutput:
        """Launch a prepared step now that the host knows its tokens."""
        self._count(step.graph)
        tokens = [chunk.request.tokens[-1] for chunk in step.chunks[: step.unsampled]]
        return self._graph_output(step.graph, step.graph.launch_prepared(tokens), step.spans)

    def launch_ahead(
        self, step: PreparedStep, requests: Sequence[Request], sampled: Tensor
    ) -> LaunchedStep:
        """Launch a prepared step before the host knows its tokens.

        `sampled` holds a token of each of `requests`, on the device.
        """
        self._count(step.graph)
        rows = {request.number: row for row, request in enumerate(requests)}
        places = [rows[chunk.request.number] for chunk in step.chunks[: step.unsampled]]
        return LaunchedStep(step, step.graph.launch_ahead(sampled, places))

    def launch_drafted(self, step: PreparedStep, drafts: Tensor) -> LaunchedStep:
        """Launch a prepared verify step before the host has read its drafts."""
        self._count(step.graph)
        return LaunchedStep(step, step.graph.launch_drafted(drafts))

    def launch_verify_ahead(
        self, step: PreparedStep, sampled: UnreadTokens, drafts: Tensor
    ) -> LaunchedStep:
        """Launch a prepared verify step before the host knows where it begins."""
        self._count(step.graph)
        requests = [chunk.request for chunk in step.chunks]
        last, accepted = sampled.of(requests, self._staging)
        return LaunchedStep(step, step.graph.launch_verify_ahead(last, accepted, drafts))

    def read_launched(self, step: LaunchedStep, chunks: Sequence[ScheduledChunk]) -> StepOutput:
        """The output of those chunks of a launched step that are still wanted."""
        rows = {chunk.request: row for row, chunk in enumerate(step.prepared.chunks)}
        spans = step.prepared.spans[[rows[chunk.request] for chunk in chunks]]
        spans[:, 2] = [chunk.start for chunk in chunks]
        return self._graph_output(step.prepared.graph, step.result, spans)

    def _run_graph(
        self, chunks: Sequence[ScheduledChunk], spans: Numbers, loads: Loads
    ) -> StepOutput | None:
        if self._graphs is None or spans[-1, 1] > self._graphs.max_step_tokens:
            return None
        rows = self._graph_rows(chunks)
        graph = self._graphs.fitting(rows, loads.any)
        if graph is None:
            return None
        self._count(graph)
        result = graph.launch(rows, loads.wait)
        loads.check()
        return self._graph_output(graph, result, spans)

    def _graph_rows(self, chunks: Sequence[ScheduledChunk]) -> list[GraphRow]:
        rows = []
        for chunk, (version, table) in zip(chunks, self._hot.tables(chunks), strict=True):
            lease, past = chunk.request.held, chunk.start
            rows.append(GraphRow(chunk.new, past, past, lease.number, version, table))
        return rows

    def _count(self, graph: StepGraph) -> None:
        self.launched[f"{graph.kind.value}_graph"] += 1

    def _graph_output(self, graph: StepGraph, result: Tensor, spans: Numbers) -> StepOutput:
        found, captured = graph.parts(result)
        if graph.kind is GraphKind.DECODE and captured is None:
            return DecodeOutput(self, found, spans[:, 0].tolist())
        return HiddenOutput(self, found, spans, captured, graph)

    def _eager_step(self, chunks: Sequence[ScheduledChunk], rows: Numbers, loads: Loads) -> Step:
        tables = [table for _, table in self._hot.tables(chunks)]
        new = [chunk.new for chunk in chunks]
        positions = [
            np.arange(chunk.request.computed, chunk.request.computed + chunk.tokens)
            for chunk in chunks
        ]
        both = np.stack([np.concatenate(new), np.concatenate(positions)])
        return self._step(both, rows, tables, loads.wait)

    def _step(
        self, both: NDArray[np.int64], rows: Numbers, tables: Sequence[Table], wait: Wait
    ) -> Step:
        """`both` stacks tokens and their positions."""
        sequences, batch = batch_tables(rows, tables, self._staging)
        tokens, positions = self._staging.to_device(both.astype(np.int32))[0].long()
        page, view = self._cache.memory.page_tokens, self._cache.view
        self._hot.advance()
        return Step(tokens, positions, sequences, page, view, wait, batch, self._hot.pools)

    # -- logits -----------------------------------------------------------------------------

    def logits(self, hidden: Tensor) -> Tensor:
        """The same bits on every rank: those that the last stage computes."""
        logits = self._model.logits(hidden) if self._topology.is_last_stage else None
        if self._topology.stages == 1 and logits is not None:
            return logits
        if self._logits_width is None:
            width = torch.tensor([0 if logits is None else logits.shape[-1]], device=self._device)
            self._logits_width = int(self._topology.broadcast_logits(width))
        if logits is None:
            logits = torch.empty(len(hidden), self._logits_width, device=self._device)
        return self._topology.broadcast_logits(logits)

    def select(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """These rows of a tensor; the tensor itself if they are all of it."""
        everything = len(rows) == len(tensor) and list(rows) == list(range(len(rows)))
        return tensor if everything else tensor.index_select(0, self._staging.indices(rows))


def _divided(total: int, parts: int) -> list[int]:
    """Into numbers that differ by one at the most."""
    return [(total + part) // parts for part in range(parts)]


def score_prompt(chunk: ScheduledChunk, number: int, output: StepOutput, staging: Staging) -> None:
    """Score the prompt's tokens that follow the chunk's, if the request asks for that."""
    request, end = chunk.request, chunk.end
    prompt, count = request.params.tokens, request.params.score
    if count is not None:
        following = prompt[request.computed + 1 : end + 1]
        for first in range(0, len(following), SCORED):
            some = following[first : first + SCORED]
            rows = output.rows(number, first, len(some))
            request.scores += score(rows, some, count, staging)
