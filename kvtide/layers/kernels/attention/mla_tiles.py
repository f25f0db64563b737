"""Tiles, online softmax and split-KV of attention over one vector per token (`mla`).

A key is one vector that all heads share, and its value is the vector or a part of it. The state of
a row is FlashAttention's (m_i, l_i, acc), in base 2. Where the grid would not fill the device, CTAs
split the keys (split-KV), and `_combine_splits` combines their partial results.
Torch reference: `layers/reference/attention.py`, `attend_masked`.

`_combine_splits`  grid (tokens * heads,)

Surprising: partial results are normalized by l_i here, unlike in `attention_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernels.grid import MIN_ROWS, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel

TILE_ROWS = 64
"""Rows of a tile (BLOCK_M), at most: heads of one token, or of several."""
TILE_KEYS = 32
"""Keys of a tile (BLOCK_N); some kernels take twice as many, fp32 half."""
MAX_SPLITS = 128
MIN_KEYS = 32
"""Keys of a split, at least."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitKV:
    """Partial results of a split-KV kernel.

    count          splits of the keys; with one, `partial_out` is the output itself
    partial_out    (splits, tokens, heads, dim)
    partial_stats  (splits, tokens, heads, 2) fp32: m_i and l_i
    """

    count: int
    partial_out: Tensor
    partial_stats: Tensor

    @classmethod
    def of(cls, queries: Tensor, dim: int, ctas: int, tile_rows: int, keys: int) -> SplitKV:
        """For a grid of so many CTAs without splits, and queries that see at most so many keys."""
        resident = (1 if tile_rows >= TILE_ROWS else 2) * sm_count(queries.device)
        max_splits = max(1, min(resident // ctas, -(-keys // MIN_KEYS), MAX_SPLITS))
        splits = 1 << (max_splits.bit_length() - 1)  # Powers of two only: others are unmeasured.
        dtype = queries.dtype if splits == 1 else torch.float32
        shape = (splits, *queries.shape[:2])
        partial_out = queries.new_empty((*shape, dim), dtype=dtype)
        return cls(splits, partial_out, queries.new_empty((*shape, 2), dtype=torch.float32))

    def combine(self, dtype: torch.dtype) -> Tensor:
        if self.count == 1:
            return self.partial_out[0]
        _, tokens, heads, dim = self.partial_out.shape
        out = self.partial_out.new_empty((tokens, heads, dim), dtype=dtype)
        _combine_splits[(tokens * heads,)](
            *(self.partial_out, self.partial_stats, out, tokens * heads, self.count),
            BLOCK_SPLITS=MAX_SPLITS,
            HEAD_DIM=dim,
            BLOCK_D=power_of_two(dim),
        )
        return out


def rows_per_tile(heads: int) -> int:
    return min(TILE_ROWS, max(MIN_ROWS, power_of_two(heads)))


def tile_constants(queries: Tensor, tile_rows: int, dim: int, tile_keys: int) -> dict[str, int]:
    """Tile sizes, warps and pipeline stages that fit into an SM's shared memory."""
    block_d = max(MIN_ROWS, power_of_two(dim))
    if queries.element_size() > 2:
        return {"BLOCK_N": MIN_ROWS, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 1}
    stages = 2 if tile_keys > TILE_KEYS else 3
    return {
        "BLOCK_N": tile_keys,
        "BLOCK_D": block_d,
        "num_warps": 8 if tile_rows >= TILE_ROWS else 4,
        "num_stages": stages,
    }


# -- kernels -----------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(m_i, l_i, acc) of rows that have seen no key."""
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    return m_i, l_i, tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def online_softmax_step(scores, v, m_i, l_i, acc):  # type: ignore[no-untyped-def]
    """The state (m_i, l_i, acc) after one more tile of scores and values."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    # A row without a visible key has m_new = -inf; any finite value avoids a NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def store_partial(  # type: ignore[no-untyped-def]
    partial_out, partial_stats, out_row, row_valid, m_i, l_i, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
):
    """Stores the normalized output at rows of (split, token, head), and m_i and l_i of splits."""
    offs_d = tl.arange(0, BLOCK_D)
    normalized = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    offsets = out_row[:, None] * HEAD_DIM + offs_d[None, :]
    mask = row_valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(partial_out + offsets, normalized.to(partial_out.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(partial_stats + 2 * out_row, m_i, mask=row_valid)
        tl.store(partial_stats + 2 * out_row + 1, l_i, mask=row_valid)


@triton.jit  # type: ignore[untyped-decorator]
def load_joined_tile(  # type: ignore[no-untyped-def]
    nope_ptr, rope_ptr, scale_ptr, offsets, valid, like,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of vectors, one per row: plain, or e4m3 with a power-of-two scale per group and a
    bf16 rope part. `scale_ptr` is of words, each of which holds a vector's scales."""
    if NOPE == 0:
        offs_d = tl.arange(0, BLOCK_D)
        mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        tile = tl.load(nope_ptr + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)
        tile = tile.to(like.dtype)
    else:
        GROUP_DIM: tl.constexpr = GROUP if BLOCK_D > GROUP else BLOCK_D
        offs_group, offs_within = tl.arange(0, BLOCK_D // GROUP_DIM), tl.arange(0, GROUP_DIM)
        offs_d = (offs_group[:, None] * GROUP_DIM + offs_within[None, :])[None, :, :]
        mask = valid[:, None, None] & (offs_d < NOPE)
        nope = tl.load(nope_ptr + offsets[:, None, None] + offs_d, mask=mask, other=0.0)
        # A vector's scales are one word: Triton pipelines loads of eight bytes, not of one.
        word = tl.load(scale_ptr + offsets // 8, mask=valid, other=0)
        exponent = (word[:, None] >> (8 * offs_group)[None, :]).to(tl.int32) & 0xFF
        exponent = tl.where((offs_group * GROUP_DIM < NOPE)[None, :], exponent, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True).to(like.dtype)
        # The rope part is in the last group; its elements have two bytes, the others one.
        LAST: tl.constexpr = NOPE // GROUP_DIM
        mask = (offs_within >= NOPE % GROUP_DIM) & (offs_within < HEAD_DIM - LAST * GROUP_DIM)
        mask = valid[:, None] & mask[None, :]
        rope = rope_ptr + (offsets // 2)[:, None] + (LAST * GROUP_DIM - NOPE) + offs_within[None, :]
        rope = tl.load(rope, mask=mask, other=0.0).to(like.dtype)
        rope = tl.where((offs_group == LAST)[None, :, None], rope[:, None, :], 0.0)
        # Exact in any precision: scales are powers of two.
        joined = nope.to(like.dtype) * scale[:, :, None] + rope
        tile = tl.reshape(joined, [BLOCK_N, BLOCK_D])
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def load_scaled_tile(  # type: ignore[no-untyped-def]
    latents, scales, offsets, scale_offsets, valid, like,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """A tile of latents, one per row: plain, or e4m3 with an fp32 scale per group."""
    if GROUP == 0:
        offs_d = tl.arange(0, BLOCK_D)
        mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        tile = tl.load(latents + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)
        tile = tile.to(like.dtype)
    else:
        GROUP_DIM: tl.constexpr = GROUP if BLOCK_D > GROUP else BLOCK_D
        offs_group, offs_within = tl.arange(0, BLOCK_D // GROUP_DIM), tl.arange(0, GROUP_DIM)
        offs_d = (offs_group[:, None] * GROUP_DIM + offs_within[None, :])[None, :, :]
        mask = valid[:, None, None] & (offs_d < HEAD_DIM)
        latent = tl.load(latents + offsets[:, None, None] + offs_d, mask=mask, other=0.0)
        mask = valid[:, None] & (offs_group * GROUP_DIM < HEAD_DIM)[None, :]
        scale = tl.load(scales + scale_offsets[:, None] + offs_group[None, :], mask=mask, other=0.0)
        latent = (latent.to(tl.float32) * scale[:, :, None]).to(like.dtype)
        tile = tl.reshape(latent, [BLOCK_N, BLOCK_D])
    return tile


@kernel("rows", "splits")  # type: ignore[untyped-decorator]
def _combine_splits(  # type: ignore[no-untyped-def]
    partial_out, partial_stats, out, rows, splits,
    BLOCK_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The output of a token and head: its splits, weighted by their part of the softmax sum."""
    row = tl.program_id(0).to(tl.int64)
    offs_d, offs_split = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SPLITS)
    stats = partial_stats + 2 * (offs_split.to(tl.int64) * rows + row)
    m_split = tl.load(stats, mask=offs_split < splits, other=float("-inf"))
    l_split = tl.load(stats + 1, mask=offs_split < splits, other=0.0)
    m_max = tl.max(m_split, 0)
    m_max = tl.where(m_max == float("-inf"), 0.0, m_max)
    l_total = tl.sum(l_split * tl.exp2(m_split - m_max), 0)
    l_total = tl.where(l_total > 0, l_total, 1.0)
    offs_some, acc = tl.arange(0, 16), tl.zeros([16, BLOCK_D], tl.float32)
    for start in range(0, splits, 16):
        partial_row = (start + offs_some).to(tl.int64) * rows + row
        valid = start + offs_some < splits
        pair = partial_stats + 2 * partial_row
        weight = tl.exp2(tl.load(pair, mask=valid, other=float("-inf")) - m_max)
        weight = weight * tl.load(pair + 1, mask=valid, other=0.0) / l_total
        mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
        values = partial_out + partial_row[:, None] * HEAD_DIM + offs_d[None, :]
        values = tl.load(values, mask=mask, other=0.0)
        acc += weight[:, None] * values
    acc = tl.sum(acc, 0)
    tl.store(out + row * HEAD_DIM + offs_d, acc.to(out.dtype.element_ty), mask=offs_d < HEAD_DIM)
# fmt: on
