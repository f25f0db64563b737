"""Norms and gates, fused and row-wise: RMS norm, residual add with RMS norm, layer norm, GLU.

`_norm_rows`              grid (CTAS_PER_SM * SMs,) or fewer: a CTA takes tiles of rows
`_activate_and_multiply`  grid (rows * column tiles,)

Torch reference: `layers/elementwise.py`, `rms_norm`, `layer_norm` and the activations. Kernels
compute in fp32 and round where the reference rounds. A row's result depends on that row alone.
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
"""Elements that a CTA takes at a time, at least."""
CTAS_PER_SM = 8
"""CTAs per SM of the norm's grid, at most; each takes several tiles of rows."""
_SMALL_BATCH = 64
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`elementwise.rms_norm` over the last axis."""
    return _launch_norm(x, None, weight, None, eps)[1]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm."""
    return _launch_norm(x, y, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`elementwise.layer_norm` over the last axis."""
    return _launch_norm(x, None, weight, bias, eps)[1]


def _launch_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty_like(result)
    x_heads = _as_heads(x)
    y_heads = x_heads if y is None else _as_heads(y)
    rows, block_width = x_heads.shape[0] * x_heads.shape[1], power_of_two(width)
    block_rows = max(1, TILE // block_width)
    _norm_rows[(min(divided_up(rows, block_rows), CTAS_PER_SM * sm_count(x.device)),)](
        *(x_heads, y_heads, weight, weight if bias is None else bias, total, result),
        *(rows, x_heads.shape[1], x_heads.stride()[:2], y_heads.stride()[:2], eps),
        RESIDUAL=y is not None,
        CENTERED=bias is not None,
        WIDTH=width,
        BLOCK_WIDTH=block_width,
        BLOCK_ROWS=block_rows,
        num_warps=max(1, min(block_rows * block_width // _ELEMENTS_PER_WARP, _MAX_WARPS)),
    )
    return total, result


def _as_heads(x: Tensor) -> Tensor:
    """x as (tokens, heads, width), with contiguous rows."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x[:, None] if x.dim() == 2 else x.reshape(len(x), -1, x.shape[-1])


def gated(gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None) -> Tensor:
    """activation(gate) · up, both (tokens, width), or a gate (tokens, 1) per row.

    `limit` clamps both, as in `dense.GatedMLP`.
    """
    rows, width = up.shape
    gate = gate.expand_as(up)
    result = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    block = TILE if rows > _SMALL_BATCH else TILE // 2
    blocks = divided_up(width, block)
    _activate_and_multiply[(rows * blocks,)](
        *(gate, up, result, width, blocks, gate.stride(), up.stride(), limit or 0.0),
        KIND=activation.__name__,
        CLAMPED=limit is not None,
        BLOCK=block,
        num_warps=4,
    )
    return result


# fmt: off
@kernel("rows")  # type: ignore[untyped-decorator]
def _norm_rows(  # type: ignore[no-untyped-def]
    x, y, weight, bias, total, result, rows, heads, x_strides, y_strides, eps,
    RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    column = tl.arange(0, BLOCK_WIDTH)
    in_width = column < WIDTH
    # Weights are loaded in the layout of x, one copy per row: no layout conversion, no barrier.
    columns = tl.broadcast_to(column[None, :], [BLOCK_ROWS, BLOCK_WIDTH])
    weights = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    biases = weights
    if CENTERED:
        biases = tl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & in_width[None, :]
        token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
        offsets = (token * x_strides[0] + head * x_strides[1])[:, None] + column[None, :]
        out_offsets = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:
            offsets = (token * y_strides[0] + head * y_strides[1])[:, None] + column[None, :]
            value += tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + out_offsets, rounded, mask=mask)
            value = rounded.to(tl.float32)
        if CENTERED:
            value = tl.where(mask, value - (tl.sum(value, 1) / WIDTH)[:, None], 0.0)
        value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        value *= weights
        if CENTERED:
            value += biases
        tl.store(result + out_offsets, value.to(result.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _activate_and_multiply(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out, width, blocks, gate_strides, up_strides, limit,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = gate_ptr + row * gate_strides[0] + column * gate_strides[1]
    gate = tl.load(gate, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_strides[0] + column * up_strides[1], mask=mask, other=0.0)
    gate_value, up_value = gate.to(tl.float32), up.to(tl.float32)
    if CLAMPED:
        gate_value = tl.minimum(gate_value, limit)
        up_value = tl.minimum(tl.maximum(up_value, -limit), limit)
    activated_gate = activated(gate_value, 1.0, KIND).to(up.dtype).to(tl.float32)
    tl.store(out + row * width + column, (activated_gate * up_value).to(up.dtype), mask=mask)


# fmt: on
