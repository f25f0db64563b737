"""Paged prefill attention: FlashAttention over the KV cache and the step's own keys, causal.

Cached keys are read through the block table, the step's own keys from the step. A CTA takes a block
of new tokens with all query heads of one KV head, over all keys that the block sees; or a split of
the tiles of several blocks, as `prefill_schedule` says. `paged_attention` also launches
`attention_decode` for the sequences with one new token. Torch reference:
`layers/reference/attention.py`, `paged_attention`.

Where all sequences have few new tokens, as in a verify step, tiles are small, and sequences with
one new token are blocks like the others: `attention_decode` has nothing to do.

`_prefill`         grid (splits + blocks * KV heads,): online softmax over a CTA's tiles
`_combine_splits`  grid (split blocks * KV heads, row tiles): combines blocks that were split

Surprising: the grid has room for the most blocks there can be; CTAs without a block exit at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention.attention_decode import attend_decode
from kvtide.layers.kernels.attention.attention_tiles import (
    attend_new_keys,
    attend_paged_keys,
    kernel_constants,
    softmax_scales,
)
from kvtide.layers.kernels.attention.prefill_schedule import (
    RECORD,
    schedule_blocks,
    split_constants,
    split_range,
    tile_counts,
    work_of_cta,
)
from kvtide.layers.kernels.grid import MIN_ROWS, SEQUENCES_AT_ONCE, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.packing import Fields

TILE_ROWS = 128
"""Rows of a tile (BLOCK_M): new tokens times query heads per KV head."""
FP32_TILE_ROWS = 32
"""Rows of a tile in fp32."""
SHORT_ROWS = 32
"""Rows of a tile that has all new tokens of a sequence, at most."""
LARGE_TILE = 128 * 128
"""Elements of acc (BLOCK_M * BLOCK_D) from which an SM runs one CTA at a time, not two."""
MAX_REGISTERS = 128
"""Registers per thread that let two CTAs of eight warps run on an SM."""
STAGES = 3
"""Pipeline stages of the loop over the step's own keys."""
COMBINED_ELEMENTS = 1 << 13
"""Elements of partial results that are combined at a time."""


def paged_attention(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams
) -> Tensor:
    """Attention of queries (tokens, heads, dim) over cached keys and the step's own: prefill chunks
    and decode tokens alike."""
    out, bounds = torch.empty_like(queries), run.batch.bounds
    if bounds.longest == 1:
        attend_decode(run, place, queries, kept, how, out)
        return out
    short = bounds.longest * queries.shape[1] // kept["k"].shape[1] <= SHORT_ROWS
    _attend_prefill(run, place, queries, kept, how, out, short)
    if bounds.singles and not short:
        attend_decode(run, place, queries, kept, how, out)
    return out


