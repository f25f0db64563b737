"""What closes a recurrent layer as one device program: a norm by group and a gate, in any order.

The same as `recurrent.Mamba2` and `associative` do in torch, in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.elementwise import swish
from kvtide.layers.kernel_args import GatedNorm
from kvtide.layers.kernels.elementwise import sigmoid
from kvtide.layers.kernels.grid import divided_up, power_of_two

CHANNELS = 1024
"""That a program takes at least, if there are as many."""


def gated_norm(mixed: Tensor, gates: Tensor, how: GatedNorm) -> Tensor:
    """Of (tokens, channels) each: in the dtype of the gates."""
    tokens, channels = gates.shape
    result = torch.empty((tokens, channels), dtype=gates.dtype, device=gates.device)
    width, weight = channels // how.groups, how.weight
    padded = power_of_two(width)
    groups = min(max(1, CHANNELS // padded), power_of_two(how.groups))
    _open[(tokens, divided_up(how.groups, groups))](
        *(mixed, gates, gates if weight is None else weight, result, gates.stride(0), how.eps),
        GROUPS=how.groups,
        WIDTH=width,
        OWN=weight is not None and weight.dim() == 2,
        NORM=weight is not None,
        NORM_FIRST=how.norm_first,
        SWISHED=how.activation is swish,
        G=groups,
        W=padded,
        num_warps=4 if groups * padded <= 2048 else 8,
    )
    return result


@triton.jit
def _normed(x, weight, eps, width):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None] * weight


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _open(  # type: ignore[no-untyped-def]
    mixed, gates, weights, result, gate_row, eps,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr,  # noqa: N803
    NORM_FIRST: tl.constexpr, SWISHED: tl.constexpr, G: tl.constexpr, W: tl.constexpr,  # noqa: N803
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * G + tl.arange(0, G)
    place = tl.arange(0, W)
    inside = (group < GROUPS)[:, None] & (place < WIDTH)[None, :]
    channel = group[:, None] * WIDTH + place[None, :]
    at = token * (GROUPS * WIDTH) + channel
    value = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + token * gate_row + channel, mask=inside, other=0.0).to(tl.float32)
    opened = sigmoid(gate)
    if SWISHED:
        opened *= gate
    if NORM:
        own = channel if OWN else channel * 0 + place[None, :]
        weight = tl.load(weights + own, mask=inside, other=0.0)
        if NORM_FIRST:
            value = _normed(value, weight, eps, WIDTH) * opened
        else:
            value = _normed(value * opened, weight, eps, WIDTH)
    else:
        value *= opened
    tl.store(result + at, value.to(result.dtype.element_ty), mask=inside)
# fmt: on
