"""RMS norm and rope of interleaved pairs, fused, for vectors that come out of a projection.

Torch reference: `layers/elementwise.py`, `rms_norm`, then `layers/rope.py`, `rotate_interleaved`,
with the same roundings.

`_rotate_heads`       grid (tiles of rows,): in place
`_norm_rotate_write`  grid (tokens,): also writes the KV entry

Surprising: `rope` overwrites its input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.kv_write import (
    bf16,
    bits,
    entry_fields,
    entry_shape,
    from_bf16,
    locate,
    store_entry,
    widened,
)
from kvtide.spec import Encoding

TILE_ELEMENTS = 4096
"""Elements per CTA."""
ROUNDED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The model's dtype as a constant of `rounded`."""


def rope(x: Tensor, cos_sin: Tensor, eps: float | None = None) -> Tensor:
    """Rotates the last dimensions of every head of x (tokens, heads, dim), in place.

    cos_sin  (tokens, 2, pairs), fp32: cos and sin
    eps      of an RMS norm over each head before the rotation; None: no norm
    """
    return _rotated(x, cos_sin, eps, inverse=False)


def rope_back(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Undoes `rope`, in place."""
    return _rotated(x, cos_sin, None, inverse=True)


def _rotated(x: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool) -> Tensor:
    tokens, heads, dim = x.shape
    assert x.stride(-1) == 1 and cos_sin.is_contiguous()
    pairs = cos_sin.shape[-1]
    first = 0 if eps is not None else dim - 2 * pairs
    columns = power_of_two(dim - first)
    rows = max(1, TILE_ELEMENTS // columns)
    _rotate_heads[(divided_up(tokens * heads, rows),)](
        *(bits(x), cos_sin, x.stride()[:2], tokens * heads, eps or 0.0),
        HEADS=heads,
        FIRST=first,
        DIM=dim,
        PAIRS=pairs,
        NORM=eps is not None,
        INVERSE=inverse,
        ROUNDED=ROUNDED[x.dtype],
        ROWS=rows,
        COLUMNS=columns,
    )
    return x


def norm_rope_write(
    run: ForwardPass, place: Place, x: Tensor, norm: tuple[Tensor, float], cos_sin: Tensor
) -> Tensor:
    """Norms and rotates x (tokens, dim), writes it into pages, and returns it as stored.

    `norm`: its weight, and eps. A joined entry comes back in bf16, which holds it exactly.
    """
    batch, view = run.batch, run.step.view(place.pool.name, place.layer)
    slots, shape = batch.slots[place.anchor], entry_shape(place, view)
    (part,) = place.packing.parts
    joined = place.pool.entry.encoding is Encoding.JOINED
    kind = torch.bfloat16 if joined else getattr(torch, part.logical.dtype.torch_name)
    kept = torch.empty(x.shape, dtype=kind, device=x.device)
    weight, eps = norm
    _norm_rotate_write[(len(x),)](
        *(bits(x), x.stride(0), bits(weight), cos_sin, bits(kept), eps),
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *entry_fields(place, view),
        PAGE_TOKENS=run.step.page_tokens,
        DIM=x.shape[1],
        PAIRS=cos_sin.shape[-1],
        ROUNDED=ROUNDED[x.dtype],
        **shape,
        num_warps=2,
    )
    return kept


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def rounded(x, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32, rounded to the model's dtype."""
    if ROUNDED == 1:
        return from_bf16(bf16(x))
    elif ROUNDED == 2:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def rotated(  # type: ignore[no-untyped-def]
    x, cos, sin,
    BLOCK: tl.constexpr, ROUNDED: tl.constexpr,
):
    """x (BLOCK,) with interleaved pairs rotated; cos is 1 where nothing rotates."""
    first, second = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
    turned_first = rounded(first * cos - second * sin, ROUNDED)
    turned_second = rounded(second * cos + first * sin, ROUNDED)
    return tl.reshape(tl.join(turned_first, turned_second), [BLOCK])


@triton.jit  # type: ignore[untyped-decorator]
def norm_and_rotate(  # type: ignore[no-untyped-def]
    x, weight, rotations, token, eps,
    DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROUNDED: tl.constexpr,
):
    """RMS norm and rotation of a vector x (BLOCK,) in fp32, which is zero from DIM on."""
    column = tl.arange(0, BLOCK)
    gain = widened(tl.load(weight + column, mask=column < DIM, other=0))
    x = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * gain, ROUNDED)
    pair = tl.arange(0, BLOCK // 2) - (DIM // 2 - PAIRS)
    rotates, offsets = (pair >= 0) & (pair < PAIRS), token * (2 * PAIRS) + pair
    cos = tl.load(rotations + offsets, mask=rotates, other=1.0)
    sin = tl.load(rotations + offsets + PAIRS, mask=rotates, other=0.0)
    return rotated(x, cos, sin, BLOCK, ROUNDED)


@triton.jit
def narrowed(x, like):  # type: ignore[no-untyped-def]
    """A rounded value in the dtype that `like` points to."""
    if like.dtype.element_ty == tl.int16:
        return bf16(x)
    else:
        return x.to(like.dtype.element_ty)


@kernel("count")  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    x, rotations, x_strides, count, eps,
    HEADS: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, INVERSE: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, valid = FIRST + tl.arange(0, COLUMNS), row < count
    token, mask = (row // HEADS).to(tl.int64), valid[:, None] & (column < DIM)[None, :]
    offsets = (token * x_strides[0] + (row % HEADS) * x_strides[1])[:, None] + column[None, :]
    value = widened(tl.load(x + offsets, mask=mask, other=0))
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
        value = rounded(value * scale[:, None], ROUNDED)
    pair = tl.arange(0, COLUMNS // 2) - ((DIM - FIRST) // 2 - PAIRS)
    rotates = valid[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    rotation_offsets = (token * (2 * PAIRS))[:, None] + pair[None, :]
    cos = tl.load(rotations + rotation_offsets, mask=rotates, other=1.0)
    sin = tl.load(rotations + rotation_offsets + PAIRS, mask=rotates, other=0.0)
    if INVERSE:
        sin = -sin
    first, second = tl.split(tl.reshape(value, [ROWS, COLUMNS // 2, 2]))
    first, second = first * cos - second * sin, second * cos + first * sin
    value = tl.reshape(tl.join(first, second), [ROWS, COLUMNS])
    tl.store(x + offsets, narrowed(value, x), mask=mask)


@kernel("rows", "owners", "slots", "stride_slots_row")  # type: ignore[untyped-decorator]
def _norm_rotate_write(  # type: ignore[no-untyped-def]
    x, stride_x_token, weight, rotations, out, eps, rows, owners, slots, stride_slots_row, field,
    rope, scale, pad, field_strides, rope_strides, scale_strides, pad_strides,
    PAGE_TOKENS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, ROUNDED: tl.constexpr,
    KIND: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):
    token, offs_d = tl.program_id(0), tl.arange(0, GROUPS * GROUP)
    slot, entry_index = locate(rows, owners, slots, stride_slots_row, token, PAGE_TOKENS)
    token64, in_dim = token.to(tl.int64), offs_d < DIM
    value = widened(tl.load(x + token64 * stride_x_token + offs_d, mask=in_dim, other=0))
    value = norm_and_rotate(
        value, weight, rotations, token64, eps, DIM, PAIRS, GROUPS * GROUP, ROUNDED)
    stored = store_entry(
        tl.reshape(value, [GROUPS, GROUP]), slot, entry_index, field, rope, scale, pad,
        field_strides, rope_strides, scale_strides, pad_strides, KIND, NOPE, ROPE, PAD, GROUP,
        GROUPS)
    offs = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if KIND > 3:
        stored = narrowed(stored, out)
    tl.store(out + token64 * DIM + offs, stored, mask=offs < DIM)
# fmt: on
