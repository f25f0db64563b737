"""CUDA graphs of small steps: which sizes are captured, and filling one for a step.

A small step is hundreds of short kernels; a graph launches them at once, or one graph per layer.
Each graph is captured for a number of tokens, a number of sequences and a maximum sequence length.
A step takes the smallest graph that fits. The rest of it is padding: tokens of sequences without
slots, which write nothing.

There are three kinds:

decode graphs  one token per sequence, for a number of sequences; they give logits
verify graphs  up to a few tokens per sequence, drafts among them; they give hidden states.
               Attention kernels size their tiles by the most tokens of a sequence
mixed graphs   prefill chunks beside decode tokens, up to 1,024 tokens; they give hidden states.
               Each layer is a graph of its own: a step runs while its prefixes still load

Where a draft captures hidden states of the target, all kinds give these beside the hidden states.

Loads and backups run on streams of their own beside a replay: a layer reads no loading page before
it has waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile

import torch
from torch import Tensor

from kvtide.engine.graphs.graph_capture import GraphCapture, Wait, no_wait
from kvtide.engine.graphs.graph_inputs import GraphInputs, GraphKind, GraphRow, GraphSize
from kvtide.engine.residency.hot_residency import HotResidency
from kvtide.layers import Step
from kvtide.models import Model
from kvtide.models.draft import CapturedStates

MIN_LENGTH = 4096
"""Sequence length of the first graphs; the next ones take four times as many tokens each."""
MIXED_TOKENS = (8, 64, 128, 192, 256, 384, 512, 576, 640, 768, 896, 1024)
"""Sizes of mixed graphs. Larger steps take longer to compute than to launch kernel by kernel.

The first is for the few tokens that follow a cached prefix: kernels treat them as those of a verify
step, and padding costs little. Indexers and selected attention compute every padded row."""
TOKENS_PER_PREFILL = 64
"""A mixed graph of n times as many tokens takes n prefill chunks: attention work is divided badly
over more. The smallest takes one, and the largest any number, so that every step has a graph."""


View = Callable[[str, int], Mapping[str, Tensor]]


def decode_batches(max_sequences: int) -> Iterator[int]:
    """Batch sizes of decode graphs."""
    yield from (size for size in (1, 2, 4) if size < max_sequences)
    step, size = 8, 8
    while size < max_sequences:
        yield size
        step = 8 if size < 64 else 32
        size += step
    yield max_sequences


def lengths() -> Iterator[int]:
    """Maximum sequence lengths of graphs."""
    return (MIN_LENGTH * 4**number for number in count())


class StepGraph:
    """The captured pass of one size; its output buffer holds `max_rows` rows.

    captures  layers of the model whose inputs a draft takes
    hot       pools that live on the host
    """

    def __init__(
        self,
        model: Model,
        view: View,
        capture: GraphCapture,
        size: GraphSize,
        max_rows: int,
        captures: tuple[int, ...] = (),
        hot: HotResidency | None = None,
    ) -> None:
        self._size, self._capture = size, capture
        self._inputs = inputs = GraphInputs(model.memory, capture, size)
        page = model.memory.page_tokens

        def forward(wait: Wait) -> Tensor:
            tokens, positions = inputs.tokens.long(), inputs.positions.long()
            step = Step(
                tokens, positions, (), page, view, wait, inputs.batch, hot.pools if hot else {}
            )
            if hot is not None:
                hot.advance()
            if captures:
                return self._forward_captured(model, step, captures)
            hidden = model.forward(step)
            return model.logits(hidden) if size.kind is GraphKind.DECODE else hidden

        self._captured_shape: torch.Size | None = None
        self._output = f"{size.kind.value} captured" if captures else size.kind.value
        mixed = size.kind is GraphKind.MIXED
        self._graph = capture.capture(forward, self._output, max_rows, per_layer=mixed)

    def _forward_captured(self, model: Model, step: Step, captures: tuple[int, ...]) -> Tensor:
        captured = CapturedStates(captures)
        hidden = model.forward(step, None, captured)
        joined = captured.joined
        self._captured_shape = joined.shape[1:]
        return torch.cat([joined.flatten(1), hidden], dim=1)

    def parts(self, result: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of a replay's result: logits or hidden states, and captured states if there are any."""
        if self._captured_shape is None:
            return result, None
        width = self._captured_shape.numel()
        return result[:, width:], result[:, :width].unflatten(1, self._captured_shape)

    @property
    def kind(self) -> GraphKind:
        return self._size.kind

    def launch(self, rows: Sequence[GraphRow], wait: Wait) -> Tensor:
        """Replay for these rows: logits of a decode graph, else hidden states; valid until the next
        replay."""
        self.prepare(rows)
        self._inputs.send()
        return self._replay(wait)

    def prepare(self, rows: Sequence[GraphRow]) -> None:
        """Write the inputs on the host."""
        self._inputs.open()
        self._inputs.fill(rows)

    def launch_prepared(self, tokens: Sequence[int]) -> Tensor:
        """Replay what is prepared, with these as its first tokens."""
        self._inputs.host_tokens[: len(tokens)] = tokens
        self._inputs.send()
        return self._replay(no_wait)

    def launch_ahead(self, sampled: Tensor, places: Sequence[int]) -> Tensor:
        """Replay what is prepared; its first tokens are taken from `sampled`, on the device."""
        first = self._inputs.tokens[: len(places)]
        self._inputs.host_tokens[: len(places)] = places
        self._inputs.send()
        first.copy_(sampled.index_select(0, first))
        return self._replay(no_wait)

    def launch_drafted(self, drafts: Tensor) -> Tensor:
        """Replay what is prepared; tokens below 0 are `unread_draft`s of these, on the device."""
        self._inputs.send()
        return self._replay_drafted(drafts)

    def _replay_drafted(self, drafts: Tensor) -> Tensor:
        tokens, drafted = self._inputs.tokens, drafts.flatten()
        found = drafted.index_select(0, (-1 - tokens).clamp(min=0))
        tokens.copy_(torch.where(tokens < 0, found, tokens))
        return self._replay(no_wait)

    def launch_verify_ahead(self, last: Tensor, accepted: Tensor, drafts: Tensor) -> Tensor:
        """Replay what is prepared, with every sequence moved by its `accepted` tokens: `last` ones
        are its first. Tokens below 0 are `unread_draft`s. All are on the device."""
        inputs, count = self._inputs, len(last)
        inputs.send()
        spans, owners = inputs.batch.rows[:count], inputs.batch.owners[: inputs.used]
        spans[:, 2] += accepted
        inputs.positions[: inputs.used] += accepted.index_select(0, owners)
        inputs.tokens.index_copy_(0, spans[:, 0].long(), last.int())
        return self._replay_drafted(drafts)

    def wait_until_late(self) -> None:
        """Block until most of the last replay is done; for mixed graphs."""
        self._graph.wait_until_late()

    def _replay(self, wait: Wait) -> Tensor:
        self._graph.replay(wait)
        return self._capture.output(self._output, self._inputs.used)


