"""The device memory of hot pools: a few entries of every running request, and room for a step.

A hot pool has its pages on the host. Attention reads it from one block of device pages per pool:

    hot rows   per layer and running request, so many entries that queries selected
    ring       per running request, the entries that a step writes; the same for all layers
    gathered   the context of sequences that prefill, one layer at a time

`spec.residency.HotShape` says how many pages of each there are. Which entry is in which hot slot
is kept beside them, on the device: a forward pass changes it (`layers/kernels/swap_in.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from kvtide.spec import ModelMemory, PoolSpec, Slots
from kvtide.spec.residency import HotShape
from kvtide.tiers.arena import Arena, device_arena
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import Arrangement, Layout

NONE = -1
"""In `held`: a slot without an entry. In `used`: one that was never used."""


class HotBuffers:
    """One hot pool on the device.

    pages   (pages, bytes of a page's row): all of the block
    held    (layers, rows, entries): which entry of its sequence a hot slot has
    used    likewise: the clock of the forward pass that used it last
    clock   (1,): counts forward passes
    marks   (rows, entries of the longest sequence): scratch space of a plan, NONE between two
    wanted  (entries of the gathered pages,): likewise, 0 between two
    counts  (layers, 3): entries that queries selected: found in a hot row, swapped in to one, and
            gathered
    """

    def __init__(
        self, pool: PoolSpec, shape: HotShape, page_tokens: int, device: torch.device
    ) -> None:
        assert pool.hot is not None
        self.pool, self.shape = pool, shape
        self.page_entries = pool.entries_per_page(page_tokens)
        self.arena: Arena = device_arena(shape.page_bytes * shape.pages, device)
        alone = replace(pool, layers=(0,), hot=None, selected=None)
        memory = ModelMemory(pool.name, page_tokens, (alone,), 1)
        slots = {pool.name: shape.pages}
        arrangement = Arrangement(memory, slots, Layout.LAYER_FIRST)
        self._buffers = Buffers(arrangement, self.arena.data)
        self.pages = self._buffers.rows(pool.name, 0)
        slots_of = (shape.layers, shape.rows, pool.hot)
        longest = shape.gather_pages * self.page_entries

        def numbers(*size: int, value: int = NONE) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        self.held, self.used = numbers(*slots_of), numbers(*slots_of)
        self.clock = numbers(1, value=0)
        self.marks, self.wanted = numbers(shape.rows, longest), numbers(longest, value=0)
        self.counts = torch.zeros(shape.layers, 3, dtype=torch.int64, device=device)

    @property
    def view(self) -> Mapping[str, torch.Tensor]:
        """All pages by field: (pages, entries of a page, *shape), the same for every layer."""
        return self._buffers.view(self.pool.name, 0)

    def clear(self, row: int) -> None:
        """Another sequence takes this row: none of its slots has an entry."""
        self.held[:, row] = NONE
        self.used[:, row] = NONE

    # -- page tables ------------------------------------------------------------------------

    def ring_table(self, row: int, pages: int) -> Slots:
        """Where a step writes the new entries of a sequence that reads its hot row."""
        first = self.shape.first_ring + row * self.shape.ring_pages
        return (first + np.arange(pages) % self.shape.ring_pages).astype(np.int32)

    def gathered_table(self, first: int, pages: int) -> Slots:
        """Where a step has all entries of a sequence, from a gathered page on."""
        assert first + pages <= self.shape.gather_pages, "too many pages to gather at once"
        start = self.shape.first_gathered + first
        return np.arange(start, start + pages, dtype=np.int32)
