"""Layers without memory: projections, norms, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.elementary import Activation, layer_norm, rms_norm
from kvtide.layers.ranks import ALONE, TensorRanks


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


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over the last axis: of a token, or of each of its heads."""

    arithmetic: Arithmetic
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.arithmetic.rowwise(lambda rows: rms_norm(rows, self.weight, self.eps), x)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """As `RMSNorm`, but around the mean and with a bias."""

    arithmetic: Arithmetic
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
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

    def __call__(self, x: Tensor) -> Tensor:
        return self.gated(*self.gate_up(x).chunk(2, dim=-1))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down(self.arithmetic.rowwise(self.activation, gate) * up)