class StepGraphs:
    """The graphs of one model, captured when first needed; for steps of up to `max_sequences`
    sequences and `max_step_tokens` tokens.

    verify_rows  tokens of a sequence in a verify step, at the most; 0 for no verify graphs
    """

    def __init__(
        self,
        model: Model,
        view: View,
        capture: GraphCapture,
        max_sequences: int,
        max_step_tokens: int,
        captures: tuple[int, ...] = (),
        verify_rows: int = 0,
        hot: HotResidency | None = None,
    ) -> None:
        self._model, self._view, self._capture, self._hot = model, view, capture, hot
        self._captures, self._verify_rows = captures, verify_rows
        self._max_sequences = max_sequences
        self._batches = sorted(set(decode_batches(max_sequences)))
        enough = next((size for size in MIXED_TOKENS if size >= max_step_tokens), MIXED_TOKENS[-1])
        self._tokens = [size for size in MIXED_TOKENS if size <= enough]
        self._captured: dict[GraphSize, StepGraph] = {}

    @property
    def max_step_tokens(self) -> int:
        """Larger steps have no graph."""
        return max(self._max_sequences, self._tokens[-1])

    def fitting(
        self, rows: Sequence[GraphRow], loading: bool, max_accepted: int = 0
    ) -> StepGraph | None:
        """The smallest graph for these rows, of which some may be `loading` their prefix, or move
        by up to so many tokens."""
        counts = [len(row.tokens) for row in rows]
        prefills = sum(count > 1 for count in counts)
        longest = max(row.past + len(row.tokens) for row in rows)
        length = next(length for length in lengths() if length >= longest + max_accepted)
        kinds = [GraphKind.MIXED]
        if not loading and max(counts) <= self._verify_rows:
            kinds = [GraphKind.VERIFY, GraphKind.MIXED]
        if not loading and not prefills:
            kinds = [GraphKind.DECODE]
        for size in (size for kind in kinds for size in self._sizes(kind, length)):
            fits = len(rows) <= size.sequences and prefills <= size.prefills
            if fits and sum(counts) <= size.tokens:
                return self._graph(size)
        return None

    def capture_all(self, longest: int) -> None:
        """Capture every graph for sequences of up to `longest` tokens.

        The largest come first: the memory pool they need is enough for all.
        """
        shorter = [*takewhile(lambda length: length < longest, lengths())]
        last = next(length for length in lengths() if length >= longest)
        for length in reversed([*shorter, last]):
            for kind in (GraphKind.MIXED, GraphKind.VERIFY, GraphKind.DECODE):
                for size in reversed(self._sizes(kind, length)):
                    self._graph(size)

    def _sizes(self, kind: GraphKind, length: int) -> list[GraphSize]:
        limit, last = self._max_sequences, self._tokens[-1]
        if kind is GraphKind.DECODE:
            return [GraphSize(kind, batch, batch, 0, 1, length) for batch in self._batches]
        if kind is GraphKind.VERIFY:
            rows = self._verify_rows
            tokens = [batch * rows for batch in self._batches if batch * rows <= MIXED_TOKENS[-1]]
            counts = [(n, min(limit, n)) for n in (tokens if rows else ())]
            return [GraphSize(kind, n, count, count, rows, length) for n, count in counts]
        prefills = {
            n: limit if n == last else min(limit, max(1, n // TOKENS_PER_PREFILL))
            for n in self._tokens
        }
        return [GraphSize(kind, n, min(limit, n), prefills[n], n, length) for n in self._tokens]

    def _graph(self, size: GraphSize) -> StepGraph:
        if size not in self._captured:
            decode = size.kind is GraphKind.DECODE
            max_rows = self._max_sequences if decode else MIXED_TOKENS[-1]
            self._captured[size] = StepGraph(
                *(self._model, self._view, self._capture, size, max_rows),
                *(self._captures, self._hot),
            )
        return self._captured[size]
