"""Layers without state: projections, norms, the gated MLP, embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import Norm
from kvtide.layers.backend.ops import Ops
from kvtide.layers.backend.packed_weight import PackedWeight, Weight
from kvtide.layers.elementwise import Activation, split_bf16
from kvtide.layers.tensor_ranks import ALONE, TensorRanks


def numbers(arithmetic: Arithmetic, held: Weight) -> Tensor:
    """A weight's numbers."""
    return arithmetic.unpacked(held) if isinstance(held, PackedWeight) else held


@dataclass(frozen=True, slots=True)
class Linear:
    """
    held   the weight as it is multiplied; only packed ones are not whole tensors of numbers
    ranks  those that hold a shard of the inputs, whose partial sums are reduced
    """

    arithmetic: Arithmetic
    held: Weight
    bias: Tensor | None = None
    ranks: TensorRanks = ALONE

    @property
    def weight(self) -> Tensor:
        """The weight's numbers; a packed one is unpacked for it."""
        return numbers(self.arithmetic, self.held)

    @property
    def outputs(self) -> int:
        return len(self.held)

    @property
    def device(self) -> torch.device:
        return self.held.device

    @property
    def bias_or_zeros(self) -> Tensor:
        """The bias, for a projection that is joined with others that have one."""
        return self.weight.new_zeros(self.outputs) if self.bias is None else self.bias

    def __call__(self, x: Tensor) -> Tensor:
        held = self.held
        if isinstance(held, PackedWeight):
            return self.arithmetic.packed_linear(x, held, self.bias)
        if self.ranks.count == 1:
            return self.arithmetic.linear(x, held, self.bias)
        whole = self.ranks.all_reduce(self.arithmetic.linear(x, held))
        return whole if self.bias is None else whole + self.bias


class WideLinear:
    """Weights and results in fp32, of rows in the model's dtype.

    Where kernels run, a bf16 model has no fp32 GEMM: rows are multiplied by two bf16 halves of the
    weight, which loses less than 2⁻¹⁶ of a weight. Checkpoints in bf16 have one half and lose
    nothing.
    """

    def __init__(self, ops: Ops, weight: Tensor, dtype: torch.dtype) -> None:
        self.arithmetic, self.outputs = ops.arithmetic, len(weight)
        self.divided = dtype == torch.bfloat16 and ops.uses_kernels
        self.weight = split_bf16(weight) if self.divided else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.divided:
            return self.arithmetic.linear(x.float(), self.weight)
        result, rows = torch.mm(x, self.weight.T, out_dtype=torch.float32), self.outputs
        return result if len(self.weight) == rows else result[:, :rows] + result[:, rows:]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Over the last axis: of a token, or of each of its heads."""

    ops: Ops
    weight: Tensor
    eps: float

    @property
    def params(self) -> Norm:
        return Norm(self.weight, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.params)

    def add_and_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        return self.ops.add_rms_norm(x, y, self.params)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """As `RMSNorm`, but around the mean and with a bias."""

    ops: Ops
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`gate_up` gives both factors side by side; `limit` clamps them."""

    ops: Ops
    gate_up: Linear
    down: Linear
    activation: Activation
    limit: float | None = None

    @property
    def first(self) -> Linear:
        """The first projection, under the name that MLPs without a gate use."""
        return self.gate_up

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.gated_mlp(x, self.gate_up, self.down, self.activation, self.limit)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down(self.ops.gated(gate, up, self.activation, self.limit))


# -- the vocabulary ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows by token, divided over tensor ranks (vocabulary parallel).

    held    this rank's rows; behind the vocabulary's last token they are zeros
    tokens  of the vocabulary, on all ranks
    """

    arithmetic: Arithmetic
    held: Weight
    tokens: int
    ranks: TensorRanks = ALONE

    @property
    def weight(self) -> Tensor:
        """This rank's rows as numbers."""
        return numbers(self.arithmetic, self.held)

    def __call__(self, tokens: Tensor) -> Tensor:
        if isinstance(self.held, PackedWeight):
            rows = self.arithmetic.unpacked(self.held.take(tokens.flatten()))
            return rows.view(*tokens.shape, self.held.inputs)
        if self.ranks.count == 1:
            return functional.embedding(tokens, self.held)
        local = tokens - self.ranks.rank * len(self.held)
        elsewhere = (local < 0) | (local >= len(self.held))
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.held)
        return self.ranks.all_reduce(rows.masked_fill(elsewhere[..., None], 0))


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to logits, divided as `Embedding` is, with which it may share its weight.

    tokens  of the vocabulary, on all ranks
    """

    linear: Linear
    tokens: int
    ranks: TensorRanks = ALONE

    @property
    def weight(self) -> Tensor:
        """This rank's rows as numbers."""
        return self.linear.weight

    @property
    def device(self) -> torch.device:
        return self.linear.device

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's tokens, in fp32."""
        return self.linear(hidden).float()

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of all ranks' tokens, the same bits on every rank."""
        if self.ranks.count == 1:
            return logits
        return self.ranks.all_gather(logits)[..., : self.tokens].contiguous()
