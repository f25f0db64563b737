"""Queries, keys and values of a step, from their projection to the pages: one device program.

What `QKVParams` and `ForwardPass.keep` do one after the other, with the same roundings between:
norms, the gain of keys, the rotation, and the entries in the pool's dtype. A program takes some
heads of some tokens, one head after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import QKVParams
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.packing import Fields

ELEMENTS = 2048
"""Of one head that a program takes: whole tokens, at least one."""
HEADS = 8
"""That a program takes, since they turn alike."""
FEW_TOKENS = 256
"""Up to here there are too few for a device, and every head of each has a program."""


def qkv_write(
    run: ForwardPass, place: Place, by_head: Tensor, turns: Tensor | None, how: QKVParams
) -> tuple[Tensor, Fields]:
    """Of heads (tokens, heads + 2 · KV heads, dim) the queries, and keys and values as kept.

    `turns` is what a `Rope` says of the step's positions: (tokens, 2, pairs).
    """
    count, all_heads, dim = by_head.shape
    view, table = run.step.view(place.pool.name, place.layer), run.batch.slots[place.anchor]
    kv_heads, dtype = how.kv_heads, view["k"].dtype
    queries = by_head.new_empty((count, all_heads - 2 * kv_heads, dim))
    kept = {name: view[name].new_empty((count, kv_heads, dim)) for name in ("k", "v")}
    width = power_of_two(dim)
    few = count <= FEW_TOKENS
    tokens, each = (1, 1) if few else (max(1, ELEMENTS // width), HEADS)
    norms = [how.query_norm, how.key_norm]
    _prepare[(divided_up(count, tokens), divided_up(all_heads, each))](
        *(by_head, queries, kept["k"], kept["v"], view["k"], view["v"]),
        by_head if turns is None else turns,
        *(by_head if norm is None else norm.weight for norm in norms),
        *(run.batch.rows, run.batch.owners, table),
        *(count, by_head.stride(0), by_head.stride(1), table.stride(0)),
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *(0.0 if norm is None else norm.eps for norm in norms),
        how.key_gain,
        PAGE=run.step.page_tokens,
        QUERY_NORM=how.query_norm is not None,
        KEY_NORM=how.key_norm is not None,
        GAIN=how.key_gain != 1.0,
        LIMIT=torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
        PAIRS=0 if turns is None else turns.shape[-1],
        HEADS=queries.shape[1],
        KV_HEADS=kv_heads,
        EACH=each,
        T=tokens,
        DIM=dim,
        D=width,
        num_warps=1 if few else 4,
    )
    return queries, kept


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _shrunk(x, weight, scale, inside, NORM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """A head with its norm, rounded as the model computes, in fp32."""
    if NORM:
        gain = tl.load(weight, mask=inside, other=0.0)
        return (x.to(tl.float32) * scale[:, None] * gain[None, :]).to(x.dtype).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _prepared(  # type: ignore[no-untyped-def]
    source, here, cos, sin, weight, eps, gain,
    NORM: tl.constexpr, GAIN: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
    T: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """One head of some tokens, normed and turned."""
    dim = tl.arange(0, D)
    inside = dim < DIM
    x = tl.load(source, mask=here, other=0.0)
    scale = tl.zeros([T], tl.float32)
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    y = _shrunk(x, weight + dim, scale, inside, NORM)
    if GAIN:
        y = (y * gain).to(x.dtype).to(tl.float32)
    if PAIRS > 0:
        turning = dim < 2 * PAIRS
        # Each dimension beside the one that it turns with.
        away = tl.where(turning, tl.where(dim < PAIRS, PAIRS, -PAIRS), 0)
        other = tl.load(source + away[None, :], mask=here, other=0.0)
        other = _shrunk(other, weight + dim + away, scale, inside, NORM)
        if GAIN:
            other = (other * gain).to(x.dtype).to(tl.float32)
        y = tl.where(turning[None, :], y * cos + other * sin, y)
    return y.to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(turns, token, ours, PAIRS: tl.constexpr, T: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Cosines and sines for every dimension; of the first of a pair, the sine is negated."""
    if PAIRS == 0:
        return tl.zeros([T, D], tl.float32), tl.zeros([T, D], tl.float32)
    else:
        dim = tl.arange(0, D)
        first = dim < PAIRS
        pair = tl.where(first, dim, dim - PAIRS)
        angle = turns + token[:, None] * (2 * PAIRS) + pair[None, :]
        mask = ours[:, None] & (dim < 2 * PAIRS)[None, :]
        sin = tl.load(angle + PAIRS, mask=mask, other=0.0)
        return tl.load(angle, mask=mask, other=1.0), tl.where(first[None, :], -sin, sin)


@triton.jit  # type: ignore[untyped-decorator]
def _stored(y, like, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """In the pool's dtype; eight bits saturate, and a NaN stays one."""
    if LIMIT > 0:
        y = y.to(tl.float32)
        y = tl.where(y > LIMIT, LIMIT, y)
        y = tl.where(y < -LIMIT, -LIMIT, y)
    return y.to(like.dtype.element_ty)


@program("rows", "owners", "tables", "count", "pages")  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    by_head, queries, new_keys, new_values, old_keys, old_values, turns, query_weight, key_weight,
    rows, owners, tables, count, source_token, source_head, pages,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head,
    query_eps, key_eps, key_gain,
    PAGE: tl.constexpr, QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr,  # noqa: N803
    GAIN: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, EACH: tl.constexpr,  # noqa: N803
    T: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    begin, dim = tl.program_id(1) * EACH, tl.arange(0, D)[None, :]
    token = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    ours = token < count
    here = ours[:, None] & (dim < DIM)
    cos, sin = _angles(turns, token, ours, PAIRS, T, D)
    owner = tl.load(owners + token, mask=ours, other=0)
    one = rows + 3 * owner
    position = tl.load(one + 2, mask=ours, other=0) - tl.load(one, mask=ours, other=0) + token
    page = tables + owner.to(tl.int64) * pages + position // PAGE
    slot = tl.load(page, mask=ours, other=-1).to(tl.int64)
    kept = (slot >= 0)[:, None] & here
    old_keys += (slot * key_slot + position % PAGE * key_entry)[:, None] + dim
    old_values += (slot * value_slot + position % PAGE * value_entry)[:, None] + dim
    for head in range(begin, tl.minimum(begin + EACH, HEADS + 2 * KV_HEADS)):
        source = by_head + token[:, None] * source_token + head * source_head + dim
        number = (head - HEADS) % KV_HEADS
        new = (token[:, None] * KV_HEADS + number) * DIM + dim
        if head < HEADS:
            query = _prepared(
                source, here, cos, sin, query_weight, query_eps, 1.0,
                QUERY_NORM, False, PAIRS, T, DIM, D,
            )
            tl.store(queries + (token[:, None] * HEADS + head) * DIM + dim, query, mask=here)
        elif head < HEADS + KV_HEADS:
            y = _prepared(
                source, here, cos, sin, key_weight, key_eps, key_gain,
                KEY_NORM, GAIN, PAIRS, T, DIM, D,
            )
            key = _stored(y, new_keys, LIMIT)
            tl.store(new_keys + new, key, mask=here)
            tl.store(old_keys + number * key_head, key, mask=kept)
        else:
            value = _stored(tl.load(source, mask=here, other=0.0), new_values, LIMIT)
            tl.store(new_values + new, value, mask=here)
            tl.store(old_values + number * value_head, value, mask=kept)
# fmt: on
