"""QKV preparation and KV write, fused: norms, key gain, rope, and the write into pages.

Torch reference: `layers/reference/qkv.py`, `split_heads`, then `layers/reference/kv_write.py`, with
the same roundings.

`_prepare_qkv`  grid (token tiles, head tiles): one head after another
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import QKVParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.packing import Fields

TILE_ELEMENTS = 2048
"""Elements of one head per CTA: whole tokens, at least one."""
HEADS = 8
"""Heads per CTA, which share the rotation."""
FEW_TOKENS = 256
"""Tokens up to which every head of every token has a CTA."""


def qkv_write(
    run: ForwardPass, place: Place, by_head: Tensor, cos_sin: Tensor | None, how: QKVParams
) -> tuple[Tensor, Fields]:
    """Queries, and keys and values as stored, of heads (tokens, heads + 2 · KV heads, dim).

    `cos_sin`: of the step's positions, (tokens, 2, pairs), as `Rope` gives them.
    """
    count, all_heads, dim = by_head.shape
    view, table = run.step.view(place.pool.name, place.layer), run.batch.slots[place.anchor]
    kv_heads, dtype = how.kv_heads, view["k"].dtype
    queries = by_head.new_empty((count, all_heads - 2 * kv_heads, dim))
    kept = {name: view[name].new_empty((count, kv_heads, dim)) for name in ("k", "v")}
    width = power_of_two(dim)
    few = count <= FEW_TOKENS
    tokens, each = (1, 1) if few else (max(1, TILE_ELEMENTS // width), HEADS)
    norms = [how.query_norm, how.key_norm]
    _prepare_qkv[(divided_up(count, tokens), divided_up(all_heads, each))](
        *(by_head, queries, kept["k"], kept["v"], view["k"], view["v"]),
        by_head if cos_sin is None else cos_sin,
        *(by_head if norm is None else norm.weight for norm in norms),
        *(run.batch.rows, run.batch.owners, table),
        *(count, table.stride(0)),
        by_head.stride()[:2],
        view["k"].stride()[:3],
        view["v"].stride()[:3],
        *(0.0 if norm is None else norm.eps for norm in norms),
        how.key_gain,
        PAGE_TOKENS=run.step.page_tokens,
        QUERY_NORM=how.query_norm is not None,
        KEY_NORM=how.key_norm is not None,
        GAIN=how.key_gain != 1.0,
        LIMIT=torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
        PAIRS=0 if cos_sin is None else cos_sin.shape[-1],
        HEADS=queries.shape[1],
        KV_HEADS=kv_heads,
        HEADS_PER_CTA=each,
        BLOCK_T=tokens,
        HEAD_DIM=dim,
        BLOCK_D=width,
        num_warps=1 if few else 4,
    )
    return queries, kept


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _rms_scaled(x, weight, scale, inside, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head after its RMS norm, rounded to the model's dtype, in fp32."""
    if NORM:
        gain = tl.load(weight, mask=inside, other=0.0)
        return (x.to(tl.float32) * scale[:, None] * gain[None, :]).to(x.dtype).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    source, mask, cos, sin, weight, eps, gain,
    NORM: tl.constexpr, GAIN: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """One head of some tokens after norm, gain and rope."""
    offs_d = tl.arange(0, BLOCK_D)
    in_dim = offs_d < HEAD_DIM
    x = tl.load(source, mask=mask, other=0.0)
    scale = tl.zeros([BLOCK_T], tl.float32)
    if NORM:
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 1) / HEAD_DIM + eps)
    y = _rms_scaled(x, weight + offs_d, scale, in_dim, NORM)
    if GAIN:
        y = (y * gain).to(x.dtype).to(tl.float32)
    if PAIRS > 0:
        rotates = offs_d < 2 * PAIRS
        # Each dimension with its partner of the rotation.
        partner_offset = tl.where(rotates, tl.where(offs_d < PAIRS, PAIRS, -PAIRS), 0)
        partner = tl.load(source + partner_offset[None, :], mask=mask, other=0.0)
        partner = _rms_scaled(partner, weight + offs_d + partner_offset, scale, in_dim, NORM)
        if GAIN:
            partner = (partner * gain).to(x.dtype).to(tl.float32)
        y = tl.where(rotates[None, :], y * cos + partner * sin, y)
    return y.to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rotations(  # type: ignore[no-untyped-def]
    rotations, token, valid,
    PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """cos and sin of every dimension; the sine of a pair's first dimension is negated."""
    if PAIRS == 0:
        return tl.zeros([BLOCK_T, BLOCK_D], tl.float32), tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    else:
        offs_d = tl.arange(0, BLOCK_D)
        is_first = offs_d < PAIRS
        pair = tl.where(is_first, offs_d, offs_d - PAIRS)
        ptrs = rotations + token[:, None] * (2 * PAIRS) + pair[None, :]
        mask = valid[:, None] & (offs_d < 2 * PAIRS)[None, :]
        sin = tl.load(ptrs + PAIRS, mask=mask, other=0.0)
        return tl.load(ptrs, mask=mask, other=1.0), tl.where(is_first[None, :], -sin, sin)


@triton.jit  # type: ignore[untyped-decorator]
def _to_pool_dtype(y, like, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts to the pool's dtype; fp8 saturates, NaN stays NaN."""
    if LIMIT > 0:
        y = y.to(tl.float32)
        y = tl.where(y > LIMIT, LIMIT, y)
        y = tl.where(y < -LIMIT, -LIMIT, y)
    return y.to(like.dtype.element_ty)


@kernel(  # type: ignore[untyped-decorator]
    "rows", "owners", "block_tables", "count", "stride_table"
)
def _prepare_qkv(  # type: ignore[no-untyped-def]
    by_head, queries, k_new, v_new, k_cache, v_cache, rotations, query_weight, key_weight, rows,
    owners, block_tables, count, stride_table, by_head_strides, k_cache_strides, v_cache_strides,
    query_eps, key_eps, key_gain,
    PAGE_TOKENS: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, GAIN: tl.constexpr,
    LIMIT: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEADS_PER_CTA: tl.constexpr, BLOCK_T: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first_head, offs_d = tl.program_id(1) * HEADS_PER_CTA, tl.arange(0, BLOCK_D)[None, :]
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    valid = token < count
    mask = valid[:, None] & (offs_d < HEAD_DIM)
    cos, sin = _load_rotations(rotations, token, valid, PAIRS, BLOCK_T, BLOCK_D)
    owner = tl.load(owners + token, mask=valid, other=0)
    row = rows + 3 * owner
    position = tl.load(row + 2, mask=valid, other=0) - tl.load(row, mask=valid, other=0) + token
    page = block_tables + owner.to(tl.int64) * stride_table + position // PAGE_TOKENS
    slot = tl.load(page, mask=valid, other=-1).to(tl.int64)
    cache_mask = (slot >= 0)[:, None] & mask
    entry = position % PAGE_TOKENS
    k_cache += (slot * k_cache_strides[0] + entry * k_cache_strides[1])[:, None] + offs_d
    v_cache += (slot * v_cache_strides[0] + entry * v_cache_strides[1])[:, None] + offs_d
    for head in range(first_head, tl.minimum(first_head + HEADS_PER_CTA, HEADS + 2 * KV_HEADS)):
        source = by_head + token[:, None] * by_head_strides[0] + head * by_head_strides[1] + offs_d
        kv_head = (head - HEADS) % KV_HEADS
        new_offsets = (token[:, None] * KV_HEADS + kv_head) * HEAD_DIM + offs_d
        if head < HEADS:
            query = _norm_and_rotate(
                source, mask, cos, sin, query_weight, query_eps, 1.0, QUERY_NORM, False, PAIRS,
                BLOCK_T, HEAD_DIM, BLOCK_D)
            tl.store(
                queries + (token[:, None] * HEADS + head) * HEAD_DIM + offs_d, query, mask=mask)
        elif head < HEADS + KV_HEADS:
            y = _norm_and_rotate(
                source, mask, cos, sin, key_weight, key_eps, key_gain, KEY_NORM, GAIN, PAIRS,
                BLOCK_T, HEAD_DIM, BLOCK_D)
            key = _to_pool_dtype(y, k_new, LIMIT)
            tl.store(k_new + new_offsets, key, mask=mask)
            tl.store(k_cache + kv_head * k_cache_strides[2], key, mask=cache_mask)
        else:
            value = _to_pool_dtype(tl.load(source, mask=mask, other=0.0), v_new, LIMIT)
            tl.store(v_new + new_offsets, value, mask=mask)
            tl.store(v_cache + kv_head * v_cache_strides[2], value, mask=cache_mask)
# fmt: on
