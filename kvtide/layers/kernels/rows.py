"""Functions of single rows as device programs: norms, gates, the likeliest column.

`normed`, `added` and `layer_normed` give what `elementary.rms_norm` and `layer_norm` give, `gated`
what an activation of `elementary` gives times another tensor, each in one launch. They compute in
fp32 and round where the torch code rounds. What a row comes out as depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.elementwise import Activation
from kvtide.layers.kernels.elementwise import activated
from kvtide.layers.kernels.grid import divided_up, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel

TILE = 2048
"""Elements that a program takes at a time, where a row has fewer."""
CTAS_PER_SM = 8
"""CTAs that the grid has per SM, at most: where there are more rows, each takes several."""
COLUMNS = 4096
"""Of a row of logits, what one program takes."""
_FEW_ROWS = 64
_PER_WARP = 512
_MAX_WARPS = 16


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`elementary.rms_norm` over the last axis."""
    return _normed(x, None, weight, None, eps)[1]


def added(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    return _normed(x, y, weight, None, eps)


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`elementary.layer_norm` over the last axis."""
    return _normed(x, None, weight, bias, eps)[1]


def _normed(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty_like(result)
    ours = _by_head(x)
    other = ours if y is None else _by_head(y)
    rows, padded = ours.shape[0] * ours.shape[1], power_of_two(width)
    each = max(1, TILE // padded)
    _norm[(min(divided_up(rows, each), CTAS_PER_SM * sm_count(x.device)),)](
        *(ours, other, weight, weight if bias is None else bias, total, result),
        *(rows, ours.shape[1], *ours.stride()[:2], *other.stride()[:2], eps),
        ADDED=y is not None,
        CENTRED=bias is not None,
        WIDTH=width,
        W=padded,
        R=each,
        num_warps=max(1, min(each * padded // _PER_WARP, _MAX_WARPS)),
    )
    return total, result


def _by_head(x: Tensor) -> Tensor:
    """(tokens, heads, width), where a row's elements are neighbours."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x[:, None] if x.dim() == 2 else x.reshape(len(x), -1, x.shape[-1])


def gated(gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
    """activation(gate) · up, both of them (tokens, width), or a gate (tokens, 1) for all of a row.

    Of a `limit`, see `dense.GatedMLP`.
    """
    rows, width = up.shape
    gate = gate.expand_as(up)
    result = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    block = TILE if rows > _FEW_ROWS else TILE // 2
    blocks = divided_up(width, block)
    _gate[(rows * blocks,)](
        *(gate, up, result, width, blocks, *gate.stride(), *up.stride(), limit or 0.0),
        KIND=activation.__name__,
        LIMITED=limit is not None,
        N=block,
        num_warps=4,
    )
    return result


def likeliest(logits: Tensor, scales: Tensor | None = None) -> Tensor:
    """Of each row: the first of its highest columns, what stands there, and log Σ exp(scale · row).

    (rows, 3) in fp64. There is a scale, none negative, for each row; without scales they are 1.
    """
    rows, columns = logits.shape
    parts = divided_up(columns, COLUMNS)
    found = torch.empty((rows, parts, 3), dtype=torch.float32, device=logits.device)
    result = torch.empty((rows, 3), dtype=torch.float64, device=logits.device)
    given, scaled = (logits if scales is None else scales.float()), scales is not None
    _part[(rows, parts)](
        *(logits, given, found, columns, parts, *logits.stride()), SCALED=scaled, N=COLUMNS
    )
    padded = power_of_two(parts)
    _join[(rows,)](found, given, result, columns, parts, SCALED=scaled, P=padded, num_warps=1)
    return result


def drawn(values: Tensor, facts: Tensor, limits: Tensor) -> Tensor:
    """Which of its candidates `engine.sampler` draws, (rows, 1): as `_drawn` there says, where
    there are more tokens than candidates.

    `facts` are what `likeliest` gave with the scales, `limits` (5, rows) in their order there.
    """
    rows, count = values.shape
    places = torch.empty((rows, 1), dtype=torch.int64, device=values.device)
    _draw[(rows,)](
        *(values.contiguous(), facts, limits, places, rows),
        COUNT=count,
        C=power_of_two(count),
        num_warps=4,
    )
    return places


# fmt: off
@kernel("rows")  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, y, weight, bias, total, result, rows, heads, x_token, x_head, y_token, y_head, eps,
    ADDED: tl.constexpr, CENTRED: tl.constexpr,
    WIDTH: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):
    column = tl.arange(0, W)
    inside = column < WIDTH
    # As many rows of weights as of x: they then lie alike, and nothing waits for them.
    alike = tl.broadcast_to(column[None, :], [R, W])
    factor = tl.load(weight + alike, mask=alike < WIDTH, other=0.0).to(tl.float32)
    offset = factor
    if CENTRED:
        offset = tl.load(bias + alike, mask=alike < WIDTH, other=0.0).to(tl.float32)
    for first in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        row = first + tl.arange(0, R)
        here = (row < rows)[:, None] & inside[None, :]
        token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
        at = (token * x_token + head * x_head)[:, None] + column[None, :]
        to = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        wide = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        if ADDED:
            at = (token * y_token + head * y_head)[:, None] + column[None, :]
            wide += tl.load(y + at, mask=here, other=0.0).to(tl.float32)
            rounded = wide.to(total.dtype.element_ty)
            tl.store(total + to, rounded, mask=here)
            wide = rounded.to(tl.float32)
        if CENTRED:
            wide = tl.where(here, wide - (tl.sum(wide, 1) / WIDTH)[:, None], 0.0)
        wide *= tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        wide *= factor
        if CENTRED:
            wide += offset
        tl.store(result + to, wide.to(result.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    gates, ups, result, width, blocks, gate_row, gate_column, up_row, up_column, limit,
    KIND: tl.constexpr, LIMITED: tl.constexpr, N: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * N + tl.arange(0, N)
    here = column < width
    gate = tl.load(gates + row * gate_row + column * gate_column, mask=here, other=0.0)
    up = tl.load(ups + row * up_row + column * up_column, mask=here, other=0.0)
    wide, factor = gate.to(tl.float32), up.to(tl.float32)
    if LIMITED:
        wide = tl.minimum(wide, limit)
        factor = tl.minimum(tl.maximum(factor, -limit), limit)
    opened = activated(wide, 1.0, KIND).to(up.dtype).to(tl.float32)
    tl.store(result + row * width + column, (opened * factor).to(up.dtype), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    logits, scales, found, columns, parts, row_stride, column_stride,
    SCALED: tl.constexpr, N: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * N + tl.arange(0, N)
    at = row.to(tl.int64) * row_stride + column * column_stride
    x = tl.load(logits + at, mask=column < columns, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    token = tl.min(tl.where(x == peak, column, columns - 1), 0)
    # Where nothing is possible, anything but an infinity will do.
    x -= tl.where(peak == float("-inf"), 0.0, peak)
    if SCALED:
        x *= tl.load(scales + row)
    found += (row * parts + part) * 3
    tl.store(found, peak)
    tl.store(found + 1, tl.sum(tl.exp(x), 0))
    tl.store(found + 2, token.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    found, scales, result, columns, parts, SCALED: tl.constexpr, P: tl.constexpr
):
    row, part = tl.program_id(0), tl.arange(0, P)
    here = part < parts
    found += row * parts * 3 + part * 3
    peaks = tl.load(found, mask=here, other=float("-inf"))
    totals = tl.load(found + 1, mask=here, other=0.0)
    tokens = tl.load(found + 2, mask=here, other=0.0).to(tl.int32)
    scale = tl.load(scales + row).to(tl.float32) if SCALED else 1.0
    peak = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == peak, tokens, columns - 1), 0)
    total = tl.log(tl.sum(totals * tl.exp((peaks - peak) * scale), 0))
    result += row * 3
    tl.store(result, token.to(tl.float64))
    tl.store(result + 1, peak.to(tl.float64))
    tl.store(result + 2, peak.to(tl.float64) * scale + total.to(tl.float64))


@kernel("rows")  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    values, facts, limits, places, rows, COUNT: tl.constexpr, C: tl.constexpr,
):
    row, place = tl.program_id(0), tl.arange(0, C)
    here, limits = place < COUNT, limits + row
    scale, top_k = tl.load(limits), tl.load(limits + rows).to(tl.int32)
    top_p, min_p = tl.load(limits + 2 * rows), tl.load(limits + 3 * rows)
    draw, whole = tl.load(limits + 4 * rows), tl.load(facts + 3 * row + 2)
    value = tl.load(values + row * COUNT + place, mask=here, other=float("-inf"))
    peak = tl.max(value, 0)
    whole = tl.exp((whole - peak.to(tl.float64) * scale).to(tl.float32)).to(tl.float64)
    chances = tl.exp((value - peak) * scale.to(tl.float32)).to(tl.float64)
    last = tl.minimum(tl.maximum(top_k - 1, 0), COUNT - 1)
    least = tl.sum(tl.where(place == last, value, 0.0), 0)
    kept = here & ((value >= least) | (top_k == 0)) & (chances >= min_p)
    more = tl.sum(tl.where(kept & (place == COUNT - 1), 1, 0), 0)
    chances = tl.where(kept, chances, 0.0)
    reached = tl.cumsum(chances, 0)
    held = tl.max(reached, 0)
    total = tl.where(more > 0, whole, held)
    unknown = (more > 0) & ((top_k > 0) | (min_p > 0))
    kept = here & ((reached - chances < top_p * total) | (place == 0))
    more = more * tl.sum(tl.where(kept & (place == COUNT - 1), 1, 0), 0)
    target = draw * tl.where(more > 0, total, tl.max(tl.where(kept, reached, 0.0), 0))
    unknown = unknown | ((more > 0) & ((top_p < 1.0) | (target >= held)))
    found = tl.sum(tl.where(kept & (reached <= target), 1, 0), 0)
    tl.store(places + row, tl.where(unknown, -1, tl.minimum(found, COUNT - 1)).to(tl.int64))
# fmt: on
