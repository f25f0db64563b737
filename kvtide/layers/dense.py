"""Layers without memory: projections, norms, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.elementary import Activation, rms_norm


@dataclass(frozen=True, slots=True)
class Linear:
    arithmetic: Arithmetic
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.arithmetic.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over the last axis: of a token, or of each of its heads."""

    arithmetic: Arithmetic
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.arithmetic.rowwise(lambda rows: rms_norm(rows, self.weight, self.eps), x)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`gate_up` gives both factors side by side."""

    arithmetic: Arithmetic
    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.gated(*self.gate_up(x).chunk(2, dim=-1))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down(self.arithmetic.rowwise(self.activation, gate) * up)
