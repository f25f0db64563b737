"""Passes of single tokens, recorded once and played again: CUDA graphs.

A pass that computes one token for each of a few sequences is hundreds of launches that take little
time each: a recording plays them all with one. It is for a number of rows, and for sequences
up to a length. Fewer sequences are filled up with rows that nobody needs, which have no slots and
so write nothing.

Copies between device and host go on beside it: they are on streams of their own, and pages on
their way are in no table of a step that is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtide.engine.tables import State, Table
from kvtide.layers import Step
from kvtide.layers.step import Batch, Bounds
from kvtide.models import Model

SHORTEST = 4096
"""The length that the first recordings are for; each next one is for four times as many tokens."""


@dataclass(slots=True)
class Studio:
    """A device, the stream that passes are recorded on, and the memory that all recordings share,
    of up to `most_rows` rows: only one is played at a time. `logits`: where each leaves its own."""

    device: torch.device
    most_rows: int
    stream: torch.cuda.Stream
    pool: Any
    logits: Tensor | None = None

    @classmethod
    def on(cls, device: torch.device, most_rows: int) -> Studio:
        return cls(device, most_rows, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())

    def room(self, logits: Tensor) -> Tensor:
        """For logits such as these."""
        if self.logits is None:
            self.logits = logits.new_empty((self.most_rows, logits.shape[-1]))
        return self.logits[: len(logits)]


class Row(NamedTuple):
    """One sequence's token, how many it has before, and where: `lease` numbers whose pages."""

    token: int
    past: int
    lease: int
    state: State
    table: Table


View = Callable[[str, int], Mapping[str, Tensor]]


def widths(most: int) -> Iterator[int]:
    """For how many rows there are recordings."""
    yield from (width for width in (1, 2, 4) if width < most)
    step, width = 8, 8
    while width < most:
        yield width
        step = 8 if width < 64 else 32
        width += step
    yield most


def lengths() -> Iterator[int]:
    """For how many tokens there are recordings."""
    return (SHORTEST * 4**number for number in count())


class Recording:
    """A pass for up to `rows` sequences of up to `length` tokens.

    `studio` is where it is made, with others: libraries keep memory for every stream that they have
    seen.
    """

    def __init__(self, model: Model, view: View, studio: Studio, rows: int, length: int) -> None:
        memory = model.memory
        pages = -(-length // memory.page_tokens)
        names = [anchor.name for anchor in memory.anchors]
        room = torch.full((4 * rows + len(names) * rows * pages,), -1, dtype=torch.int32)
        self._room = room.pin_memory()
        self._there = torch.empty_like(self._room, device=studio.device)
        self._sent = torch.cuda.Event()
        self._tokens, self._rows, self._tables = _parts(self._room.numpy(), rows, names)
        self._filled: list[tuple[int, State] | None] = [None] * rows
        self._tokens[:] = 0
        self._rows[:] = np.stack([np.arange(rows), np.arange(1, rows + 1), np.zeros(rows)], 1)
        tokens, spans, tables = _parts(self._there, rows, names)
        owners = torch.arange(rows, dtype=torch.int32, device=studio.device)
        # A recording reads what it was made with: nobody else may get that memory.
        self._batch = batch = Batch(spans, owners, tables, Bounds(1, length - 1, 0, 0, True))

        def forward() -> Tensor:
            at = spans[:, 2].long()
            step = Step(tokens.long(), at, (), memory.page_tokens, view, _nothing, batch)
            return model.logits(model.forward(step))

        self._there.copy_(self._room)
        self._graph = torch.cuda.CUDAGraph()
        studio.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(studio.stream):
            # Programs are compiled when they first run, which cannot be recorded.
            self._logits = studio.room(forward())
        # Other threads copy pages meanwhile, which is none of the recording's business.
        with torch.cuda.graph(
            self._graph, studio.pool, studio.stream, capture_error_mode="thread_local"
        ):
            self._logits.copy_(forward())
        torch.cuda.current_stream().wait_stream(studio.stream)

    def play(self, rows: Sequence[Row]) -> Tensor:
        """The logits after these tokens, a row for each, until something is played again."""
        self._sent.synchronize()
        count = len(rows)
        assert all(row.past <= self._batch.bounds.most_past for row in rows), "a sequence is too long"
        self._tokens[:count] = [row.token for row in rows]
        self._rows[:count, 2] = [row.past for row in rows]
        self._rows[count:, 2] = 0
        for number, known in enumerate(self._filled):
            row = rows[number] if number < count else None
            if known != (wanted := None if row is None else (row.lease, row.state)):
                self._filled[number] = wanted
                self._fill(number, {} if row is None else row.table)
        self._there.copy_(self._room, non_blocking=True)
        self._sent.record()
        self._graph.replay()
        return self._logits[:count]

    def _fill(self, row: int, table: Table) -> None:
        for name, ours in self._tables.items():
            slots = table.get(name, ())
            count = min(len(slots), ours.shape[1])
            ours[row, :count] = slots[:count]
            ours[row, count:] = -1


class Recordings:
    """Those of one model, made when they are first needed."""

    def __init__(self, model: Model, view: View, device: torch.device, most_rows: int) -> None:
        self._model, self._view, self._studio = model, view, Studio.on(device, most_rows)
        self._widths = sorted(set(widths(most_rows)))
        self._made: dict[tuple[int, int], Recording] = {}

    def fitting(self, rows: int, length: int) -> Recording | None:
        """For so many sequences, the longest of so many tokens; None for more than any has."""
        width = next((width for width in self._widths if width >= rows), None)
        if width is None:
            return None
        most = next(most for most in lengths() if most >= length)
        if (width, most) not in self._made:
            made = Recording(self._model, self._view, self._studio, width, most)
            self._made[width, most] = made
        return self._made[width, most]

    def prepare(self, longest: int) -> None:
        """Make those for sequences of up to so many tokens, so that nobody waits for them later.

        The widest of the longest comes first: what it takes of the shared memory is enough for all.
        """
        shorter = takewhile(lambda length: length < longest, lengths())
        for length in reversed([*shorter, longest]):
            for width in reversed(self._widths):
                self.fitting(width, length)


def _nothing(layer: int) -> None:
    """No prefix is on its way to anybody in the step."""


def _parts(flat: Any, rows: int, names: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Tokens, rows, and tables by anchor, in one run of numbers: of numpy or of a device."""
    tokens, spans, rest = flat[:rows], flat[rows : 4 * rows].reshape(rows, 3), flat[4 * rows :]
    tables = rest.reshape(len(names), rows, -1)
    return tokens, spans, {name: tables[i] for i, name in enumerate(names)}
