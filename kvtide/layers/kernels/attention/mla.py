"""Paged attention of all heads over one vector per token: MLA's latents, and DeepSeek-V4's window
with compressed blocks.

All heads share a key, so a tile of rows is the heads of one token, or of neighbouring ones. Where
the grid would not fill the device, the keys are split (split-KV, `mla_tiles`).

`mla_attention`    MLA over latents, all or the top-k of an indexer.
                   Torch reference: `layers/reference/mla.py`, `mla_attention`.
`block_attention`  DeepSeek-V4: a sliding window, and compressed entries, all or the top-k.
                   Torch reference: `layers/reference/mla.py`, `block_attention`.
`_attend_latents`     grid (query blocks * head tiles, splits)
`_attend_compressed`  grid (tokens * head tiles, splits)

What always holds:
- Grids depend on shapes and `Bounds` alone, so a CUDA graph can be replayed.
- Nothing is read where a table has no slot. A query without visible keys gets zeros.
- A selection of a hot pool has places in its arena, -1 for none (LOCATED, from `swap_in`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention.mla_tiles import (
    LOG2_E,
    TILE_KEYS,
    TILE_ROWS,
    SplitKV,
    empty_state,
    load_joined_tile,
    load_scaled_tile,
    online_softmax_step,
    rows_per_tile,
    store_partial,
    tile_constants,
)
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.query_blocks import longest_first, query_blocks
from kvtide.layers.packing import plain
from kvtide.spec import Encoding
from kvtide.spec.families.pool_parts import WORD_BYTES
from kvtide.spec.pool import JOINED_GROUP, SCALED_GROUP


@dataclass(frozen=True, slots=True)
class _Compressed:
    """The compressed entries that queries see, of `ratio` tokens each; 0 if there are none."""

    place: Place
    ratio: int
    selected: Tensor | None

    def max_visible(self, tokens: int) -> int:
        """Entries that a query sees at most, in a sequence of so many tokens."""
        if self.ratio == 0:
            return 0
        return tokens // self.ratio if self.selected is None else self.selected.shape[1]


def block_attention(
    run: ForwardPass,
    window: Place,
    kept: Tensor,
    entries: Place | None,
    queries: Tensor,
    how: AttentionParams,
    selected: Tensor | None = None,
) -> Tensor:
    """Attention of queries (tokens, heads, dim) over vectors that are key and value at once.

    A query sees a sliding window: cached tokens through the pages of `window`, the step's own in
    `kept` (tokens, dim). Of the compressed `entries` it sees the `selected` top-k
    (`select_entries`; `swap_in` if they are hot), or all that are complete at its position.
    """
    batch, queries = run.batch, queries.contiguous()
    # Exact if queries have 16 bits, or the dtype of `kept`.
    kept = kept.to(queries.dtype)
    tokens, heads, dim = queries.shape
    compressed = _Compressed(
        entries or window, entries.pool.tokens_per_entry if entries else 0, selected
    )
    tile_rows = rows_per_tile(heads)
    ctas = tokens * divided_up(heads, tile_rows)
    assert how.window is not None, "the step's own tokens are seen through a window"
    visible = compressed.max_visible(batch.bounds.max_past + batch.bounds.longest) + how.window
    split = SplitKV.of(queries, dim, ctas, tile_rows, visible)
    window_fields = _packed_fields(run, window)
    compressed_fields = _packed_fields(run, compressed.place)
    tables = batch.slots[window.anchor], batch.slots[compressed.place.anchor]
    strides = [fields[0].stride()[:2] for fields in (window_fields, compressed_fields)]
    assert strides[0][1] == strides[1][1], "entries of both have one size"
    nope = _packed_nope(window, window_fields[0], dim)
    # Unpacking is what larger tiles speed up; two CTAs of fewer rows share an SM's memory.
    tile_keys = 2 * TILE_KEYS if nope and tile_rows == TILE_ROWS else TILE_KEYS
    _attend_compressed[(ctas, split.count)](
        *(queries, kept, *window_fields, *compressed_fields),
        *(split.partial_out, split.partial_stats),
        *(queries if other is None else other for other in (selected, how.sinks)),
        *(batch.rows, batch.owners, *tables, *(table.stride(0) for table in tables)),
        *(kept.stride(0), 0 if selected is None else selected.shape[1], how.scale * LOG2_E, tokens),
        WINDOW_STRIDES=strides[0],
        COMPRESSED_STRIDES=strides[1],
        PAGE_TOKENS=run.step.page_tokens,
        PAGE_ENTRIES=run.step.page_tokens // max(1, compressed.ratio),
        RATIO=compressed.ratio,
        SELECTED=selected is not None,
        LOCATED=compressed.place.pool.hot is not None,
        WINDOW=how.window,
        SINKS=how.sinks is not None,
        SPLIT=split.count > 1,
        HEADS=heads,
        BLOCK_NEW=MIN_ROWS if batch.bounds.longest == 1 else 32,
        HEAD_DIM=dim,
        NOPE=nope,
        GROUP=JOINED_GROUP,
        BLOCK_M=tile_rows,
        **tile_constants(queries, tile_rows, dim, tile_keys),
    )
    return split.combine(queries.dtype)


def _packed_nope(place: Place, nope: Tensor, dim: int) -> int:
    """Elements of a packed vector in e4m3; 0 if vectors are plain."""
    if place.pool.entry.encoding is not Encoding.JOINED:
        return 0
    count = nope.shape[-1]
    assert count // JOINED_GROUP == (dim - 1) // JOINED_GROUP, "the rope part is within one group"
    return count


def _packed_fields(run: ForwardPass, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """A vector's fields if packed: nope, rope, and all scales as one word. Else the vector in place
    of each."""
    view = run.step.view(place.pool.name, place.layer)
    if place.pool.entry.encoding is Encoding.JOINED:
        scales = plain(view["scale"])
        words = scales.as_strided((*scales.shape[:-1], WORD_BYTES), scales.stride())
        return view["nope"], view["rope"], words.view(torch.int64)
    return (view["kv"],) * 3


# -- latents -----------------------------------------------------------------------------------


def mla_attention(
    run: ForwardPass,
    place: Place,
    queries: Tensor,
    how: AttentionParams,
    selected: Tensor | None = None,
) -> Tensor:
    """Of queries (tokens, heads, latent + rope) the output (tokens, heads, latent).

    A key is a token's latent with its rope part, and its value the latent. A query sees the
    `selected` top-k tokens (`select_entries`; `swap_in` if they are hot), or all up to itself. The
    step's own tokens are read from the pages too.
    """
    batch, queries = run.batch, queries.contiguous()
    tokens, heads, _ = queries.shape
    view = run.step.view(place.pool.name, place.layer)
    latent, rope, scales = view["latent"], view["rope"], view.get("latent_scale")
    rank, rope_dim = latent.shape[-1], rope.shape[-1]
    block_tokens = (
        1 if batch.bounds.longest == 1 or selected is not None else max(1, TILE_ROWS // heads)
    )
    blocks, busy_blocks = batch.owners, tokens
    if block_tokens > 1:
        query_tiles = query_blocks(run, block_tokens)
        blocks, busy_blocks = query_tiles.table, query_tiles.busy
    tile_rows = rows_per_tile(block_tokens * heads)
    head_tiles = divided_up(block_tokens * heads, tile_rows)
    visible = batch.bounds.max_past + batch.bounds.longest
    visible_keys = visible if selected is None else min(visible, selected.shape[1])
    split = SplitKV.of(queries, rank, busy_blocks * head_tiles, tile_rows, visible_keys)
    table = batch.slots[place.anchor]
    # Larger tiles need shared memory: of gathered latents, those in eight bits leave it.
    large = tile_rows == TILE_ROWS and (selected is None) is (scales is None)
    _attend_latents[(len(blocks) * head_tiles, split.count)](
        *(queries, latent, latent if scales is None else scales, rope),
        *(split.partial_out, split.partial_stats),
        *(queries if selected is None else selected, batch.rows, blocks, table, table.stride(0)),
        *(0 if selected is None else selected.shape[1], how.scale * LOG2_E, tokens),
        LATENT_STRIDES=latent.stride()[:2],
        SCALE_STRIDES=(0, 0) if scales is None else scales.stride()[:2],
        ROPE_STRIDES=rope.stride()[:2],
        PAGE_TOKENS=run.step.page_tokens,
        SELECTED=selected is not None,
        LOCATED=place.pool.hot is not None,
        SPLIT=split.count > 1,
        HEADS=heads,
        TOKENS=block_tokens,
        HEAD_DIM=rank,
        ROPE_DIM=rope_dim,
        BLOCK_ROPE=max(MIN_ROWS, power_of_two(rope_dim)),
        GROUP=0 if scales is None else SCALED_GROUP,
        BLOCK_M=tile_rows,
        **tile_constants(queries, tile_rows, rank, 2 * TILE_KEYS if large else TILE_KEYS),
    )
    return split.combine(queries.dtype)


# -- kernels -----------------------------------------------------------------------------------


# fmt: off
@triton.jit
def _tiles_of_split(total_tiles, split, splits):  # type: ignore[no-untyped-def]
    """The first tile of a split, and the end."""
    split_tiles = tl.cdiv(total_tiles, splits)
    return split * split_tiles, tl.minimum(total_tiles, split * split_tiles + split_tiles)


@triton.jit  # type: ignore[untyped-decorator]
def _count_tiles(  # type: ignore[no-untyped-def]
    position, past, top_k,
    RATIO: tl.constexpr, SELECTED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Where a query's window starts, how many compressed entries it sees, the tiles of these, and
    all tiles: those of the window's cached tokens come last."""
    window_start, visible = tl.maximum(0, position + 1 - WINDOW), 0
    if RATIO > 0:
        visible = (position + 1) // RATIO
    # Selected indices are at the front of their row.
    compressed_tiles = tl.cdiv(tl.minimum(top_k, visible) if SELECTED else visible, BLOCK_N)
    window_tiles = tl.cdiv(tl.maximum(past - window_start, 0), BLOCK_N)
    return window_start, visible, compressed_tiles, compressed_tiles + window_tiles


