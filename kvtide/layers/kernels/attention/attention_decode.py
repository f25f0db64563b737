"""Paged decode attention (split-KV): one new token per sequence, as in Flash-Decoding.

A work item is a sequence and a KV head, with at least one tile of keys. All items' tiles form one
sequence of tiles, which the CTAs divide evenly, whatever the context lengths. A CTA boundary may
fall inside an item; `_combine_splits` then combines its partial results. A shared prefix is left to
`attention_cascade`. Torch reference: `layers/reference/attention.py`, `paged_attention`.

`_count_tiles`      grid (1,): the prefix sum of tiles per sequence
`_decode_split_kv`  grid (CTAS_PER_SM * SMs,) or fewer: online softmax over the tiles of a CTA
`_combine_splits`   grid (sequences, heads): softmax-weighted sum of the splits, sinks included

Surprising: CTA c writes its partial result of item i to row c + i. Along the tiles either c or i
grows, so rows are unique. The grid depends on shapes and bounds alone, and which CTA does what on
the lengths in `Batch.rows`, so a CUDA graph of the step can be replayed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention.attention_cascade import SharedPrefixes, attend_cascade
from kvtide.layers.kernels.attention.attention_tiles import (
    attend_paged_keys,
    kernel_constants,
    keys_per_tile,
    softmax_scales,
)
from kvtide.layers.kernels.elementwise import tanh
from kvtide.layers.kernels.grid import MIN_ROWS, SEQUENCES_AT_ONCE, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.packing import Fields

CTAS_PER_SM = 3
"""CTAs that an SM runs at a time; the grid is one wave of them."""
MAX_REGISTERS = 168
"""Registers per thread that let CTAS_PER_SM CTAs run on an SM."""
MIN_TILES = 2
"""Tiles per CTA, at least."""


def attend_decode(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams, out: Tensor
) -> None:
    """Attention of the decode batch (all sequences with one new token) into its rows of `out`."""
    batch, keys, values = run.batch, kept["k"], kept["v"]
    (_, heads, dim), kv_heads, count = queries.shape, keys.shape[1], len(batch.rows)
    heads_per_kv, tile_keys = heads // kv_heads, keys_per_tile(queries, keys)
    prefixes = attend_cascade(run, place, queries, keys, how)
    cascade = None if prefixes is None else (place.anchor, prefixes.group_sequences)
    tile_offsets = run.shared(
        ("tiles", tile_keys, how.window, cascade),
        lambda: _tile_offsets(batch.rows, tile_keys, how.window, prefixes),
    )
    ctas = _grid_size(run, queries, kv_heads, tile_keys, how.window)
    partial_out = queries.new_empty(
        (count * kv_heads + ctas, heads_per_kv, dim), dtype=torch.float32
    )
    # m_i and l_i of every partial result.
    partial_stats = partial_out.new_empty((*partial_out.shape[:2], 2))
    view, table = run.step.view(place.pool.name, place.layer), batch.slots[place.anchor]
    constants = kernel_constants(queries, keys, how, run.step.page_tokens)
    tile_rows = max(MIN_ROWS, power_of_two(heads_per_kv))
    _decode_split_kv[(ctas,)](
        *(queries, keys, values, view["k"], view["v"], partial_out, partial_stats),
        *(batch.rows, table, tile_offsets),
        tile_offsets if prefixes is None else prefixes.prefix_lengths,
        *(count, table.stride(0)),
        queries.stride()[:2],
        keys.stride()[:2],
        values.stride()[:2],
        view["k"].stride()[:3],
        view["v"].stride()[:3],
        *softmax_scales(how),
        KV_HEADS=kv_heads,
        HEADS_PER_KV=heads_per_kv,
        BLOCK_M=tile_rows,
        BLOCK_SEQUENCES=SEQUENCES_AT_ONCE,
        GROUP_SEQUENCES=0 if prefixes is None else prefixes.group_sequences,
        **constants,
        num_warps=4 if tile_rows < 64 else 8,
        maxnreg=MAX_REGISTERS if tile_rows < 64 else None,
    )
    _combine_splits[(count, heads)](
        *(partial_out, partial_stats, queries if how.sinks is None else how.sinks, out),
        *(batch.rows, tile_offsets),
        *((tile_offsets, partial_out, partial_stats) if prefixes is None else prefixes.tensors),
        *(0 if prefixes is None else len(prefixes.partial_out), count, ctas, out.stride()[:2]),
        SINKS=how.sinks is not None,
        GROUP_SEQUENCES=0 if prefixes is None else prefixes.group_sequences,
        KV_HEADS=kv_heads,
        HEADS_PER_KV=heads_per_kv,
        BLOCK_SPLITS=16,
        HEAD_DIM=dim,
        BLOCK_D=constants["BLOCK_D"],
        num_warps=2,
    )


def _grid_size(
    run: ForwardPass, queries: Tensor, kv_heads: int, tile_keys: int, window: int | None
) -> int:
    """CTAs of the split-KV grid: one wave, or fewer where the decode batch has few key tiles."""
    max_past = run.batch.bounds.max_past
    visible_keys = max_past if window is None else min(max_past, window + tile_keys)
    max_tiles = len(run.batch.rows) * kv_heads * max(1, -(-visible_keys // tile_keys))
    resident = CTAS_PER_SM * sm_count(queries.device)
    return max(1, min(resident, -(-max_tiles // MIN_TILES)))


def _tile_offsets(
    rows: Tensor, tile_keys: int, window: int | None, prefixes: SharedPrefixes | None
) -> Tensor:
    """(sequences + 1,) int32: the prefix sum of key tiles per sequence, of one KV head.

    Sequences of a prefill chunk have no tiles here.
    """
    tile_offsets = rows.new_empty(len(rows) + 1)
    _count_tiles[(1,)](
        *(rows, tile_offsets),
        tile_offsets if prefixes is None else prefixes.prefix_lengths,
        len(rows),
        WINDOW=window or 0,
        GROUP_SEQUENCES=0 if prefixes is None else prefixes.group_sequences,
        BLOCK_N=tile_keys,
        BLOCK_SEQUENCES=SEQUENCES_AT_ONCE,
    )
    return tile_offsets


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _cascaded_tokens(  # type: ignore[no-untyped-def]
    prefix_lengths, sequence, past, mask, GROUP_SEQUENCES: tl.constexpr,
):
    """Tokens of a sequence that cascade attention covers: its group's common prefix."""
    if GROUP_SEQUENCES > 0:
        tokens = tl.load(prefix_lengths + 2 * (sequence // GROUP_SEQUENCES), mask=mask, other=0)
        return tl.where(past >= tokens, tokens, 0)
    else:
        return past * 0


@kernel("rows", "count")  # type: ignore[untyped-decorator]
def _count_tiles(  # type: ignore[no-untyped-def]
    rows, tile_offsets, prefix_lengths, count,
    WINDOW: tl.constexpr, GROUP_SEQUENCES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
):
    """The prefix sum of the sequences' key tiles, by one CTA."""
    tiles_before = tl.full([], 0, tl.int32)
    tl.store(tile_offsets, tiles_before)
    for start in range(0, count, BLOCK_SEQUENCES):
        sequence = start + tl.arange(0, BLOCK_SEQUENCES)
        valid = sequence < count
        row_start = tl.load(rows + 3 * sequence, mask=valid, other=0)
        row_end = tl.load(rows + 3 * sequence + 1, mask=valid, other=0)
        past = tl.load(rows + 3 * sequence + 2, mask=valid, other=0)
        if WINDOW > 0:
            first_key = tl.maximum(past + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        else:
            first_key = _cascaded_tokens(prefix_lengths, sequence, past, valid, GROUP_SEQUENCES)
        tiles = tl.maximum(1, (past - first_key + BLOCK_N - 1) // BLOCK_N)
        tiles = tl.where(valid & (row_end - row_start == 1), tiles, 0)
        tl.store(tile_offsets + sequence + 1, tiles_before + tl.cumsum(tiles, 0), mask=valid)
        tiles_before += tl.sum(tiles, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _item_of_tile(  # type: ignore[no-untyped-def]
    tile_offsets, tile, count, KV_HEADS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):
    """The work item that a tile belongs to: sequence * KV_HEADS + KV head."""
    sequence = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK_SEQUENCES):
        offs = start + tl.arange(0, BLOCK_SEQUENCES)
        end_tile = tl.load(tile_offsets + 1 + offs, mask=offs < count, other=2147483647 // KV_HEADS)
        sequence += tl.sum((end_tile * KV_HEADS <= tile).to(tl.int32), 0)
    seq_offset = tl.load(tile_offsets + sequence)
    seq_tiles = tl.load(tile_offsets + sequence + 1) - seq_offset
    return sequence * KV_HEADS + (tile - seq_offset * KV_HEADS) // seq_tiles


@triton.jit  # type: ignore[untyped-decorator]
def _init_state(  # type: ignore[no-untyped-def]
    q, k, v, is_first, cap_scale, qk_scale,
    CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The initial state: the token's own key and value in an item's first split, else empty."""
    qk = tl.sum(q.to(tl.float32) * k.to(q.dtype).to(tl.float32)[None, :], 1)
    if CAPPED:
        qk = tanh(qk * cap_scale)
    m_i = tl.where(is_first, qk * qk_scale, float("-inf"))
    l_i = tl.zeros([BLOCK_M], tl.float32) + tl.where(is_first, 1.0, 0.0)
    own = tl.where(is_first, v.to(tl.float32), 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + own[None, :]
    return m_i, l_i, acc


@kernel("rows", "block_tables", "count", "stride_table")  # type: ignore[untyped-decorator]
def _decode_split_kv(  # type: ignore[no-untyped-def]
    q_ptr, k_new, v_new, k_cache, v_cache, partial_out, partial_stats, rows, block_tables,
    tile_offsets, prefix_lengths, count, stride_table,
    q_strides, k_new_strides, v_new_strides, k_cache_strides, v_cache_strides, cap_scale, qk_scale,
    PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
    GROUP_SEQUENCES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Attends over this CTA's tiles, item by item, and stores a partial result of each."""
    cta, total_tiles = tl.program_id(0), tl.load(tile_offsets + count) * KV_HEADS
    tiles_per_cta = tl.cdiv(total_tiles, tl.num_programs(0))
    lo_tile = cta * tiles_per_cta
    hi_tile = tl.minimum(cta * tiles_per_cta + tiles_per_cta, total_tiles)
    if lo_tile >= hi_tile:
        return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_dim = offs_d < HEAD_DIM
    mask = (offs_m < HEADS_PER_KV)[:, None] & in_dim[None, :]
    last_item = _item_of_tile(tile_offsets, hi_tile - 1, count, KV_HEADS, BLOCK_SEQUENCES)
    first_item = _item_of_tile(tile_offsets, lo_tile, count, KV_HEADS, BLOCK_SEQUENCES)
    for item in range(first_item, last_item + 1):
        sequence, kv_head = item // KV_HEADS, item % KV_HEADS
        token, past = tl.load(rows + 3 * sequence).to(tl.int64), tl.load(rows + 3 * sequence + 2)
        seq_offset = tl.load(tile_offsets + sequence)
        seq_tiles = tl.load(tile_offsets + sequence + 1) - seq_offset
        item_begin = seq_offset * KV_HEADS + kv_head * seq_tiles
        lo, hi = tl.maximum(lo_tile - item_begin, 0), tl.minimum(hi_tile - item_begin, seq_tiles)
        offsets = token * q_strides[0]
        heads = (kv_head * HEADS_PER_KV + offs_m)[:, None]
        offsets = offsets + heads * q_strides[1] + offs_d[None, :]
        q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
        k_offsets, v_offsets = token * k_new_strides[0] + offs_d, token * v_new_strides[0] + offs_d
        k = tl.load(k_new + k_offsets + kv_head * k_new_strides[1], mask=in_dim, other=0.0)
        v = tl.load(v_new + v_offsets + kv_head * v_new_strides[1], mask=in_dim, other=0.0)
        m_i, l_i, acc = _init_state(
            q, k, v, lo == 0, cap_scale, qk_scale, CAPPED, BLOCK_M, BLOCK_D
        )
        if WINDOW > 0:
            first_key = tl.maximum(past + 1 - WINDOW, 0)
        else:
            first_key = _cascaded_tokens(
                prefix_lengths, sequence, past, sequence >= 0, GROUP_SEQUENCES)
        first_tile_key = first_key // BLOCK_N * BLOCK_N
        m_i, l_i, acc = attend_paged_keys(
            q, offs_m * 0 + past, m_i, l_i, acc,
            k_cache + kv_head * k_cache_strides[2], v_cache + kv_head * v_cache_strides[2],
            block_tables + tl.cast(sequence, tl.int64) * stride_table,
            first_tile_key + lo * BLOCK_N, tl.minimum(first_tile_key + hi * BLOCK_N, past),
            first_key,
            k_cache_strides, v_cache_strides, cap_scale, qk_scale,
            PAGE_TOKENS, WINDOW, CAPPED, True, BLOCK_N, HEAD_DIM, BLOCK_D,
        )
        out_row = (tl.cast(item, tl.int64) + cta) * HEADS_PER_KV + offs_m
        tl.store(partial_out + out_row[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
        tl.store(partial_stats + 2 * out_row, m_i, mask=offs_m < HEADS_PER_KV)
        tl.store(partial_stats + 2 * out_row + 1, l_i, mask=offs_m < HEADS_PER_KV)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate_splits(  # type: ignore[no-untyped-def]
    partial_out, partial_stats, rows, valid, m_i, l_i, acc, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rescales and adds some splits' partial results."""
    offs_d = tl.arange(0, BLOCK_D)
    m_split = tl.load(partial_stats + 2 * rows, mask=valid, other=float("-inf"))
    l_split = tl.load(partial_stats + 2 * rows + 1, mask=valid, other=0.0)
    mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    acc_split = partial_out + rows[:, None] * HEAD_DIM + offs_d[None, :]
    acc_split = tl.load(acc_split, mask=mask, other=0.0)
    m_new = tl.maximum(m_i, tl.max(m_split, 0))
    weight, alpha = tl.exp2(m_split - m_new), tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(l_split * weight, 0)
    return m_new, l_i, acc * alpha + tl.sum(acc_split * weight[:, None], 0)


@kernel("rows", "prefix_splits", "count", "ctas")  # type: ignore[untyped-decorator]
def _combine_splits(  # type: ignore[no-untyped-def]
    partial_out, partial_stats, sinks, out, rows, tile_offsets, prefix_lengths, prefix_out,
    prefix_stats, prefix_splits, count, ctas, out_strides,
    SINKS: tl.constexpr, GROUP_SEQUENCES: tl.constexpr,
    KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Combines the splits of a sequence and head, and those of its shared prefix."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    seq_offset = tl.load(tile_offsets + sequence)
    seq_tiles = tl.load(tile_offsets + sequence + 1) - seq_offset
    if seq_tiles == 0:
        return
    kv_head = head // HEADS_PER_KV
    tiles_per_cta = tl.cdiv(tl.load(tile_offsets + count) * KV_HEADS, ctas)
    item_begin = seq_offset * KV_HEADS + kv_head * seq_tiles
    lo, hi = item_begin // tiles_per_cta, (item_begin + seq_tiles - 1) // tiles_per_cta + 1
    offs_d = tl.arange(0, BLOCK_D)
    m_i, l_i, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    if SINKS:
        m_i, l_i = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0
    for start in range(lo, hi, BLOCK_SPLITS):
        cta = start + tl.arange(0, BLOCK_SPLITS)
        out_row = (sequence * KV_HEADS + kv_head + cta).to(tl.int64) * HEADS_PER_KV
        out_row += head % HEADS_PER_KV
        m_i, l_i, acc = _accumulate_splits(
            partial_out, partial_stats, out_row, cta < hi, m_i, l_i, acc, HEAD_DIM, BLOCK_D)
    if GROUP_SEQUENCES > 0:
        past = tl.load(rows + 3 * sequence + 2)
        if _cascaded_tokens(prefix_lengths, sequence, past, sequence >= 0, GROUP_SEQUENCES) > 0:
            for start in range(0, prefix_splits, BLOCK_SPLITS):
                split = start + tl.arange(0, BLOCK_SPLITS)
                out_row = (split.to(tl.int64) * count + sequence) * (KV_HEADS * HEADS_PER_KV) + head
                m_i, l_i, acc = _accumulate_splits(
                    prefix_out, prefix_stats, out_row, split < prefix_splits,
                    m_i, l_i, acc, HEAD_DIM, BLOCK_D)
    token = tl.load(rows + 3 * sequence).to(tl.int64)
    offsets = token * out_strides[0] + head * out_strides[1] + offs_d
    tl.store(out + offsets, (acc / l_i).to(out.dtype.element_ty), mask=offs_d < HEAD_DIM)
# fmt: on
