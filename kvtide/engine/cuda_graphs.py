"""CUDA graphs of small steps: which sizes are captured, and filling one for a step.

A small step is hundreds of short kernels; a graph launches them at once, or one graph per layer.
Each graph is captured for a number of tokens, a number of sequences and a maximum sequence length.
A step takes the smallest graph that fits. The rest of it is padding: tokens of sequences without
slots, which write nothing.

There are two kinds:

decode graphs  one token per sequence, for a number of sequences; they give logits
mixed graphs   prefill chunks beside decode tokens, up to 1,024 tokens; they give hidden states.
               Each layer is a graph of its own: a step runs while its prefixes still load

Where a draft captures hidden states of the target, both kinds give these beside the hidden states.

Loads and backups run on streams of their own beside a replay: a layer reads no loading page before
it has waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtide.engine.graph_capture import GraphCapture, Wait, no_wait
from kvtide.engine.page_tables import Table, TableVersion
from kvtide.layers import Step
from kvtide.layers.step import Batch, Bounds
from kvtide.models import Model
from kvtide.models.draft import CapturedStates

MIN_LENGTH = 4096
"""Sequence length of the first graphs; the next ones take four times as many tokens each."""
MIXED_TOKENS = (64, 128, 192, 256, 384, 512, 576, 640, 768, 896, 1024)
"""Sizes of mixed graphs. Larger steps take longer to compute than to launch kernel by kernel."""
TOKENS_PER_PREFILL = 64
"""A mixed graph of n times as many tokens takes n prefill chunks: attention work is divided badly
over more. The largest takes any number, so that every step of its size has a graph."""


class GraphRow(NamedTuple):
    """One sequence of a step: new tokens, how many precede them, and its page table.

    `lease` and `version` identify the table, so that an unchanged one is not written again.
    """

    tokens: Sequence[int]
    past: int
    lease: int
    version: TableVersion
    table: Table


class GraphSize(NamedTuple):
    """What a graph is captured for; `prefills` sequences may have several tokens."""

    tokens: int
    sequences: int
    prefills: int
    length: int

    @property
    def decode(self) -> bool:
        return self.prefills == 0

    @property
    def bounds(self) -> Bounds:
        if self.decode:
            return Bounds(1, self.length - 1, 0, singles=True)
        # Padding is one more sequence.
        return Bounds(self.tokens, self.length - 1, self.prefills + 1, singles=True)


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
    """

    def __init__(
        self,
        model: Model,
        view: View,
        capture: GraphCapture,
        size: GraphSize,
        max_rows: int,
        captures: tuple[int, ...] = (),
    ) -> None:
        memory, self._size, self._capture = model.memory, size, capture
        # Padding of a mixed graph is one more sequence.
        self._sequences = size.sequences + (0 if size.decode else 1)
        names = [anchor.name for anchor in memory.anchors]
        pages = -(-max(size.length, size.tokens) // memory.page_tokens)
        numbers = 3 * size.tokens + self._sequences * (3 + len(names) * pages)
        self._inputs = capture.input_buffer(numbers)
        self._host = self._parts(self._inputs.open(), names)
        self._filled: list[tuple[int, TableVersion] | None] = [None] * self._sequences
        self._used = 0
        self._fill(())
        self._inputs.send()
        tokens, positions, owners, rows, tables = self._parts(self._inputs.on_device, names)
        self._tokens = tokens
        # The graph reads these tensors at every replay: the batch keeps their memory taken.
        self._batch = batch = Batch(rows, owners, tables, size.bounds)

        def forward(wait: Wait) -> Tensor:
            at = positions.long()
            step = Step(tokens.long(), at, (), memory.page_tokens, view, wait, batch)
            if captures:
                return self._forward_captured(model, step, captures)
            hidden = model.forward(step)
            return model.logits(hidden) if size.decode else hidden

        self._captured_shape: torch.Size | None = None
        kind = "decode" if size.decode else "mixed"
        self._output = f"{kind} captured" if captures else kind
        self._graph = capture.capture(forward, self._output, max_rows, per_layer=not size.decode)

    def _parts(self, flat: Any, names: Sequence[str]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Tokens, positions, owners, rows, and page tables by anchor, in one run of numbers."""
        tokens, sequences = self._size.tokens, self._sequences
        each, rest = flat[: 3 * tokens].reshape(3, tokens), flat[3 * tokens :]
        rows = rest[: 3 * sequences].reshape(sequences, 3)
        tables = rest[3 * sequences :].reshape(len(names), sequences, -1)
        return *each, rows, {name: tables[i] for i, name in enumerate(names)}

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
    def decode(self) -> bool:
        return self._size.decode

    def launch(self, rows: Sequence[GraphRow], wait: Wait) -> Tensor:
        """Replay for these rows: logits of a decode graph, else hidden states; valid until the next
        replay."""
        self.prepare(rows)
        self._inputs.send()
        return self._replay(wait)

    def prepare(self, rows: Sequence[GraphRow]) -> None:
        """Write the inputs on the host."""
        assert all(row.past + len(row.tokens) <= self._size.length for row in rows), "too long"
        self._inputs.open()
        self._fill(rows)

    def launch_prepared(self, tokens: Sequence[int]) -> Tensor:
        """Replay what is prepared, with these as its first tokens."""
        self._host[0][: len(tokens)] = tokens
        self._inputs.send()
        return self._replay(no_wait)

    def launch_ahead(self, sampled: Tensor, places: Sequence[int]) -> Tensor:
        """Replay what is prepared; its first tokens are taken from `sampled`, on the device."""
        first = self._tokens[: len(places)]
        self._host[0][: len(places)] = places
        self._inputs.send()
        first.copy_(sampled.index_select(0, first))
        return self._replay(no_wait)

    def wait_until_late(self) -> None:
        """Block until most of the last replay is done; for mixed graphs."""
        self._graph.wait_until_late()

    def _replay(self, wait: Wait) -> Tensor:
        self._graph.replay(wait)
        return self._capture.output(self._output, self._used)

    def _fill(self, rows: Sequence[GraphRow]) -> None:
        tokens, positions, owners, spans, _ = self._host
        counts = [len(row.tokens) for row in rows]
        ends = np.cumsum(counts, dtype=np.int32)
        self._used = used = int(sum(counts))
        given = len(rows)
        past = np.fromiter((row.past for row in rows), np.int32, given)
        tokens[:used] = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int32, used)
        tokens[used:] = 0
        owners[:used] = np.repeat(np.arange(given, dtype=np.int32), counts)
        spans[:given] = np.stack([ends - counts, ends, past], 1)
        positions[:used] = np.arange(used) + np.repeat(past - spans[:given, 0], counts)
        spans[given:] = 0
        padding = np.arange(len(tokens) - used)
        if self._size.decode:
            owners[used:], positions[used:] = used + padding, 0
            spans[given:, 0], spans[given:, 1] = used + padding, used + padding + 1
        elif len(padding):
            # One sequence owns all padding; those behind it are empty.
            owners[used:], positions[used:] = given, padding
            spans[given, :2] = (used, len(tokens))
        for number in range(self._sequences):
            self._fill_table(number, rows[number] if number < given else None)

    def _fill_table(self, number: int, row: GraphRow | None) -> None:
        """Write a page table, unless it stands there already."""
        wanted = None if row is None else (row.lease, row.version)
        if self._filled[number] == wanted:
            return
        self._filled[number] = wanted
        for name, slots_of in self._host[-1].items():
            slots = () if row is None else row.table.get(name, ())
            known = min(len(slots), slots_of.shape[1])
            slots_of[number, :known] = slots[:known]
            slots_of[number, known:] = -1


class StepGraphs:
    """The graphs of one model, captured when first needed; for steps of up to `max_sequences`
    sequences and `max_step_tokens` tokens."""

    def __init__(
        self,
        model: Model,
        view: View,
        capture: GraphCapture,
        max_sequences: int,
        max_step_tokens: int,
        captures: tuple[int, ...] = (),
    ) -> None:
        self._model, self._view, self._capture = model, view, capture
        self._captures = captures
        self._max_sequences = max_sequences
        self._batches = sorted(set(decode_batches(max_sequences)))
        enough = next((size for size in MIXED_TOKENS if size >= max_step_tokens), MIXED_TOKENS[-1])
        self._tokens = [size for size in MIXED_TOKENS if size <= enough]
        self._captured: dict[GraphSize, StepGraph] = {}

    @property
    def max_step_tokens(self) -> int:
        """Larger steps have no graph."""
        return max(self._max_sequences, self._tokens[-1])

    def fitting(self, rows: Sequence[GraphRow], loading: bool) -> StepGraph | None:
        """The smallest graph for these rows, of which some may be `loading` their prefix."""
        prefills = sum(len(row.tokens) > 1 for row in rows)
        longest = max(row.past + len(row.tokens) for row in rows)
        decode = not prefills and not loading
        for size in self._sizes(decode, next(length for length in lengths() if length >= longest)):
            fits = len(rows) <= size.sequences and prefills <= size.prefills
            if fits and sum(len(row.tokens) for row in rows) <= size.tokens:
                return self._graph(size)
        return None

    def capture_all(self, longest: int) -> None:
        """Capture every graph for sequences of up to `longest` tokens.

        The largest come first: the memory pool they need is enough for all.
        """
        shorter = [*takewhile(lambda length: length < longest, lengths())]
        last = next(length for length in lengths() if length >= longest)
        for length in reversed([*shorter, last]):
            for decode in (False, True):
                for size in reversed(self._sizes(decode, length)):
                    self._graph(size)

    def _sizes(self, decode: bool, length: int) -> list[GraphSize]:
        if decode:
            return [GraphSize(batch, batch, 0, length) for batch in self._batches]
        limit, last = self._max_sequences, self._tokens[-1]
        prefills = {
            n: limit if n == last else min(limit, n // TOKENS_PER_PREFILL) for n in self._tokens
        }
        return [GraphSize(n, min(limit, n), prefills[n], length) for n in self._tokens]

    def _graph(self, size: GraphSize) -> StepGraph:
        if size not in self._captured:
            max_rows = self._max_sequences if size.decode else self._tokens[-1]
            self._captured[size] = StepGraph(
                self._model, self._view, self._capture, size, max_rows, self._captures
            )
        return self._captured[size]
