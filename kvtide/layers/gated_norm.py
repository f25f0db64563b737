"""What closes a recurrent layer: a norm by group of channels and a gate, in either order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.elementwise import rms_norm, swish
from kvtide.layers.kernel_args import GatedNorm
from kvtide.layers.ops import Ops
from kvtide.layers.tensor_ranks import TensorRanks


def gated_norm(arithmetic: Arithmetic, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
    """The torch reference, of (tokens, channels) each."""

    def normed(x: Tensor) -> Tensor:
        if (weight := how.weight) is None:
            return x
        grouped = x.view(len(x), how.groups, -1)
        return arithmetic.rowwise(lambda rows: rms_norm(rows, weight, how.eps), grouped).flatten(1)

    opened = arithmetic.rowwise(how.activation, gate.float())
    closed = normed(x) * opened if how.norm_first else normed(x * opened)
    return closed.to(gate.dtype)


@dataclass(frozen=True, slots=True)
class GroupedNorm:
    """RMS norm over each group of channels by itself, in fp32.

    weight  this rank's, (groups, channels)
    groups  on all ranks: where they are fewer than ranks, several ranks have a part of one, and
            reduce the sums of their squares
    """

    ops: Ops
    weight: Tensor
    eps: float
    groups: int
    ranks: TensorRanks

    @classmethod
    def of(cls, blueprint: Blueprint, name: str, groups: int) -> GroupedNorm:
        norm, ranks = blueprint.norm(name), blueprint.ranks
        weight = blueprint.shard(norm.weight, len(norm.weight) // max(groups, ranks.count))
        own = weight.view(max(1, groups // ranks.count), -1)
        return cls(blueprint.ops, own, norm.eps, groups, ranks)

    @property
    def stands_alone(self) -> bool:
        """Whether each group is on one rank."""
        return self.groups >= self.ranks.count

    def gated(self, x: Tensor, gate: Tensor, *, norm_first: bool) -> Tensor:
        """The norm and a gate by swish, in the dtype of the gate."""
        if self.stands_alone:
            how = GatedNorm(len(self.weight), self.weight, self.eps, norm_first)
            return self.ops.gated_norm(x, gate, how)
        opened = self.ops.arithmetic.rowwise(swish, gate.float())
        closed = self._across_ranks(x) * opened if norm_first else self._across_ranks(x * opened)
        return closed.to(gate.dtype)

    def _across_ranks(self, x: Tensor) -> Tensor:
        grouped = x.view(len(x), *self.weight.shape)
        squares = self.ops.arithmetic.rowwise(lambda rows: (rows * rows).sum(-1), grouped)
        sums = x.new_zeros(len(x), self.groups)
        mine = self.ranks.rank * self.groups // self.ranks.count
        sums[:, mine] = squares[:, 0]
        sharing = self.ranks.count // self.groups
        mean = self.ranks.all_reduce(sums)[:, mine, None] / (sharing * self.weight.shape[1])
        return x * torch.rsqrt(mean + self.eps) * self.weight[0]
