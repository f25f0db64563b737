"""Swap-in: the entries that a step's queries selected, from host pages to hot slots.

Torch reference: `layers/reference/swap_in.py`. Which of the slots given up a missing entry gets is
free; which slots those are, and all bytes, are the same.

`plan_rows`      grid (sequences,), in `swap_plan`: hits, misses and slots given up
`_mark_wanted`   grid (tokens, tiles of choices): what gathered sequences read of their contexts
`plan_gathered`  grid (sequences,), in `swap_plan`: what of that is hot, and what becomes hot
`_load_wanted`   grid (sequences, splits): what is marked into the gather region, from hot slots or
                 pinned host memory; from there also into the slots that are given to it
`_move_entries`  grid (loaders + writers,): misses from pinned host memory into hot slots; new
                 entries from the step's pages to the host and into hot slots

A place is the number of an entry in the arena or on the host, page by page.

What always holds:
- Grids depend on shapes and `Bounds` alone, so a CUDA graph can be replayed.
- A sequence without a hot row (padding) moves nothing, and its choices have no place.
- Between calls `marks` is -1 and `wanted` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.swap_plan import plan_gathered, plan_rows
from kvtide.layers.step import HOT_ROWS, HotPool, host_table

CTAS = 128
"""CTAs of a copy, at most: they saturate the link."""
BLOCK_WORDS = 512
"""Words of up to 16 bytes that a CTA copies at a time."""
MAX_CHOICES = 4096
"""Choices of a sequence that the plan handles at a time."""
MAX_MARKED = 1024
"""Choices of a query that a CTA marks."""
_MIN_SPLIT = 64
"""Entries of a gathered context per CTA, at least."""


def swap_in(run: ForwardPass, place: Place, selected: Tensor) -> Tensor:
    """The places of selected entries in the arena: (tokens, count) as `selected`, -1 for none."""
    hot, selected = run.step.hot[place.pool.name], selected.contiguous()
    call = _Call(run, place, hot, selected, torch.empty_like(selected))
    call.plan()
    if call.longest > call.queries:
        call.gather()
    call.move()
    return call.located


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels of a call leave for each other; the layers of a pass share it.

    sources, targets  (most misses,) int32: places of misses on the host and in the arena
    misses            (layers,) int32: how many a layer has, 0 before its plan
    freed             (sequences, slots) int32: slots that each sequence gives up
    new_slots         (tokens,) int32: the hot slot of the entry that a token completes, -1 for none
    """

    sources: Tensor
    targets: Tensor
    misses: Tensor
    freed: Tensor
    new_slots: Tensor

    @classmethod
    def of(cls, hot: HotPool, sequences: int, tokens: int, misses: int) -> _Scratch:
        new = hot.held.new_empty
        total = max(1, sequences * misses)
        counts, freed = hot.held.new_zeros(len(hot.layers)), new((sequences, hot.entries))
        return cls(new(total), new(total), counts, freed, new(tokens))


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer of a step. `located` is the result."""

    run: ForwardPass
    place: Place
    hot: HotPool
    selected: Tensor
    located: Tensor

    @property
    def longest(self) -> int:
        """New tokens of a sequence."""
        return self.run.batch.bounds.longest

    @property
    def queries(self) -> int:
        """New tokens of a sequence that is not gathered."""
        return min(self.longest, self.hot.entries // (self.place.pool.selected or 1))

    @property
    def _slots(self) -> int:
        """Of a hot row, as a tile."""
        return power_of_two(self.hot.entries)

    @property
    def scratch(self) -> _Scratch:
        hot, misses = self.hot, min(self.hot.entries, self.queries * self.selected.shape[1])
        return self.run.shared(
            ("swap in", self.place.pool.name),
            lambda: _Scratch.of(hot, len(self.run.batch.rows), len(self.selected), misses),
        )

    def plan(self) -> None:
        hot, scratch, count = self.hot, self.scratch, self.selected.shape[1]
        choices, slots = power_of_two(self.queries * count), self._slots
        block = min(choices, MAX_CHOICES)
        plan_rows[(len(self.run.batch.rows),)](
            *(self.selected, self.located, *self._tables()),
            *(hot.held, hot.used, hot.clock, hot.marks, hot.marks.stride(0), hot.counts),
            *(scratch.sources, scratch.targets, scratch.misses, scratch.freed, scratch.new_slots),
            hot.number(self.place.layer),
            COUNT=count,
            ONE_TILE=choices == block,
            BLOCK_B=slots,
            BLOCK_C=block,
            BLOCK_NEW=power_of_two(divided_up(self.queries, self.place.pool.tokens_per_entry)),
            num_warps=_warps(max(slots, block)),
            **self._shape(),
        )

    def gather(self) -> None:
        """Brings the selected entries of gathered sequences to the gather region."""
        batch, hot, count = self.run.batch, self.hot, self.selected.shape[1]
        block, shape, slots = min(MAX_MARKED, power_of_two(count)), self._shape(), self._slots
        number = hot.number(self.place.layer)
        _mark_wanted[(len(self.selected), divided_up(count, block))](
            *(self.selected, self.located, hot.wanted, batch.owners, *self._tables()),
            COUNT=count,
            BLOCK=block,
            **shape,
        )
        plan_gathered[(len(batch.rows),)](
            *(hot.wanted, *self._tables(), hot.held, hot.used, hot.clock),
            *(hot.marks, hot.marks.stride(0), hot.counts),
            *(self.scratch.freed, self.scratch.new_slots, number),
            BLOCK_B=slots,
            num_warps=_warps(slots),
            **shape,
        )
        entries = batch.bounds.max_past // self.place.pool.tokens_per_entry
        if entries == 0:
            return
        arena, host, words = self._words()
        splits = min(divided_up(entries, _MIN_SPLIT), CTAS)
        _load_wanted[(len(batch.rows), splits)](
            *(arena, host, hot.wanted, *self._tables()),
            *(hot.marks, hot.marks.stride(0), hot.counts, number),
            **shape,
            **words,
        )

    def move(self) -> None:
        hot, scratch = self.hot, self.scratch
        arena, host, words = self._words()
        loaders, writers = (
            min(CTAS, divided_up(count * words["WORDS"], BLOCK_WORDS))
            for count in (len(scratch.sources), len(self.selected))
        )
        _move_entries[(loaders + writers,)](
            *(arena, host, self.run.batch.owners, *self._tables()),
            *(scratch.sources, scratch.targets, scratch.misses, scratch.new_slots),
            *(hot.number(self.place.layer), len(self.selected)),
            LOADERS=loaders,
            **self._shape(),
            **words,
        )

    def _tables(self) -> tuple[Tensor | int, ...]:
        """The rows of the step, and tables with their strides: its pages, host pages, hot rows."""
        slots, anchor = self.run.batch.slots, self.place.anchor
        tables = slots[anchor], slots[host_table(anchor)], slots[HOT_ROWS]
        return self.run.batch.rows, *(x for table in tables for x in (table, table.stride(0)))

    def _shape(self) -> dict[str, int]:
        hot = self.hot
        return {
            "ROWS": hot.rows,
            "ENTRIES": hot.entries,
            "ROW_ENTRIES": hot.row_pages * hot.page_entries,
            "FIRST_GATHER": hot.first_gather,
            "PAGE": hot.page_entries,
            "RATIO": self.place.pool.tokens_per_entry,
        }

    def _words(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The arena and the host in the largest words that entries are made of.

        A word is one number, or LANES of them. Strides are in numbers.
        """
        entry_bytes = self.place.pool.entry.bytes
        assert entry_bytes % 4 == 0, f"pool {self.place.pool.name}: an entry of no whole words"
        dtype = torch.int64 if entry_bytes % 8 == 0 else torch.int32
        lanes = 2 if entry_bytes % 16 == 0 else 1
        host = self.hot.host_rows(self.place.layer)
        for pages in (self.hot.pages, host):
            assert pages.data_ptr() % 16 == 0 and pages.stride(0) % 16 == 0, "rows are aligned"
        arena, host = self.hot.pages.view(dtype), host.view(dtype)
        constants = {
            "ARENA_STRIDE": arena.stride(0),
            "HOST_STRIDE": host.stride(0),
            "WORDS": entry_bytes // dtype.itemsize // lanes,
            "LANES": lanes,
            "BLOCK": BLOCK_WORDS,
        }
        return arena, host, constants