@triton.jit  # type: ignore[untyped-decorator]
def _entries_of_tile(  # type: ignore[no-untyped-def]
    tile, cols, selected, compressed_tiles, window_start, past, top_k, visible,
    SELECTED: tl.constexpr, LOCATED: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Indices of a tile's entries, -1 for none.

    Tiles of compressed entries come first, then those of the window's cached tokens.
    """
    is_compressed = tile < compressed_tiles
    compressed_entry = tile * BLOCK_N
    window_entry = window_start + (tile - compressed_tiles) * BLOCK_N
    entry = tl.where(is_compressed, compressed_entry, window_entry) + cols
    if SELECTED:
        indices = tl.load(selected + entry, mask=is_compressed & (entry < top_k), other=-1)
        entry = tl.where(is_compressed, indices, entry)
    if LOCATED:
        return tl.where(is_compressed | (entry < past), entry, -1)
    else:
        return tl.where(entry < tl.where(is_compressed, visible, past), entry, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _locate_tile(  # type: ignore[no-untyped-def]
    tile, entry, cols, selected, compressed_table, window_table, compressed_tiles, window_start,
    past, top_k, visible,
    PAGE_ENTRIES: tl.constexpr, PAGE_TOKENS: tl.constexpr, SELECTED: tl.constexpr,
    LOCATED: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Slots of a tile's entries, -1 for none, and their offsets in the page; and the indices of the
    next tile's entries, which its own call takes: so no load waits for another."""
    is_compressed = tile < compressed_tiles
    page = tl.where(is_compressed, entry // PAGE_ENTRIES, entry // PAGE_TOKENS)
    if LOCATED:
        in_window = (entry >= 0) & (tile >= compressed_tiles)
        slot = tl.load(window_table + page, mask=in_window, other=-1)
        slot = tl.where(is_compressed & (entry >= 0), page, slot)
    else:
        table = tl.where(is_compressed, compressed_table, window_table)
        slot = tl.load(table + page, mask=entry >= 0, other=-1)
    within = tl.where(is_compressed, entry % PAGE_ENTRIES, entry % PAGE_TOKENS)
    return slot, within, _entries_of_tile(
        tile + 1, cols, selected, compressed_tiles, window_start, past, top_k, visible, SELECTED,
        LOCATED, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_new_keys(  # type: ignore[no-untyped-def]
    q, kv_new, stride_new_token, first, last, scale, m_i, l_i, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Accumulates the step's own rows from `first` to `last`."""
    offs_d = tl.arange(0, BLOCK_D)
    for start_n in range(first, last + 1, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask = (offs_n <= last)[:, None] & (offs_d < HEAD_DIM)[None, :]
        offsets = offs_n.to(tl.int64)[:, None] * stride_new_token + offs_d[None, :]
        k = tl.load(kv_new + offsets, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((offs_n <= last)[None, :], scores, float("-inf"))
        m_i, l_i, acc = online_softmax_step(scores, k, m_i, l_i, acc)
    return m_i, l_i, acc


@kernel(  # type: ignore[untyped-decorator]
    "rows", "owners", "window_tables", "compressed_tables", "stride_window_table", "stride_table",
    "tokens"
)
def _attend_compressed(  # type: ignore[no-untyped-def]
    q_ptr, kv_new, window_nope, window_rope, window_scale, compressed_nope, compressed_rope,
    compressed_scale, partial_out, partial_stats, selected, sinks, rows, owners, window_tables,
    compressed_tables, stride_window_table, stride_table, stride_new_token, top_k, scale, tokens,
    WINDOW_STRIDES: tl.constexpr, COMPRESSED_STRIDES: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    PAGE_ENTRIES: tl.constexpr, RATIO: tl.constexpr, SELECTED: tl.constexpr, LOCATED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_NEW: tl.constexpr, HEAD_DIM: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    token, split, splits = tl.program_id(0) // HEAD_TILES, tl.program_id(1), tl.num_programs(1)
    sequence = tl.load(owners + token)
    start, past = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 2)
    position = past + token - start
    head = tl.program_id(0) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, cols, row_valid = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), head < HEADS
    out_row = token.to(tl.int64) * HEADS + head
    mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + out_row[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
    m_i, l_i, acc = empty_state(BLOCK_M, BLOCK_D)
    if SINKS and split == splits - 1:
        m_i = tl.load(sinks + head, mask=row_valid, other=0.0).to(tl.float32) * 1.4426950408889634
        l_i += 1.0
    window_start, visible, compressed_tiles, total_tiles = _count_tiles(
        position, past, top_k, RATIO, SELECTED, WINDOW, BLOCK_N)
    lo, hi = _tiles_of_split(total_tiles, split, splits)
    selected = selected + token.to(tl.int64) * top_k
    compressed_tables = compressed_tables + sequence * stride_table
    window_tables = window_tables + sequence * stride_window_table
    entry = _entries_of_tile(lo, cols, selected, compressed_tiles, window_start, past, top_k,
        visible, SELECTED, LOCATED, BLOCK_N)
    slot, within, entry = _locate_tile(
        lo, entry, cols, selected, compressed_tables, window_tables, compressed_tiles, window_start,
        past, top_k, visible, PAGE_ENTRIES, PAGE_TOKENS, SELECTED, LOCATED, BLOCK_N)
    for tile in range(lo, hi):
        is_compressed, valid = tile < compressed_tiles, slot >= 0
        stride_slot = tl.where(is_compressed, COMPRESSED_STRIDES[0], WINDOW_STRIDES[0])
        offsets = slot.to(tl.int64) * stride_slot + within * WINDOW_STRIDES[1]
        k = load_joined_tile(
            tl.where(is_compressed, compressed_nope, window_nope),
            tl.where(is_compressed, compressed_rope, window_rope),
            tl.where(is_compressed, compressed_scale, window_scale), offsets, valid, q, HEAD_DIM,
            BLOCK_D, NOPE, GROUP, BLOCK_N)
        # Prefetch: the slots of the next tile, before this one is used.
        slot, within, entry = _locate_tile(
            tile + 1, entry, cols, selected, compressed_tables, window_tables, compressed_tiles,
            window_start, past, top_k, visible, PAGE_ENTRIES, PAGE_TOKENS, SELECTED, LOCATED,
            BLOCK_N)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        m_i, l_i, acc = online_softmax_step(scores, k, m_i, l_i, acc)
    # The last split takes the step's own tokens.
    first = tl.maximum(start, token + 1 - WINDOW) if split == splits - 1 else token + 1
    m_i, l_i, acc = _attend_new_keys(
        q, kv_new, stride_new_token, first, token, scale, m_i, l_i, acc, HEAD_DIM, BLOCK_D,
        BLOCK_NEW)
    out_row += split.to(tl.int64) * tokens * HEADS
    store_partial(
        partial_out, partial_stats, out_row, row_valid, m_i, l_i, acc, HEAD_DIM, BLOCK_D, SPLIT)


@triton.jit  # type: ignore[untyped-decorator]
def _locate_latents(  # type: ignore[no-untyped-def]
    tile, cols, selected, block_table, top_k, visible,
    PAGE_TOKENS: tl.constexpr, SELECTED: tl.constexpr, LOCATED: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Indices of a tile's tokens, and their slots (one slot if a page holds whole tiles), -1 for
    none."""
    entry = tile * BLOCK_N + cols
    if SELECTED:
        entry = tl.load(selected + entry, mask=entry < top_k, other=-1)
    if LOCATED:
        slot = tl.where(entry >= 0, entry // PAGE_TOKENS, -1)
    elif SELECTED or PAGE_TOKENS % BLOCK_N > 0:
        valid = (entry >= 0) & (entry < visible)
        slot = tl.load(block_table + entry // PAGE_TOKENS, mask=valid, other=-1)
    else:
        # The tile is within one page.
        page = tile * BLOCK_N // PAGE_TOKENS
        slot = tl.load(block_table + page, mask=tile * BLOCK_N < visible, other=-1)
    return entry, slot


@triton.jit  # type: ignore[untyped-decorator]
def _load_ropes(  # type: ignore[no-untyped-def]
    ropes, offsets, valid, offs_rope, ROPE_DIM: tl.constexpr,
):
    """The rope parts of a tile's keys."""
    mask = valid[:, None] & (offs_rope < ROPE_DIM)[None, :]
    return tl.load(ropes + offsets[:, None] + offs_rope[None, :], mask=mask, other=0.0)


@kernel(  # type: ignore[untyped-decorator]
    "rows", "owners", "block_tables", "stride_table", "tokens"
)
def _attend_latents(  # type: ignore[no-untyped-def]
    q_ptr, latents, scales, ropes, partial_out, partial_stats, selected, rows, owners, block_tables,
    stride_table, top_k, scale, tokens, LATENT_STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    ROPE_STRIDES: tl.constexpr, PAGE_TOKENS: tl.constexpr, SELECTED: tl.constexpr,
    LOCATED: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_ROPE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (TOKENS * HEADS + BLOCK_M - 1) // BLOCK_M
    index, split = longest_first(tl.program_id(0), tl.num_programs(0)), tl.program_id(1)
    block, head_tile = index // HEAD_TILES, index % HEAD_TILES
    # With one token per block, `owners` has the sequence of a token, else it has query blocks.
    sequence = tl.load(owners + block * (1 if TOKENS == 1 else 3))
    block_start = block if TOKENS == 1 else tl.load(owners + block * 3 + 1)
    if sequence < 0:
        return
    row_start, row_end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    position_offset = tl.load(rows + 3 * sequence + 2) - row_start
    offs_m = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, offs_rope, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_N)
    token, row_valid = block_start + offs_m // HEADS, offs_m < TOKENS * HEADS
    row_valid = row_valid & (token < row_end)
    out_row = token.to(tl.int64) * HEADS + offs_m % HEADS
    q_ptr = q_ptr + out_row[:, None] * (HEAD_DIM + ROPE_DIM)
    mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offs_d[None, :], mask=mask, other=0.0)
    rope_mask = row_valid[:, None] & (offs_rope < ROPE_DIM)[None, :]
    q_rope = tl.load(q_ptr + HEAD_DIM + offs_rope[None, :], mask=rope_mask, other=0.0)
    m_i, l_i, acc = empty_state(BLOCK_M, BLOCK_D)
    visible = position_offset + tl.minimum(block_start + TOKENS, row_end)
    total_tiles = tl.cdiv(tl.minimum(top_k, visible) if SELECTED else visible, BLOCK_N)
    lo, hi = _tiles_of_split(total_tiles, split, tl.num_programs(1))
    selected = selected + block_start.to(tl.int64) * top_k
    block_tables = block_tables + sequence * stride_table
    entry, slot = _locate_latents(
        lo, cols, selected, block_tables, top_k, visible, PAGE_TOKENS, SELECTED, LOCATED, BLOCK_N)
    for tile in range(lo, hi):
        slot_index, page_entry = slot.to(tl.int64), entry % PAGE_TOKENS
        if not SELECTED and PAGE_TOKENS % BLOCK_N == 0:
            entry, page_entry = tile * BLOCK_N + cols, tile * BLOCK_N % PAGE_TOKENS + cols
        valid = (slot >= 0) if LOCATED else (slot >= 0) & (entry < visible)
        k = load_scaled_tile(
            latents, scales, slot_index * LATENT_STRIDES[0] + page_entry * LATENT_STRIDES[1],
            slot_index * SCALE_STRIDES[0] + page_entry * SCALE_STRIDES[1],
            valid, q, HEAD_DIM, BLOCK_D, GROUP, BLOCK_N)
        rope_offsets = slot_index * ROPE_STRIDES[0] + page_entry * ROPE_STRIDES[1]
        k_rope = _load_ropes(ropes, rope_offsets, valid, offs_rope, ROPE_DIM)
        is_past = entry[None, :] <= (position_offset + token)[:, None]
        visible_mask = valid[None, :] if LOCATED else valid[None, :] & is_past
        # Prefetch: the slots of the next tile, before this one is used.
        entry, slot = _locate_latents(
            tile + 1, cols, selected, block_tables, top_k, visible, PAGE_TOKENS, SELECTED, LOCATED,
            BLOCK_N)
        scores = tl.dot(q_rope, tl.trans(k_rope.to(q.dtype)), input_precision="ieee")
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee") * scale
        scores = tl.where(visible_mask, scores, float("-inf"))
        m_i, l_i, acc = online_softmax_step(scores, k, m_i, l_i, acc)
    out_row += split.to(tl.int64) * tokens * HEADS
    store_partial(
        partial_out, partial_stats, out_row, row_valid, m_i, l_i, acc, HEAD_DIM, BLOCK_D, SPLIT)


# fmt: on
