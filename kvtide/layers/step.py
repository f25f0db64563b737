"""The input of a forward pass: the tokens of one step, and the page tables of their sequences.

A step holds tokens of several sequences, one after another: prefill chunks and decode tokens.
Model code sees nothing else of the engine: it reads and writes state through `view` and the page
tables.

Layout. A sequence's token at position p belongs to page p // page_tokens; the page's slot
in an anchor's pools is `slots[anchor][page]`, -1 where that anchor keeps no such page. Entries
(keys, values, latents) of a page lie in its slot by position. A recurrent state (an SSM
state, a convolution's tail) after token p lies in the slot of p's page: it is read from the page of
the last token before the step and written to the page of the last token in it. A complete page is
never written again, so the state at its end is a checkpoint.

A pool served *hot* keeps its pages on the host. Its slots in a step are pages of the device memory
of a `HotPool`, to which the step writes its new entries. Two more tables say where the rest is:
`host_table(anchor)` has the host slots of its pages, and HOT_ROWS the sequence's hot row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HOT_ROWS = "hot row"
"""The table whose first column has each sequence's hot row, -1 for padding."""


def host_table(anchor: str) -> str:
    """The name of the table with the host slots of a hot anchor's pages."""
    return f"{anchor} on host"


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's new tokens: rows [start, end) of the step, after `past` earlier tokens.

    `slots[anchor]` is an int64 tensor with a slot for every page, at least up to that of the last
    new token.
    """

    start: int
    end: int
    past: int
    slots: Mapping[str, torch.Tensor]

    @property
    def total(self) -> int:
        """Tokens of the sequence when the step is done."""
        return self.past + self.end - self.start


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of a step's sequences, by which kernels size their grids.

    longest   new tokens of a sequence
    max_past  earlier tokens of a sequence
    prompts   sequences with several new tokens
    singles   whether any sequence may have one new token
    """

    longest: int
    max_past: int
    prompts: int
    singles: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> Bounds:
        """Of first row, end row and tokens before the step, for every sequence."""
        return cls(
            max(end - start for start, end, _ in rows),
            max(past for *_, past in rows),
            sum(end - start > 1 for start, end, _ in rows),
            any(end - start == 1 for start, end, _ in rows),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The same rows in device tensors, for kernels that take all sequences at once.

    rows       (sequences, 3) int32: first row, end row, tokens before the step
    owners     (tokens,) int32: the sequence of every token
    slots      by anchor, (sequences, pages) int32: -1 where it keeps no such page, and beyond the
               last page of a sequence

    A CUDA graph of a step is captured once and replayed with other numbers in the same tensors. Its
    launches depend neither on `Step.sequences` nor on the contents of tensors. Padding tokens
    belong to sequences without slots, and a sequence may have no tokens.
    """

    rows: Tensor
    owners: Tensor
    slots: Mapping[str, Tensor]
    bounds: Bounds

    @classmethod
    def of(cls, sequences: Sequence[Rows], device: torch.device) -> Batch:
        rows = [(s.start, s.end, s.past) for s in sequences]
        spans = torch.tensor(rows, dtype=torch.int32)
        counts = spans[:, 1] - spans[:, 0]
        owners = torch.arange(len(sequences), dtype=torch.int32).repeat_interleave(counts)
        slots = {}
        for anchor in sequences[0].slots:
            tables = [s.slots[anchor].to(torch.int32) for s in sequences]
            slots[anchor] = torch.nn.utils.rnn.pad_sequence(tables, True, -1)
        return cls(spans.to(device), owners.to(device), slots, Bounds.of(rows))


@dataclass(frozen=True, slots=True)
class HotPool:
    """Device memory of a pool whose pages live on the host.

    Pages of the arena, in this order; `number` i of a layer, row r:
        i, r, k    hot rows: page k of `row_pages`
        r, k       ring, from `first_ring` on: entries that a step of few tokens writes
        ...        gather region, from `first_gather` on: the contexts of sequences that prefill
    Ring and gather region serve one layer at a time.

    entries       of a hot row
    rows          hot rows of a layer, one for each running request
    ring_pages    pages of the ring, for each row
    page_entries  entries of a page
    pages         (pages, bytes of a page) uint8: the arena
    held          (layers, rows, entries) int32: the entry in each hot slot, -1 for none
    used          (layers, rows, entries) int32: the clock at its last use, -1 for none
    clock         (1,) int32, advanced once per forward pass
    marks         (rows, entries of the longest sequence) int32, all -1 between calls
    wanted        (entries of the gather region,) int32, all 0 between calls
    host_rows     of a layer, (host slots, bytes of a page) uint8; pinned if the arena is on CUDA
    counts        (layers, 3) int64: hits, misses and gathered entries since the start
    """

    entries: int
    rows: int
    ring_pages: int
    layers: tuple[int, ...]
    page_entries: int
    pages: Tensor
    held: Tensor
    used: Tensor
    clock: Tensor
    marks: Tensor
    wanted: Tensor
    host_rows: Callable[[int], Tensor]
    counts: Tensor

    @property
    def row_pages(self) -> int:
        """Pages of a hot row."""
        return -(-self.entries // self.page_entries)

    @property
    def first_ring(self) -> int:
        """The first page of the ring."""
        return len(self.layers) * self.rows * self.row_pages

    @property
    def first_gather(self) -> int:
        """The first page of the gather region."""
        return self.first_ring + self.rows * self.ring_pages

    def number(self, layer: int) -> int:
        """The position of a global layer among those of the pool."""
        return self.layers.index(layer)


@dataclass(frozen=True, slots=True)
class Step:
    """`view(pool, layer)` gives a layer's fields as tensors (slots, entries of a page, *shape).

    `wait(layer)` must be called before a layer reads the state of earlier tokens: a load may still
    be in flight. `batch` is None where the engine has not prepared it. `hot` has the pools that are
    served hot, by name.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: tuple[Rows, ...]
    page_tokens: int
    view: Callable[[str, int], Mapping[str, torch.Tensor]]
    wait: Callable[[int], None]
    batch: Batch | None = None
    hot: Mapping[str, HotPool] = field(default_factory=dict)