def _attend_prefill(
    run: ForwardPass,
    place: Place,
    queries: Tensor,
    kept: Fields,
    how: AttentionParams,
    out: Tensor,
    short: bool,
) -> None:
    """Attention of all prefill chunks: sequences with more than one new token; of all sequences if
    these are `short`."""
    keys, values, table = kept["k"], kept["v"], run.batch.slots[place.anchor]
    (_, heads, dim), kv_heads = queries.shape, keys.shape[1]
    heads_per_kv, view = heads // kv_heads, run.step.view(place.pool.name, place.layer)
    max_rows = TILE_ROWS if queries.itemsize < 4 else FP32_TILE_ROWS
    longest = run.batch.bounds.longest if short else 1
    rows = max(MIN_ROWS if short else max_rows, power_of_two(longest * heads_per_kv))
    constants = kernel_constants(queries, keys, how, run.step.page_tokens)
    small = rows * constants["BLOCK_D"] < LARGE_TILE
    splits = split_constants(kv_heads, small, short, queries.device)
    tiles = constants["WINDOW"], constants["BLOCK_N"]
    schedule = schedule_blocks(run, rows // heads_per_kv, splits, *tiles, short=short)
    block_tokens, max_blocks = rows // heads_per_kv, len(schedule) - 2
    sizes = {"HEADS_PER_KV": heads_per_kv, "BLOCK_TOKENS": block_tokens, "BLOCK_M": rows, **splits}
    # A split CTA leaves partial results of at most two blocks: its first and its last.
    partial_out = queries.new_empty((2 * splits["SPLITS"], rows, dim), dtype=torch.float32)
    partial_stats = partial_out.new_empty((*partial_out.shape[:2], 2))
    outputs = (out, partial_out, partial_stats, schedule, out.stride()[:2])
    _prefill[(splits["SPLITS"] + max_blocks * kv_heads,)](
        *(queries, keys, values, view["k"], view["v"]),
        *(queries if how.sinks is None else how.sinks, *outputs),
        *(max_blocks, table, table.stride(0)),
        queries.stride()[:2],
        keys.stride()[:2],
        values.stride()[:2],
        view["k"].stride()[:3],
        view["v"].stride()[:3],
        *softmax_scales(how),
        SINKS=how.sinks is not None,
        BLOCK=SEQUENCES_AT_ONCE,
        **constants,
        **sizes,
        num_warps=8 if rows > 64 else 4,
        num_stages=STAGES,
        maxnreg=MAX_REGISTERS if small and rows > 64 else None,
    )
    # Short chunks make few blocks, each in many splits.
    combined_rows, block_d = 4 if short else MIN_ROWS, constants["BLOCK_D"]
    blocks = min(max_blocks, 2 * splits["SPLITS"] // kv_heads + 2)
    _combine_splits[(blocks * kv_heads, rows // combined_rows)](
        *outputs,
        BLOCK_ROWS=combined_rows,
        BLOCK_SPLITS=max(1, COMBINED_ELEMENTS // (combined_rows * block_d)),
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        **sizes,
    )


# fmt: off
@kernel("schedule", "max_blocks", "block_tables", "stride_table")  # type: ignore[untyped-decorator]
def _prefill(  # type: ignore[no-untyped-def]
    q_ptr, k_new, v_new, k_cache, v_cache, sinks,
    out, partial_out, partial_stats, schedule, out_strides, max_blocks,
    block_tables, stride_table,
    q_strides, k_new_strides, v_new_strides, k_cache_strides, v_cache_strides, cap_scale, qk_scale,
    PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, HEADS_PER_KV: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Attends some blocks, or splits of them, over the cache and the step's own keys."""
    cta, offs_m, offs_d = tl.program_id(0), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    item, items, blocks, first_block, first_tile, tiles_per_head, lo_tile, hi_tile = work_of_cta(
        cta, schedule, max_blocks, SPLITS, MIN_SPLIT_TILES, KV_HEADS, BLOCK
    )
    for index in range(item, item + items):
        kv_head, block = index // blocks, first_block + index % blocks
        record = schedule + RECORD * (1 + block)
        row_start, seq_end = tl.load(record + 2), tl.load(record + 5)
        token = row_start + offs_m // HEADS_PER_KV
        head = kv_head * HEADS_PER_KV + offs_m % HEADS_PER_KV
        row_valid = (offs_m < BLOCK_TOKENS * HEADS_PER_KV) & (token < seq_end)
        mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        offsets = token.to(tl.int64)[:, None] * q_strides[0] + head[:, None] * q_strides[1]
        q = tl.load(q_ptr + offsets + offs_d[None, :], mask=mask, other=0.0)
        row_end, seq_start, past = tl.load(record + 3), tl.load(record + 4), tl.load(record + 6)
        old_whole, new_whole, old_masked, new_masked = tile_counts(
            seq_start, past, row_start, row_end, WINDOW, BLOCK_N)
        tiles = old_whole + new_whole + old_masked + new_masked
        block_tile = kv_head * tiles_per_head + tl.load(record) - first_tile
        lo, hi = tl.maximum(lo_tile - block_tile, 0), tl.minimum(hi_tile - block_tile, tiles)
        m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            # The split with the last tile counts the sink.
            sink = tl.load(sinks + head, mask=row_valid, other=0.0).to(tl.float32)
            sink = sink * 1.4426950408889634
            m_i = tl.where(hi == tiles, sink, m_i)
            l_i = tl.where(hi == tiles, l_i + 1.0, l_i)
        m_i, l_i, acc = _attend_tiles(
            q, token, m_i, l_i,
            k_new + kv_head * k_new_strides[1], v_new + kv_head * v_new_strides[1],
            k_cache + kv_head * k_cache_strides[2], v_cache + kv_head * v_cache_strides[2],
            block_tables + tl.load(record + 1).to(tl.int64) * stride_table,
            lo, hi, row_start, row_end, seq_start, seq_end, past, k_new_strides, v_new_strides,
            k_cache_strides, v_cache_strides, cap_scale, qk_scale,
            PAGE_TOKENS, WINDOW, CAPPED, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D,
        )
        if hi - lo == tiles:
            rows = token.to(tl.int64)[:, None]
            offsets = rows * out_strides[0] + head[:, None] * out_strides[1]
            result = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
            tl.store(out + offsets + offs_d[None, :], result.to(out.dtype.element_ty), mask=mask)
        else:
            out_row = (2 * cta + (lo_tile < block_tile).to(tl.int32)) * BLOCK_M + offs_m
            partial = partial_out + out_row[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(partial, acc, mask=(offs_d < HEAD_DIM)[None, :])
            tl.store(partial_stats + 2 * out_row, m_i)
            tl.store(partial_stats + 2 * out_row + 1, l_i)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tiles(  # type: ignore[no-untyped-def]
    q, q_row, m_i, l_i, k_new, v_new, k_cache, v_cache, block_table,
    lo, hi, row_start, row_end, seq_start, seq_end, past,
    k_new_strides, v_new_strides, k_cache_strides, v_cache_strides,
    cap_scale, qk_scale,
    PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Accumulates tiles [lo, hi) of a block, in the order of `tile_counts`."""
    acc, q_position = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), past + q_row - seq_start
    old_whole, new_whole, old_masked, _ = tile_counts(
        seq_start, past, row_start, row_end, WINDOW, BLOCK_N)
    if WINDOW > 0:
        first_key = tl.maximum(past + row_start - seq_start + 1 - WINDOW, 0)
        paged_start = first_key // BLOCK_N * BLOCK_N
        new_start = tl.maximum(seq_start, row_start + 1 - WINDOW)
    else:
        first_key, paged_start, new_start = 0, old_whole * BLOCK_N, seq_start + new_whole * BLOCK_N
        m_i, l_i, acc = attend_paged_keys(
            q, q_position, m_i, l_i, acc, k_cache, v_cache, block_table,
            lo * BLOCK_N, tl.minimum(hi, old_whole) * BLOCK_N, first_key,
            k_cache_strides, v_cache_strides, cap_scale, qk_scale,
            PAGE_TOKENS, WINDOW, CAPPED, False, BLOCK_N, HEAD_DIM, BLOCK_D,
        )
        m_i, l_i, acc = attend_new_keys(
            q, q_row, m_i, l_i, acc, k_new, v_new,
            seq_start + tl.maximum(lo - old_whole, 0) * BLOCK_N,
            seq_start + tl.minimum(hi - old_whole, new_whole) * BLOCK_N, seq_end,
            k_new_strides, v_new_strides, cap_scale, qk_scale, WINDOW, CAPPED, False, BLOCK_N,
            HEAD_DIM, BLOCK_D,
        )
    lo, hi = lo - old_whole - new_whole, hi - old_whole - new_whole
    m_i, l_i, acc = attend_paged_keys(
        q, q_position, m_i, l_i, acc, k_cache, v_cache, block_table,
        paged_start + tl.maximum(lo, 0) * BLOCK_N,
        tl.minimum(paged_start + tl.minimum(hi, old_masked) * BLOCK_N, past),
        first_key,
        k_cache_strides, v_cache_strides, cap_scale, qk_scale,
        PAGE_TOKENS, WINDOW, CAPPED, True, BLOCK_N, HEAD_DIM, BLOCK_D,
    )
    lo, hi = lo - old_masked, hi - old_masked
    return attend_new_keys(
        q, q_row, m_i, l_i, acc, k_new, v_new,
        new_start + tl.maximum(lo, 0) * BLOCK_N, tl.minimum(new_start + hi * BLOCK_N, row_end),
        seq_end,
        k_new_strides, v_new_strides, cap_scale, qk_scale, WINDOW, CAPPED, True, BLOCK_N,
        HEAD_DIM, BLOCK_D,
    )


@kernel("schedule")  # type: ignore[untyped-decorator]
def _combine_splits(  # type: ignore[no-untyped-def]
    out, partial_out, partial_stats, schedule, out_strides,
    SPLITS: tl.constexpr, MIN_SPLIT_TILES: tl.constexpr, KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combines the splits of some rows of one block and KV head."""
    lo_block, hi_block = tl.load(schedule), tl.load(schedule + 1)
    kv_head, block = tl.program_id(0) % KV_HEADS, lo_block + tl.program_id(0) // KV_HEADS
    if block >= hi_block:
        return
    first_tile, tiles_per_head, split_tiles = split_range(
        schedule, lo_block, hi_block, SPLITS, MIN_SPLIT_TILES, KV_HEADS)
    record = schedule + RECORD * (1 + block)
    block_tile = kv_head * tiles_per_head + tl.load(record) - first_tile
    next_tile = kv_head * tiles_per_head + tl.load(record + RECORD) - first_tile
    lo, hi = block_tile // split_tiles, tl.cdiv(next_tile, split_tiles)
    if hi - lo == 1:
        return
    row_start, seq_end = tl.load(record + 2), tl.load(record + 5)
    offs_m, offs_d = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    m_i, l_i = tl.full([BLOCK_ROWS], float("-inf"), tl.float32), tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for start in range(lo, hi, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        partial_row = 2 * split + (split * split_tiles < block_tile).to(tl.int32)
        partial_row, valid = partial_row[None, :] * BLOCK_M + offs_m[:, None], (split < hi)[None, :]
        m_split = tl.load(partial_stats + 2 * partial_row, mask=valid, other=float("-inf"))
        l_split = tl.load(partial_stats + 2 * partial_row + 1, mask=valid, other=0.0)
        acc_split = partial_out + partial_row[:, :, None] * HEAD_DIM + offs_d[None, None, :]
        mask = valid[:, :, None] & (offs_d < HEAD_DIM)[None, None, :]
        acc_split = tl.load(acc_split, mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(m_split, 1))
        # A row without a visible key has m_new = -inf; any finite value avoids a NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m_i - m_safe), tl.exp2(m_split - m_safe[:, None])
        m_i, l_i = m_new, l_i * alpha + tl.sum(l_split * weight, 1)
        acc = acc * alpha[:, None] + tl.sum(acc_split * weight[:, :, None], 1)
    token, head = row_start + offs_m // HEADS_PER_KV, kv_head * HEADS_PER_KV + offs_m % HEADS_PER_KV
    row_valid = (offs_m < BLOCK_TOKENS * HEADS_PER_KV) & (token < seq_end)
    rows = token.to(tl.int64)[:, None]
    offsets = rows * out_strides[0] + head[:, None] * out_strides[1] + offs_d[None, :]
    result = (acc / tl.where(l_i > 0, l_i, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + offsets, result, mask=row_valid[:, None] & (offs_d < HEAD_DIM)[None, :])
# fmt: on