def _warps(tile: int) -> int:
    """Of a plan's CTA."""
    return max(4, min(32, tile // 256))


# -- kernels -----------------------------------------------------------------------------------


# fmt: off
@kernel(  # type: ignore[untyped-decorator]
    "owners", "rows", "tables", "stride_table", "host_tables", "stride_host_table", "hot_rows",
    "stride_hot_rows",
)
def _mark_wanted(  # type: ignore[no-untyped-def]
    selected, located, wanted, owners, rows, tables, stride_table, host_tables, stride_host_table,
    hot_rows, stride_hot_rows,
    COUNT: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, ROW_ENTRIES: tl.constexpr,
    FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr,
):
    """Places of a query's choices in the gather region, and which of them are to be loaded."""
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.load(owners + token)
    tables += sequence * stride_table
    if tl.load(tables) < FIRST_GATHER:
        return
    past = tl.load(rows + 3 * sequence + 2) // RATIO
    offset = token.to(tl.int64) * COUNT + column
    entry = tl.load(selected + offset, mask=column < COUNT, other=-1)
    page = tl.load(tables + entry // PAGE, mask=entry >= 0, other=-1)
    place = tl.where(page >= 0, page * PAGE + entry % PAGE, -1)
    tl.store(located + offset, place, mask=column < COUNT)
    one = tl.full([BLOCK], 1, tl.int32)
    tl.store(wanted + place - FIRST_GATHER * PAGE, one, mask=(page >= 0) & (entry < past))


@triton.jit  # type: ignore[untyped-decorator]
def _offsets(  # type: ignore[no-untyped-def]
    place, word, STRIDE: tl.constexpr, PAGE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Offsets of words of entries: (words, LANES)."""
    offset = (place // PAGE).to(tl.int64) * STRIDE
    offset += (place % PAGE * WORDS + word) * LANES
    return offset[:, None] + tl.arange(0, LANES)[None, :]


@kernel(  # type: ignore[untyped-decorator]
    "rows", "tables", "stride_table", "host_tables", "stride_host_table", "hot_rows",
    "stride_hot_rows", "stride_marks", "layer",
)
def _load_wanted(  # type: ignore[no-untyped-def]
    arena, host, wanted, rows, tables, stride_table, host_tables, stride_host_table, hot_rows,
    stride_hot_rows, marks, stride_marks, counts, layer,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, ROW_ENTRIES: tl.constexpr,
    FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr,
    ARENA_STRIDE: tl.constexpr, HOST_STRIDE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Loads the marked entries of a split of a context, and counts those that come from the host.
    Afterwards none is marked."""
    sequence, column = tl.program_id(0), tl.arange(0, BLOCK)
    tables += sequence * stride_table
    host_tables += sequence * stride_host_table
    if tl.load(tables) < FIRST_GATHER:
        return
    row = tl.load(hot_rows + sequence * stride_hot_rows)
    marks += row.to(tl.int64) * stride_marks
    first_place = (layer * ROWS + row) * ROW_ENTRIES
    past = tl.load(rows + 3 * sequence + 2) // RATIO
    split = tl.cdiv(past, tl.num_programs(1))
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, past)
    loaded = tl.zeros([BLOCK], tl.int32)
    for at in range(0, (last - first) * WORDS, BLOCK):
        entry, word = first + (at + column) // WORDS, (at + column) % WORDS
        page = tl.load(tables + entry // PAGE, mask=entry < last, other=-1)
        target = page * PAGE + entry % PAGE
        is_wanted = tl.load(wanted + target - FIRST_GATHER * PAGE, mask=page >= 0, other=0) > 0
        mark = tl.load(marks + entry, mask=is_wanted, other=-1)
        is_hot = mark >= 0
        is_cold = is_wanted & (is_hot == 0)
        loaded += (is_cold & (word == 0)).to(tl.int32)
        page = tl.load(host_tables + entry // PAGE, mask=is_cold, other=-1)
        source = page * PAGE + entry % PAGE
        mask, is_hot = (is_cold & (page >= 0))[:, None], is_hot[:, None]
        data = tl.load(host + _offsets(source, word, HOST_STRIDE, PAGE, WORDS, LANES), mask=mask)
        place = first_place + tl.where(mark >= 0, mark, -2 - mark)
        slot = arena + _offsets(place, word, ARENA_STRIDE, PAGE, WORDS, LANES)
        data = tl.where(is_hot, tl.load(slot, mask=is_hot), data)
        target = arena + _offsets(target, word, ARENA_STRIDE, PAGE, WORDS, LANES)
        tl.store(target, data, mask=mask | is_hot)
        tl.store(slot, data, mask=mask & (mark < -1)[:, None])
    tl.debug_barrier()
    for at in range(first, last, BLOCK):
        entry = at + column
        page = tl.load(tables + entry // PAGE, mask=entry < last, other=-1)
        place = page * PAGE + entry % PAGE - FIRST_GATHER * PAGE
        tl.store(wanted + place, column * 0, mask=page >= 0)
        tl.store(marks + entry, column * 0 - 1, mask=entry < last)
    tl.atomic_add(counts + 3 * layer + 2, tl.sum(loaded, 0).to(tl.int64), sem="relaxed")


@kernel(  # type: ignore[untyped-decorator]
    "owners", "rows", "tables", "stride_table", "host_tables", "stride_host_table", "hot_rows",
    "stride_hot_rows", "layer", "tokens",
)
def _move_entries(  # type: ignore[no-untyped-def]
    arena, host, owners, rows, tables, stride_table, host_tables, stride_host_table, hot_rows,
    stride_hot_rows, sources, targets, misses, new_slots, layer, tokens,
    LOADERS: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, ROW_ENTRIES: tl.constexpr,
    FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr,
    ARENA_STRIDE: tl.constexpr, HOST_STRIDE: tl.constexpr, WORDS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """The first LOADERS CTAs load misses, the others write new entries out."""
    cta, column = tl.program_id(0), tl.arange(0, BLOCK)
    if cta < LOADERS:
        words = tl.load(misses + layer) * WORDS
        for at in range(cta * BLOCK, words, LOADERS * BLOCK):
            number, word, valid = (at + column) // WORDS, (at + column) % WORDS, at + column < words
            source = tl.load(sources + number, mask=valid, other=-1)
            target = tl.load(targets + number, mask=valid, other=0)
            mask = (source >= 0)[:, None]
            source = _offsets(source, word, HOST_STRIDE, PAGE, WORDS, LANES)
            target = _offsets(target, word, ARENA_STRIDE, PAGE, WORDS, LANES)
            tl.store(arena + target, tl.load(host + source, mask=mask), mask=mask)
    else:
        words, writers = tokens * WORDS, tl.num_programs(0) - LOADERS
        for at in range((cta - LOADERS) * BLOCK, words, writers * BLOCK):
            token, word, valid = (at + column) // WORDS, (at + column) % WORDS, at + column < words
            sequence = tl.load(owners + token, mask=valid, other=0)
            start = tl.load(rows + 3 * sequence, mask=valid, other=0)
            end = tl.load(rows + 3 * sequence + 1, mask=valid, other=0)
            past = tl.load(rows + 3 * sequence + 2, mask=valid, other=0)
            row = tl.load(hot_rows + sequence * stride_hot_rows, mask=valid, other=-1)
            position = past + token - start
            entry, valid = position // RATIO, (row >= 0) & ((position + 1) % RATIO == 0)
            page = tl.load(tables + sequence * stride_table + entry // PAGE, mask=valid, other=-1)
            host_page = host_tables + sequence * stride_host_table + entry // PAGE
            host_page = tl.load(host_page, mask=valid, other=-1)
            valid = valid & (page >= 0)
            data = arena + _offsets(
                page * PAGE + entry % PAGE, word, ARENA_STRIDE, PAGE, WORDS, LANES)
            data = tl.load(data, mask=valid[:, None])
            target = _offsets(
                host_page * PAGE + entry % PAGE, word, HOST_STRIDE, PAGE, WORDS, LANES)
            tl.store(host + target, data, mask=(valid & (host_page >= 0))[:, None])
            is_last = entry >= (past + end - start) // RATIO - ENTRIES
            slot = tl.load(new_slots + token, mask=valid & is_last, other=-1)
            target = _offsets(
                (layer * ROWS + row) * ROW_ENTRIES + slot, word, ARENA_STRIDE, PAGE, WORDS, LANES)
            tl.store(arena + target, data, mask=(valid & (slot >= 0))[:, None])
# fmt: on
