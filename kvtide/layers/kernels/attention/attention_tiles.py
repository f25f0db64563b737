"""Online softmax over tiles of keys: the inner loops of prefill, decode and cascade attention.

A query row's state is FlashAttention's: the running maximum `m_i`, the sum of exponentials `l_i`
relative to it, and the unnormalized output `acc`. Scores are in base 2 (`qk_scale` includes
log2 e). Torch reference of the sums: `layers/reference/attention.py`, `attend`.

`attend_paged_keys` reads the KV cache through a sequence's block table, `attend_new_keys` the
step's own keys and values, which lie row by row. These are device functions, without a grid.

Strides are a tuple per tensor: (slot, entry, head) of the cache, (token, head) of all others.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.kernels.elementwise import tanh
from kvtide.layers.kernels.grid import MIN_ROWS, power_of_two

MAX_TILE_KEYS = 64
"""Keys per tile (BLOCK_N), at most."""
TILE_BYTES = 16 << 10
"""Bytes of the keys of a tile, at most."""
_LOG2_E = math.log2(math.e)


def keys_per_tile(queries: Tensor, keys: Tensor) -> int:
    """BLOCK_N: the keys of a tile."""
    width: int = power_of_two(queries.shape[-1])
    return max(
        MIN_ROWS, min(MAX_TILE_KEYS, TILE_BYTES // (width * max(queries.itemsize, keys.itemsize)))
    )


def softmax_scales(how: AttentionParams) -> tuple[float, float]:
    """(cap_scale, qk_scale): factors of q · k before and after the soft cap, the latter in base 2.

    Without a cap, `cap_scale` is unused.
    """
    if how.cap is None:
        return 1.0, how.scale * _LOG2_E
    return how.scale / how.cap, how.cap * _LOG2_E


def kernel_constants(
    queries: Tensor, keys: Tensor, how: AttentionParams, page_tokens: int
) -> dict[str, int]:
    """Compile-time constants that all attention kernels share."""
    return {
        "PAGE_TOKENS": page_tokens,
        "WINDOW": how.window or 0,
        "CAPPED": how.cap is not None,
        "BLOCK_N": keys_per_tile(queries, keys),
        "HEAD_DIM": queries.shape[-1],
        "BLOCK_D": max(MIN_ROWS, power_of_two(queries.shape[-1])),
    }


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _online_softmax_step(  # type: ignore[no-untyped-def]
    q, k, v, mask, m_i, l_i, acc, cap_scale, qk_scale,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):
    """The state (m_i, l_i, acc) after one more tile of keys and values."""
    scores = tl.dot(q, k, input_precision="ieee")
    if CAPPED:
        scores = tanh(scores * cap_scale)
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * qk_scale)
    # A row without a visible key has m_new = -inf; any finite value avoids a NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(scores * qk_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(  # type: ignore[no-untyped-def]
    pointers, valid, in_dim, like,
    MASKED: tl.constexpr, PADDED: tl.constexpr,
):
    if MASKED:
        tile = tl.load(pointers, mask=valid & in_dim, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=in_dim, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile.to(like.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def attend_paged_keys(  # type: ignore[no-untyped-def]
    q, q_position, m_i, l_i, acc, k_cache, v_cache, block_table, lo, hi, first_key,
    k_cache_strides, v_cache_strides, cap_scale, qk_scale,
    PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Accumulates cached keys [lo, hi) of one sequence, through its block table.

    `lo` is a multiple of BLOCK_N. No key before `first_key` is read. Unmasked, [lo, hi) is whole
    tiles.
    """
    offs_d, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_dim = offs_d < HEAD_DIM
    # Software pipelining: slots are loaded before their keys, and keys two tiles ahead.
    for start_n in tl.range(lo, hi, BLOCK_N, num_stages=5):
        offs_n = start_n + cols
        valid = (offs_n >= first_key) & (offs_n < hi)
        if PAGE_TOKENS % BLOCK_N == 0:
            slot = tl.load(block_table + start_n // PAGE_TOKENS).to(tl.int64)
            entry = start_n % PAGE_TOKENS + cols
            k_offsets = slot * k_cache_strides[0] + entry * k_cache_strides[1]
            v_offsets = slot * v_cache_strides[0] + entry * v_cache_strides[1]
        else:
            slot = tl.load(block_table + offs_n // PAGE_TOKENS, mask=valid, other=0).to(tl.int64)
            k_offsets = slot * k_cache_strides[0] + offs_n % PAGE_TOKENS * k_cache_strides[1]
            v_offsets = slot * v_cache_strides[0] + offs_n % PAGE_TOKENS * v_cache_strides[1]
        k = _load_tile(
            k_cache + k_offsets[None, :] + offs_d[:, None], valid[None, :], in_dim[:, None], q,
            MASKED, HEAD_DIM < BLOCK_D)
        v = _load_tile(
            v_cache + v_offsets[:, None] + offs_d[None, :], valid[:, None], in_dim[None, :], q,
            MASKED, HEAD_DIM < BLOCK_D)
        mask = valid[None, :]
        if WINDOW > 0:
            mask = mask & (offs_n[None, :] > q_position[:, None] - WINDOW)
        m_i, l_i, acc = _online_softmax_step(
            q, k, v, mask, m_i, l_i, acc, cap_scale, qk_scale, CAPPED, MASKED)
    return m_i, l_i, acc


@triton.jit  # type: ignore[untyped-decorator]
def attend_new_keys(  # type: ignore[no-untyped-def]
    q, q_row, m_i, l_i, acc, k_new, v_new, lo, hi, seq_end, k_new_strides, v_new_strides,
    cap_scale, qk_scale,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Accumulates the step's own rows [lo, hi), causally; `seq_end` is the sequence's end row."""
    offs_d, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    in_dim = offs_d < HEAD_DIM
    for start_n in range(lo, hi, BLOCK_N):
        offs_n = start_n + cols
        valid = offs_n < seq_end
        k_ptrs = k_new + tl.cast(start_n, tl.int64) * k_new_strides[0] + offs_d[:, None]
        k = _load_tile(
            k_ptrs + cols[None, :] * k_new_strides[0], valid[None, :], in_dim[:, None], q, MASKED,
            HEAD_DIM < BLOCK_D)
        v_ptrs = v_new + tl.cast(start_n, tl.int64) * v_new_strides[0] + offs_d[None, :]
        v = _load_tile(
            v_ptrs + cols[:, None] * v_new_strides[0], valid[:, None], in_dim[None, :], q, MASKED,
            HEAD_DIM < BLOCK_D)
        mask = offs_n[None, :] <= q_row[:, None]
        if WINDOW > 0:
            mask = mask & (offs_n[None, :] > q_row[:, None] - WINDOW)
        m_i, l_i, acc = _online_softmax_step(
            q, k, v, mask, m_i, l_i, acc, cap_scale, qk_scale, CAPPED, MASKED)
    return m_i, l_i, acc
# fmt: on
