"""Norms and rotations of neighbours as device programs, for what comes out of a projection.

What `elementary.rms_norm` and `rope.rotate_neighbours` do one after the other, rounded as they
round, in one program. It writes over what it is given: nobody else needs that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.kv_write import (
    bf16,
    bits,
    entry_fields,
    entry_shape,
    from_bf16,
    located,
    store_entry,
    widened,
)
from kvtide.spec import Encoding

ELEMENTS = 4096
"""That a program takes."""
ROUNDED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What programs are told of the model's dtype, for `rounded`."""


def rope(x: Tensor, turns: Tensor, eps: float | None = None, *, back: bool = False) -> Tensor:
    """Turns the last dimensions of every head of x (tokens, heads, dim) where they lie.

    turns  (tokens, 2, pairs), fp32; `back`: the other way
    eps    of an RMS norm over each head that comes before; None: there is none
    """
    tokens, heads, dim = x.shape
    assert x.stride(-1) == 1 and turns.is_contiguous()
    pairs = turns.shape[-1]
    first = 0 if eps is not None else dim - 2 * pairs
    columns = power_of_two(dim - first)
    rows = max(1, ELEMENTS // columns)
    _turn[(divided_up(tokens * heads, rows),)](
        *(bits(x), turns, x.stride(0), x.stride(1), tokens * heads, eps or 0.0),
        HEADS=heads,
        FIRST=first,
        DIM=dim,
        PAIRS=pairs,
        NORMS=eps is not None,
        BACK=back,
        ROUNDED=ROUNDED[x.dtype],
        ROWS=rows,
        COLUMNS=columns,
    )
    return x


def norm_rope_write(
    run: ForwardPass, place: Place, x: Tensor, norm: tuple[Tensor, float], turns: Tensor
) -> Tensor:
    """Norms and turns the vectors x (tokens, dim) of the step, keeps them, and gives them as they
    were kept. `norm`: its weight, and eps.

    Of a joined entry bf16 holds all that comes back.
    """
    batch, view = run.batch, run.step.view(place.pool.name, place.layer)
    slots, shape = batch.slots[place.anchor], entry_shape(place, view)
    (part,) = place.packing.parts
    joined = place.pool.entry.encoding is Encoding.JOINED
    kind = torch.bfloat16 if joined else getattr(torch, part.logical.dtype.torch_name)
    kept = torch.empty(x.shape, dtype=kind, device=x.device)
    weight, eps = norm
    _keep_turned[(len(x),)](
        *(bits(x), x.stride(0), bits(weight), turns, bits(kept), eps),
        *(batch.rows, batch.owners, slots, slots.stride(0)),
        *entry_fields(place, view),
        PAGE=run.step.page_tokens,
        DIM=x.shape[1],
        PAIRS=turns.shape[-1],
        ROUNDED=ROUNDED[x.dtype],
        **shape,
        num_warps=2,
    )
    return kept


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def rounded(x, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """In fp32, with the precision of the model's dtype."""
    if ROUNDED == 1:
        return from_bf16(bf16(x))
    elif ROUNDED == 2:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit  # type: ignore[untyped-decorator]
def turned(x, cos, sin, C: tl.constexpr, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Pairs of neighbours of x (C,), turned; cosines are 1 where nothing turns."""
    first, second = tl.split(tl.reshape(x, [C // 2, 2]))
    turned_first = rounded(first * cos - second * sin, ROUNDED)
    turned_second = rounded(second * cos + first * sin, ROUNDED)
    return tl.reshape(tl.join(turned_first, turned_second), [C])


@triton.jit  # type: ignore[untyped-decorator]
def normed_and_turned(  # type: ignore[no-untyped-def]
    x, weight, turns, token, eps,
    DIM: tl.constexpr, PAIRS: tl.constexpr, C: tl.constexpr, ROUNDED: tl.constexpr,  # noqa: N803
):
    """A vector x (C,) in fp32, zero from DIM on; `turns` are those of the token."""
    column = tl.arange(0, C)
    gain = widened(tl.load(weight + column, mask=column < DIM, other=0))
    x = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * gain, ROUNDED)
    pair = tl.arange(0, C // 2) - (DIM // 2 - PAIRS)
    turning, at = (pair >= 0) & (pair < PAIRS), token * (2 * PAIRS) + pair
    cos = tl.load(turns + at, mask=turning, other=1.0)
    sin = tl.load(turns + at + PAIRS, mask=turning, other=0.0)
    return turned(x, cos, sin, C, ROUNDED)


@triton.jit
def narrowed(x, like):  # type: ignore[no-untyped-def]
    """What was rounded, as `like` points to it."""
    if like.dtype.element_ty == tl.int16:
        return bf16(x)
    else:
        return x.to(like.dtype.element_ty)


@program("count")  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    x, turns, token_stride, head_stride, count, eps,
    HEADS: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,  # noqa: N803
    NORMS: tl.constexpr, BACK: tl.constexpr, ROUNDED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, live = FIRST + tl.arange(0, COLUMNS), row < count
    token, mask = (row // HEADS).to(tl.int64), live[:, None] & (column < DIM)[None, :]
    at = (token * token_stride + (row % HEADS) * head_stride)[:, None] + column[None, :]
    value = widened(tl.load(x + at, mask=mask, other=0))
    if NORMS:
        factor = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
        value = rounded(value * factor[:, None], ROUNDED)
    pair = tl.arange(0, COLUMNS // 2) - ((DIM - FIRST) // 2 - PAIRS)
    turning = live[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    turns_at = (token * (2 * PAIRS))[:, None] + pair[None, :]
    cos = tl.load(turns + turns_at, mask=turning, other=1.0)
    sin = tl.load(turns + turns_at + PAIRS, mask=turning, other=0.0)
    if BACK:
        sin = -sin
    first, second = tl.split(tl.reshape(value, [ROWS, COLUMNS // 2, 2]))
    first, second = first * cos - second * sin, second * cos + first * sin
    value = tl.reshape(tl.join(first, second), [ROWS, COLUMNS])
    tl.store(x + at, narrowed(value, x), mask=mask)


@program("rows", "owners", "slots", "slots_sequence")  # type: ignore[untyped-decorator]
def _keep_turned(  # type: ignore[no-untyped-def]
    x, x_token, weight, turns, kept, eps, rows, owners, slots, slots_sequence,
    field, rope, scale, pad,
    field_slot, field_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
    PAGE: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, ROUNDED: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
):
    token, column = tl.program_id(0), tl.arange(0, GROUPS * GROUP)
    slot, place = located(rows, owners, slots, slots_sequence, token, PAGE)
    wide, inside = token.to(tl.int64), column < DIM
    value = widened(tl.load(x + wide * x_token + column, mask=inside, other=0))
    value = normed_and_turned(value, weight, turns, wide, eps, DIM, PAIRS, GROUPS * GROUP, ROUNDED)
    back = store_entry(
        tl.reshape(value, [GROUPS, GROUP]), slot, place, field, rope, scale, pad,
        field_slot, field_entry, rope_slot, rope_entry, scale_slot, scale_entry,
        pad_slot, pad_entry, KIND, NOPE, ROPE, PAD, GROUP, GROUPS)
    at = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if KIND > 3:
        back = narrowed(back, kept)
    tl.store(kept + wide * DIM + at, back, mask=at < DIM)
# fmt: on
