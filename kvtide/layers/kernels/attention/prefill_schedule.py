"""Which CTA of prefill attention takes which block of new tokens.

A block (`query_blocks`) with all query heads of one KV head is so many tiles of keys. A wave is as
many CTAs as the device runs at a time, and blocks seldom fill whole waves. So the last blocks, of
one full wave and the partial one, are split: their tiles, KV head after KV head, are divided
evenly among one wave of CTAs. All other blocks have a CTA each, which starts when a split is done.
Blocks are not split if they see little, or if there are many waves. A step has its prefill chunks
with the longest context last, so the blocks that are split are the longest.

`_schedule`  grid (1,): the table of blocks, from the lengths in `Batch.rows`

Torch reference: none; its test compares `paged_attention` with its reference.
Surprising: the schedule is made on the device, since a CUDA graph is replayed with other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels.grid import SEQUENCES_AT_ONCE, sm_count
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.query_blocks import prefill_blocks, query_blocks

MIN_TILES = 8
"""Tiles of a split, at least."""
SPLIT_OVERHEAD_TILES = 6
"""Cost in tiles of starting within a block; a split has it twice."""
SHORT_MIN_TILES = 2
"""The same two where a block has all new tokens of a sequence: as in decode attention."""
SHORT_OVERHEAD_TILES = 1
MAX_WAVES = 12
"""With more waves, the partial last one costs little, and nothing is split."""
RECORD = tl.constexpr(8)
"""Fields of a block in the schedule, one of them padding."""


def schedule_blocks(
    run: ForwardPass,
    tokens: int,
    splits: dict[str, int],
    window: int,
    tile_keys: int,
    *,
    short: bool,
) -> Tensor:
    """The schedule, (blocks + 2, RECORD) int32, for blocks of `tokens` and tiles of `tile_keys`.

    `short`: a block has all new tokens of a sequence, and those with one have a block too.

    Record 0: the first and the end block of those that are split, and the count of blocks. Then a
    record for every block and one behind the last: its first tile among those of one KV head, its
    sequence, first row and end row, and the sequence's first row, end row and context length.
    """
    blocks = (query_blocks if short else prefill_blocks)(run, tokens).table

    def scheduled() -> Tensor:
        schedule = blocks.new_empty((len(blocks) + 2, RECORD.value))
        _schedule[(1,)](
            *(run.batch.rows, blocks, schedule, len(blocks)),
            SPLIT_OVERHEAD=SHORT_OVERHEAD_TILES if short else SPLIT_OVERHEAD_TILES,
            WAVES=MAX_WAVES,
            WINDOW=window,
            BLOCK_N=tile_keys,
            BLOCK=SEQUENCES_AT_ONCE,
            **splits,
        )
        return schedule

    key = ("blocks", tokens, window, tile_keys, short, *splits.values())
    return run.shared(key, scheduled)


def split_constants(
    kv_heads: int, small: bool, short: bool, device: torch.device
) -> dict[str, int]:
    """Compile-time constants of the split; an SM runs two small CTAs at a time, else one."""
    return {
        "SPLITS": (2 if small else 1) * sm_count(device),
        "MIN_SPLIT_TILES": SHORT_MIN_TILES if short else MIN_TILES,
        "KV_HEADS": kv_heads,
    }


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def tile_counts(  # type: ignore[no-untyped-def]
    seq_start, past, row_start, row_end,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Tiles that a block of rows [row_start, row_end) sees: whole tiles of cached and of new keys,
    then masked tiles of both. Without a window, only the ends of both ranges need a mask."""
    if WINDOW > 0:
        first_key = tl.maximum(past + row_start - seq_start + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        old_masked = (tl.maximum(past - first_key, 0) + BLOCK_N - 1) // BLOCK_N
        new_start = tl.maximum(seq_start, row_start + 1 - WINDOW)
        new_masked = (row_end - new_start + BLOCK_N - 1) // BLOCK_N
        return past * 0, past * 0, old_masked, new_masked
    else:
        new_whole = (row_start - seq_start) // BLOCK_N
        new_masked = (row_end - seq_start - new_whole * BLOCK_N + BLOCK_N - 1) // BLOCK_N
        return past // BLOCK_N, new_whole, (past % BLOCK_N + BLOCK_N - 1) // BLOCK_N, new_masked


@kernel("rows", "blocks", "schedule", "max_blocks")  # type: ignore[untyped-decorator]
def _schedule(  # type: ignore[no-untyped-def]
    rows, blocks, schedule, max_blocks,
    SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, SPLIT_OVERHEAD: tl.constexpr,
    WAVES: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fills the schedule, and decides which blocks are split, by one CTA."""
    tiles_before = tl.full([], 0, tl.int32)
    block_count, hi_block, longest_block = tiles_before, tiles_before, tiles_before
    for start_block in range(0, max_blocks + 1, BLOCK):
        block = start_block + tl.arange(0, BLOCK)
        sequence = tl.load(blocks + 3 * block, mask=block < max_blocks, other=-1)
        valid, row = sequence >= 0, rows + 3 * sequence
        row_start = tl.load(blocks + 3 * block + 1, mask=valid, other=0)
        row_end = tl.load(blocks + 3 * block + 2, mask=valid, other=0)
        seq_start = tl.load(row, mask=valid, other=0)
        seq_end = tl.load(row + 1, mask=valid, other=0)
        past = tl.load(row + 2, mask=valid, other=0)
        old_whole, new_whole, old_masked, new_masked = tile_counts(
            seq_start, past, row_start, row_end, WINDOW, BLOCK_N)
        tiles = tl.where(valid, old_whole + new_whole + old_masked + new_masked, 0)
        record, in_table = schedule + RECORD * (1 + block), block <= max_blocks
        tl.store(record, tiles_before + tl.cumsum(tiles, 0) - tiles, mask=in_table)
        tl.store(record + 1, sequence, mask=in_table)
        tl.store(record + 2, row_start, mask=in_table)
        tl.store(record + 3, row_end, mask=in_table)
        tl.store(record + 4, seq_start, mask=in_table)
        tl.store(record + 5, seq_end, mask=in_table)
        tl.store(record + 6, past, mask=in_table)
        # Blocks behind the last one worth splitting are padding of a CUDA graph.
        worth_splitting = valid & (tiles > 2 * SPLIT_OVERHEAD)
        hi_block = tl.maximum(hi_block, tl.max(tl.where(worth_splitting, block + 1, 0), 0))
        longest_block = tl.maximum(longest_block, tl.max(tiles, 0))
        tiles_before += tl.sum(tiles, 0)
        block_count += tl.sum(valid.to(tl.int32), 0)
    waves = hi_block * KV_HEADS // SPLITS
    lo_block = tl.maximum(waves - 1, 0) * SPLITS // KV_HEADS
    items = (hi_block - lo_block) * KV_HEADS
    tiles = tl.where(lo_block == 0, tiles_before * KV_HEADS, items * longest_block)
    split_tiles = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_SPLIT_TILES) + 2 * SPLIT_OVERHEAD
    pays = (tl.cdiv(items, SPLITS) * longest_block > split_tiles) & (waves <= WAVES)
    tl.store(schedule, tl.where(pays, lo_block, 0))
    tl.store(schedule + 1, tl.where(pays, hi_block, 0))
    tl.store(schedule + 2, block_count)


@triton.jit  # type: ignore[untyped-decorator]
def split_range(  # type: ignore[no-untyped-def]
    schedule, lo_block, hi_block,
    SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, KV_HEADS: tl.constexpr,
):
    """Of the tiles that are split: the first one within a KV head, how many each KV head has, and
    how many a split has."""
    first_tile = tl.load(schedule + RECORD * (1 + lo_block))
    tiles_per_head = tl.load(schedule + RECORD * (1 + hi_block)) - first_tile
    split_tiles = tl.maximum(tl.cdiv(tiles_per_head * KV_HEADS, SPLITS), MIN_SPLIT_TILES)
    return first_tile, tiles_per_head, split_tiles


@triton.jit  # type: ignore[untyped-decorator]
def _items_of_tiles(  # type: ignore[no-untyped-def]
    schedule, lo_block, hi_block, first_tile, tiles_per_head, lo_tile, hi_tile,
    BLOCK: tl.constexpr,
):
    """The items (KV head and block, in the order of tiles) that two tiles belong to."""
    lo_index, hi_index = lo_block * 0 - 1, lo_block * 0 - 1
    for start in range(lo_block, hi_block, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_split = block < hi_block
        record = schedule + RECORD * (1 + block)
        block_tile = tl.load(record, mask=is_split, other=2147483647)
        lo_index += tl.sum((block_tile - first_tile <= lo_tile % tiles_per_head).to(tl.int32), 0)
        hi_index += tl.sum((block_tile - first_tile <= hi_tile % tiles_per_head).to(tl.int32), 0)
    blocks = hi_block - lo_block
    lo_item = lo_tile // tiles_per_head * blocks + lo_index
    return lo_item, hi_tile // tiles_per_head * blocks + hi_index


@triton.jit  # type: ignore[untyped-decorator]
def work_of_cta(  # type: ignore[no-untyped-def]
    cta, schedule, max_blocks,
    SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A CTA's work: its first item, and their count; the blocks per KV head, and the first of them;
    that block's first tile within a KV head; the tiles per KV head; and its tiles [lo, hi).

    A CTA with a block of its own takes all tiles.
    """
    lo_block, hi_block = tl.load(schedule), tl.load(schedule + 1)
    zero = lo_block * 0
    item, items, blocks, first_block = zero, zero, max_blocks, zero
    first_tile, tiles_per_head, lo_tile, hi_tile = zero, zero, zero, zero + 2147483647
    if cta >= SPLITS:
        block = max_blocks - 1 - (cta - SPLITS) // KV_HEADS
        alone = (block < lo_block) | ((block >= hi_block) & (block < tl.load(schedule + 2)))
        item, items = (cta - SPLITS) % KV_HEADS * max_blocks + block, alone.to(tl.int32)
    else:
        first_tile, tiles_per_head, split_tiles = split_range(
            schedule, lo_block, hi_block, SPLITS, MIN_SPLIT_TILES, KV_HEADS)
        lo_tile = cta * split_tiles
        hi_tile = tl.minimum(cta * split_tiles + split_tiles, tiles_per_head * KV_HEADS)
        blocks, first_block = hi_block - lo_block, lo_block
        if lo_tile < hi_tile:
            item, last_item = _items_of_tiles(
                schedule, lo_block, hi_block, first_tile, tiles_per_head, lo_tile, hi_tile - 1,
                BLOCK)
            items = last_item + 1 - item
    return item, items, blocks, first_block, first_tile, tiles_per_head, lo_tile, hi_tile
# fmt: on
