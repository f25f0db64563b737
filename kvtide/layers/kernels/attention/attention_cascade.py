"""Cascade attention: the shared prefix of a decode batch, read once per group of sequences.

Sequences over one system prompt share its pages. Neighbours in the batch form a group, whose
queries attend together over the pages that all of them share. `attention_decode` attends over the
rest of each sequence and combines both. Torch reference: `layers/reference/attention.py`,
`paged_attention`.

`_find_shared_prefix`  grid (groups,): the length of a group's common prefix, in whole tiles
`_cascade_prefix`      grid (KV heads, groups, splits): paged split-KV attention over the prefix

Surprising: shared prefixes are found on the device, by comparing block tables. A CUDA graph is
replayed with other sequences, so nothing about them may be decided on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.attention.attention_tiles import (
    attend_paged_keys,
    kernel_constants,
    softmax_scales,
)
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel

TILE_ROWS = 64
"""Rows of a tile: queries of a group times query heads per KV head."""
FP32_TILE_ROWS = 32
"""Rows of a tile in fp32."""
MIN_TOKENS = 256
"""A shorter common prefix is not worth a kernel of its own."""
CTAS_PER_SM = 2
"""CTAs that the grid has per SM, at most."""
MAX_SPLITS = 32
_PAGES_PER_TILE = 64
"""Pages whose slots are compared at a time."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The common prefixes of groups of sequences, and the attention over them.

    group_sequences  sequences per group
    prefix_lengths   (groups, 2) int32: tokens of the common prefix, 0 if too few, and a sequence
                     of the group that has it
    partial_out      (splits, sequences, heads, dim) fp32: acc of every split of the prefix
    partial_stats    (splits, sequences, heads, 2) fp32: m_i and l_i of every split
    """

    group_sequences: int
    prefix_lengths: Tensor
    partial_out: Tensor
    partial_stats: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.prefix_lengths, self.partial_out, self.partial_stats


def attend_cascade(
    run: ForwardPass, place: Place, queries: Tensor, keys: Tensor, how: AttentionParams
) -> SharedPrefixes | None:
    """Attention of the decode batch over shared prefixes; None if no two sequences can share one.

    A shared prefix needs full attention, at least two sequences and MIN_TOKENS of context.
    """
    batch = run.batch
    (_, heads, dim), kv_heads, count = queries.shape, keys.shape[1], len(batch.rows)
    heads_per_kv = heads // kv_heads
    group_sequences = (TILE_ROWS if queries.itemsize < 4 else FP32_TILE_ROWS) // heads_per_kv
    if how.window is not None or min(group_sequences, count) < 2:
        return None
    if batch.bounds.max_past < MIN_TOKENS:
        return None
    groups, page = divided_up(count, group_sequences), run.step.page_tokens
    view, table = run.step.view(place.pool.name, place.layer), batch.slots[place.anchor]
    constants = kernel_constants(queries, keys, how, page)
    key = ("prefixes", place.anchor, group_sequences, constants["BLOCK_N"])
    prefix_lengths = run.shared(
        key,
        lambda: _shared_prefix_lengths(
            batch.rows, table, group_sequences, page, constants["BLOCK_N"]
        ),
    )
    ctas = CTAS_PER_SM * sm_count(queries.device)
    max_splits = min(ctas // (kv_heads * groups), divided_up(batch.bounds.max_past, MIN_TOKENS))
    splits = 1 << max(1, min(max_splits, MAX_SPLITS)).bit_length() - 1
    partial_out = queries.new_empty((splits, count, heads, dim), dtype=torch.float32)
    partial_stats = partial_out.new_empty((*partial_out.shape[:3], 2))
    prefixes = SharedPrefixes(group_sequences, prefix_lengths, partial_out, partial_stats)
    _cascade_prefix[(kv_heads, groups, splits)](
        *(queries, view["k"], view["v"], prefixes.partial_out, prefixes.partial_stats),
        *(batch.rows, table, prefix_lengths, count, table.stride(0)),
        queries.stride()[:2],
        view["k"].stride()[:3],
        view["v"].stride()[:3],
        *softmax_scales(how),
        GROUP_SEQUENCES=group_sequences,
        HEADS=heads,
        HEADS_PER_KV=heads_per_kv,
        BLOCK_M=max(MIN_ROWS, power_of_two(group_sequences * heads_per_kv)),
        **constants,
        num_warps=4,
    )
    return prefixes


def _shared_prefix_lengths(
    rows: Tensor, table: Tensor, group_sequences: int, page_tokens: int, tile_keys: int
) -> Tensor:
    groups = divided_up(len(rows), group_sequences)
    prefix_lengths = rows.new_empty((groups, 2))
    _find_shared_prefix[(groups,)](
        *(rows, table, prefix_lengths, len(rows), table.stride(0), MIN_TOKENS),
        GROUP_SEQUENCES=group_sequences,
        BLOCK_SEQUENCES=power_of_two(group_sequences),
        PAGE_TOKENS=page_tokens,
        BLOCK_N=tile_keys,
        PAGES_PER_TILE=_PAGES_PER_TILE,
    )
    return prefix_lengths


# fmt: off
@kernel("rows", "block_tables", "count", "stride_table")  # type: ignore[untyped-decorator]
def _find_shared_prefix(  # type: ignore[no-untyped-def]
    rows, block_tables, prefix_lengths, count, stride_table, min_tokens,
    GROUP_SEQUENCES: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGES_PER_TILE: tl.constexpr,
):
    """Counts the leading slots that all block tables of a group share, in whole tiles."""
    group, member = tl.program_id(0), tl.arange(0, BLOCK_SEQUENCES)
    sequence = group * GROUP_SEQUENCES + member
    valid = (member < GROUP_SEQUENCES) & (sequence < count)
    start = tl.load(rows + 3 * sequence, mask=valid, other=0)
    end = tl.load(rows + 3 * sequence + 1, mask=valid, other=0)
    past = tl.load(rows + 3 * sequence + 2, mask=valid, other=0)
    valid = valid & (end - start == 1) & (past > 0)
    leader = tl.min(tl.where(valid, sequence, count - 1), 0)
    shortest = tl.min(tl.where(valid, past, 2147483647), 0)
    max_pages = tl.where(tl.sum(valid.to(tl.int32)) > 1, shortest // PAGE_TOKENS, 0)
    first_page, common_pages = 0, max_pages
    while first_page < common_pages:
        offs_page = first_page + tl.arange(0, PAGES_PER_TILE)
        offsets = sequence.to(tl.int64)[:, None] * stride_table + offs_page[None, :]
        in_prefix = offs_page < max_pages
        leader_table = block_tables + tl.cast(leader, tl.int64) * stride_table
        leader_slots = tl.load(leader_table + offs_page, mask=in_prefix, other=-1)
        slots = tl.load(block_tables + offsets, mask=valid[:, None] & in_prefix[None, :], other=-1)
        differs = tl.sum((valid[:, None] & (slots != leader_slots[None, :])).to(tl.int32), 0) > 0
        common_pages = tl.minimum(common_pages, tl.min(tl.where(differs, offs_page, 2147483647), 0))
        first_page += PAGES_PER_TILE
    tokens = common_pages * PAGE_TOKENS // BLOCK_N * BLOCK_N
    tl.store(prefix_lengths + 2 * group, tl.where(tokens < min_tokens, 0, tokens))
    tl.store(prefix_lengths + 2 * group + 1, leader)


@kernel("rows", "block_tables", "count", "stride_table")  # type: ignore[untyped-decorator]
def _cascade_prefix(  # type: ignore[no-untyped-def]
    q_ptr, k_cache, v_cache, partial_out, partial_stats, rows, block_tables, prefix_lengths, count,
    stride_table, q_strides, k_cache_strides, v_cache_strides, cap_scale, qk_scale,
    GROUP_SEQUENCES: tl.constexpr, HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Attends the queries of a group to one split of their common prefix."""
    kv_head, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(prefix_lengths + 2 * group)
    if tokens == 0:
        return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    sequence = group * GROUP_SEQUENCES + offs_m // HEADS_PER_KV
    head = kv_head * HEADS_PER_KV + offs_m % HEADS_PER_KV
    row_valid = (offs_m < GROUP_SEQUENCES * HEADS_PER_KV) & (sequence < count)
    token = tl.load(rows + 3 * sequence, mask=row_valid, other=0).to(tl.int64)
    row_valid = row_valid & (tl.load(rows + 3 * sequence + 1, mask=row_valid, other=0) - token == 1)
    mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    offsets = token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + offs_d[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    split_tokens = tl.cdiv(tokens // BLOCK_N, tl.num_programs(2)) * BLOCK_N
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    m_i, l_i, acc = attend_paged_keys(
        q, offs_m, m_i, l_i, tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        k_cache + kv_head * k_cache_strides[2], v_cache + kv_head * v_cache_strides[2],
        block_tables + tl.load(prefix_lengths + 2 * group + 1).to(tl.int64) * stride_table,
        split * split_tokens, tl.minimum(split * split_tokens + split_tokens, tokens), 0,
        k_cache_strides, v_cache_strides, cap_scale, qk_scale,
        PAGE_TOKENS, WINDOW, CAPPED, False, BLOCK_N, HEAD_DIM, BLOCK_D)
    out_row = (split.to(tl.int64) * count + sequence) * HEADS + head
    tl.store(partial_out + out_row[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
    tl.store(partial_stats + 2 * out_row, m_i, mask=row_valid)
    tl.store(partial_stats + 2 * out_row + 1, l_i, mask=row_valid)
# fmt: on
