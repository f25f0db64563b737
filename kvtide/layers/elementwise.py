"""Functions of rows, made only of operations that treat every element alike.

Torch's `silu`, `gelu`, `sigmoid` and `softplus` compute an element differently in the last,
incomplete vector of a tensor, so the number of tokens in a step changes the last bit. `exp`,
`tanh`, `log1p`, `rsqrt` and sums over rows do not. `arithmetic.rows_stand_alone` verifies it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def swish(x: Tensor, gain: float = 1.0) -> Tensor:
    """x · σ(gain · x)."""
    wide = x.float()
    return (wide / (1 + torch.exp(-gain * wide))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """In fp32."""
    return 1 / (1 + torch.exp(-x.float()))


def gelu_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def sqrt_softplus(x: Tensor) -> Tensor:
    return softplus(x).sqrt()


def softmax(x: Tensor) -> Tensor:
    """Over the last axis."""
    return x.softmax(-1)


def relu_squared(x: Tensor) -> Tensor:
    raised = x.clamp(min=0)
    return raised * raised


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors over the last axis, scaled to length one, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Over the last axis, in fp32."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (wide * weight + bias).to(x.dtype)


def split_bf16(weight: Tensor) -> Tensor:
    """A weight rounded to bf16, and below it the rounding error in bf16, if there is any."""
    high = weight.to(torch.bfloat16)
    low = (weight - high.float()).to(torch.bfloat16)
    return torch.cat([high, low]) if bool(low.any()) else high


ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": gelu_tanh,
    "relu2": relu_squared,
    "silu": swish,
    "swish": swish,
}
"""By their names in configs."""
