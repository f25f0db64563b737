"""The output norm and gate of a recurrent layer, fused: grouped RMS norm and gate in either order.

`_gated_norm`  grid (tokens, blocks of groups)

Torch reference: `layers/reference/gated_norm.py`, `gated_norm`; sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import GatedNorm
from kvtide.layers.elementwise import swish
from kvtide.layers.kernels.elementwise import sigmoid
from kvtide.layers.kernels.grid import divided_up, power_of_two

MIN_CHANNELS = 1024
"""Channels per CTA, at least, if there are as many."""


def gated_norm(x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
    """The gated norm of (tokens, channels), in the dtype of the gate."""
    tokens, channels = gate.shape
    out = torch.empty((tokens, channels), dtype=gate.dtype, device=gate.device)
    width, weight = channels // how.groups, how.weight
    block_width = power_of_two(width)
    block_groups = min(max(1, MIN_CHANNELS // block_width), power_of_two(how.groups))
    _gated_norm[(tokens, divided_up(how.groups, block_groups))](
        *(x, gate, gate if weight is None else weight, out, gate.stride(0), how.eps),
        GROUPS=how.groups,
        WIDTH=width,
        PER_GROUP_WEIGHT=weight is not None and weight.dim() == 2,
        NORM=weight is not None,
        NORM_FIRST=how.norm_first,
        SWISH=how.activation is swish,
        BLOCK_GROUPS=block_groups,
        BLOCK_WIDTH=block_width,
        num_warps=4 if block_groups * block_width <= 2048 else 8,
    )
    return out


@triton.jit
def _rms_norm(x, weight, eps, width):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None] * weight


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _gated_norm(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, out, stride_gate, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, PER_GROUP_WEIGHT: tl.constexpr, NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr, SWISH: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    offs_w = tl.arange(0, BLOCK_WIDTH)
    mask = (group < GROUPS)[:, None] & (offs_w < WIDTH)[None, :]
    channel = group[:, None] * WIDTH + offs_w[None, :]
    offsets = token * (GROUPS * WIDTH) + channel
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
    gate_value = sigmoid(gate)
    if SWISH:
        gate_value *= gate
    if NORM:
        weight_index = channel if PER_GROUP_WEIGHT else channel * 0 + offs_w[None, :]
        weight = tl.load(weight_ptr + weight_index, mask=mask, other=0.0)
        if NORM_FIRST:
            x = _rms_norm(x, weight, eps, WIDTH) * gate_value
        else:
            x = _rms_norm(x * gate_value, weight, eps, WIDTH)
    else:
        x *= gate_value
    tl.store(out + offsets, x.to(out.dtype.element_ty), mask=mask)
# fmt: on
