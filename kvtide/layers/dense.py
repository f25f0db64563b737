"""Layers without memory: projections, norms, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.elementwise import Activation, layer_norm, rms_norm, sigmoid
from kvtide.layers.tensor_ranks import ALONE, TensorRanks


@dataclass(frozen=True, slots=True)
class Linear:
    """`ranks`: those that each have a share of the inputs, so that their sum is what comes out."""

    arithmetic: Arithmetic
    weight: Tensor
    bias: Tensor | None = None
    ranks: TensorRanks = ALONE

    @property
    def bias_or_zeros(self) -> Tensor:
        """What it adds, for those that lie beside others with a bias."""
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.ranks.count == 1:
            return self.arithmetic.linear(x, self.weight, self.bias)
        whole = self.ranks.total(self.arithmetic.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias


class WideLinear:
    """Weights and results in fp32, of rows in the model's dtype.

    On a device that runs programs no product of a model in bf16 is in fp32: its rows are multiplied
    by two bf16 halves of the weight, and what is lost is below 2⁻¹⁶ of a weight. Checkpoints saved
    in bf16 have but one half, and lose nothing.
    """

    def __init__(self, arithmetic: Arithmetic, weight: Tensor, dtype: torch.dtype) -> None:
        self.arithmetic, self.outputs = arithmetic, len(weight)
        self.divided = dtype == torch.bfloat16 and arithmetic.runs_programs(weight.device)
        self.weight = halves(weight) if self.divided else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.divided:
            return self.arithmetic.linear(x.float(), self.weight)
        products, rows = torch.mm(x, self.weight.T, out_dtype=torch.float32), self.outputs
        return products if len(self.weight) == rows else products[:, :rows] + products[:, rows:]


def halves(weight: Tensor) -> Tensor:
    """A weight in bf16, and below it what that leaves, if it leaves anything."""
    high = weight.to(torch.bfloat16)
    low = (weight - high.float()).to(torch.bfloat16)
    return torch.cat([high, low]) if bool(low.any()) else high


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over the last axis: of a token, or of each of its heads."""

    arithmetic: Arithmetic
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.arithmetic.runs_programs(x.device):
            from kvtide.layers.kernels.norms import normed

            return normed(x, self.weight, self.eps)
        return self.arithmetic.rowwise(lambda rows: rms_norm(rows, self.weight, self.eps), x)

    def added(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        if self.arithmetic.runs_programs(x.device):
            from kvtide.layers.kernels.norms import added

            return added(x, y, self.weight, self.eps)
        total = x + y
        return total, self(total)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """As `RMSNorm`, but around the mean and with a bias."""

    arithmetic: Arithmetic
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.arithmetic.runs_programs(x.device):
            from kvtide.layers.kernels.norms import layer_normed

            return layer_normed(x, self.weight, self.bias, self.eps)
        return self.arithmetic.rowwise(
            lambda rows: layer_norm(rows, self.weight, self.bias, self.eps), x
        )


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`gate_up` gives both factors side by side; `limit` is what neither may exceed."""

    arithmetic: Arithmetic
    gate_up: Linear
    down: Linear
    activation: Activation
    limit: float | None = None

    @property
    def first(self) -> Linear:
        """As MLPs without a gate call it, too."""
        return self.gate_up

    def __call__(self, x: Tensor) -> Tensor:
        return self.gated(*self.gate_up(x).chunk(2, dim=-1))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.arithmetic.runs_programs(up.device):
            from kvtide.layers.kernels.norms import gated

            return self.down(gated(gate, up, self.activation, self.limit))
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down(self.arithmetic.rowwise(self.activation, gate) * up)


def opened(arithmetic: Arithmetic, gates: Tensor, x: Tensor) -> Tensor:
    """x · σ(gates): one for every element, or (tokens, 1) for all of a token."""
    if arithmetic.runs_programs(x.device):
        from kvtide.layers.kernels.norms import gated

        return gated(gates, x, sigmoid)
    return x * arithmetic.rowwise(sigmoid, gates).to(x.dtype)
