"""Steps over pools that hold something, as tests of kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.step import Batch, Rows, Step
from kvtide.spec import ALL, ModelMemory
from kvtide.tiers import Arrangement, Buffers, Layout

Sequences = list[tuple[int, int]]
"""Tokens before the step and in it, of every sequence."""


class Filled:
    """A step over pools of random slots; outside of what is written there is nothing but NaN.

    A page has a slot where the step reads what was there before it, or a later one reads what is
    there after it. With `idle` the last sequence is padding: it has none.
    """

    def __init__(
        self,
        memory: ModelMemory,
        step: Sequences,
        device: torch.device,
        dtype: torch.dtype,
        idle: bool = False,
    ) -> None:
        self.device, self.dtype, self.memory = device, dtype, memory
        self.generator = torch.Generator().manual_seed(5)
        pages = [-(-(past + count) // memory.page_tokens) for past, count in step]
        anchors = [anchor.name for anchor in memory.anchors]
        slots = {name: sum(pages) + 3 for name in anchors}
        arrangement = Arrangement(memory, slots, Layout.PAGE_FIRST_DIRECT)
        block = torch.full((arrangement.bytes,), 0xFF, dtype=torch.uint8, device=device)
        self.buffers = Buffers(arrangement, block)
        free = {n: torch.randperm(slots[n], generator=self.generator) for n in anchors}
        rows, start, first = [], 0, 0
        for (past, count), number in zip(step, pages, strict=True):
            ours = {n: free[n][first : first + number] for n in anchors}
            tables = {n: self._resident(n, ours[n], past, past + count) for n in anchors}
            rows.append(Rows(start, start + count, past, tables))
            start, first = start + count, first + number
        if idle:
            none = {n: torch.full_like(table, -1) for n, table in rows[-1].slots.items()}
            rows[-1] = Rows(rows[-1].start, rows[-1].end, rows[-1].past, none)
        self.tokens = start
        at = torch.cat([torch.arange(one.past, one.total) for one in rows]).to(device)
        view, page = self.buffers.view, memory.page_tokens
        batch = Batch.of(rows, device)
        self.run = ForwardPass(Step(at, at, tuple(rows), page, view, lambda _: None, batch))

    def some(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def _resident(self, anchor: str, slots: Tensor, past: int, total: int) -> Tensor:
        reach, page = self.memory.pool(anchor).reuse.reach, self.memory.page_tokens
        if reach is not ALL:
            ends = (torch.arange(len(slots)) + 1) * page
            read = (ends > past - reach) & (ends - page < past)
            slots = torch.where(read | (ends > total - reach), slots, -1)
        return slots.to(self.device)


def written(filled: Filled, place: Place, field: str) -> tuple[list[Tensor], Tensor]:
    """Random entries of all tokens, the step's own too: by sequence, as they read back, and those
    of the step. They lie where a page has a slot."""
    ratio, width = place.pool.tokens_per_entry, place.field(field).shape[0]
    per_page = filled.run.step.page_tokens // ratio
    view = filled.buffers.view(place.pool.name, place.layer)
    whole, new = [], []
    for rows in filled.run.sequences:
        values = place.packing.pack({field: filled.some(rows.total // ratio, width)})
        numbers = torch.arange(rows.total // ratio, device=filled.device)
        slots = rows.slots[place.anchor][numbers // per_page]
        kept = slots >= 0
        for name, value in values.items():
            at = slots[kept], (numbers % per_page)[kept]
            view[name].view(torch.uint8)[at] = value.view(torch.uint8)[kept]
        whole.append(place.packing.unpack(values, field)[field])
        new.append(whole[-1][rows.past // ratio :])
    return whole, torch.cat(new)
