"""Mamba2 mixers: a recurrent state instead of a history, kept where a sequence's last page lies.

A layer holds its rank's heads, and the groups that those heads belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import GatedNorm, ScanParams
from kvtide.layers.backend.ops import Ops
from kvtide.layers.blueprint import Blueprint, WeightPart
from kvtide.layers.causal_conv import conv_weights
from kvtide.layers.elementwise import swish
from kvtide.layers.forward import ForwardPass
from kvtide.layers.tensor_ranks import TensorRanks


class Mamba2:
    """A gated Mamba2 mixer. Without weights for a norm, the gate alone closes it.

    `norm_groups`: how many groups the norm has, None for those of B and C. `norm_first`: before
    the gate.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        layer: int,
        *,
        norm_groups: int | None = None,
        norm_first: bool = False,
    ) -> None:
        config = blueprint.config
        self.ops = blueprint.ops
        self.place = blueprint.place(layer, "ssm")
        self.heads, self.head_dim, self.width = self.place.field("ssm").shape
        decays = blueprint.tensor("A_log", torch.float32)
        groups = config.count("mamba_n_groups", "n_groups", default=1)
        heads, by_head = WeightPart(len(decays)), WeightPart(len(decays), self.head_dim)
        by_group = WeightPart(groups, self.width)
        self.project_in = blueprint.fused("in_proj", [by_head, by_head, by_group, by_group, heads])
        self.project_out = blueprint.rows("out_proj", unit=self.head_dim)
        self.conv = conv_weights(blueprint, self.place, [by_head, by_group, by_group], ["conv1d"])
        self.shared = (self.conv.taps.shape[1] - self.heads * self.head_dim) // 2
        self.dt_bias = blueprint.shard(blueprint.tensor("dt_bias", torch.float32))
        self.decay = -torch.exp(blueprint.shard(decays))
        self.skip = blueprint.shard(blueprint.tensor("D", torch.float32))[:, None]
        self.norm = None
        if blueprint.has("norm.weight"):
            self.norm = GroupedNorm.of(blueprint, "norm", norm_groups or groups)
        self.norm_first = norm_first
        self.dt_limits = config.numbers("time_step_limit", 0.0, float("inf"))

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        inner = self.heads * self.head_dim
        gate, inputs, dt = self.project(x).split((inner, inner + 2 * self.shared, self.heads), -1)
        convolved = self.ops.causal_conv(run, self.place, self.conv, inputs, swish)
        scan_params = ScanParams(self.dt_bias, self.decay, self.skip, self.dt_limits)
        out = self.ops.ssd_scan(run, self.place, scan_params, convolved, dt)
        return self.project_out(self._gated(out, gate))

    def project(self, x: Tensor) -> Tensor:
        """Side by side: the gate, the convolution's inputs (x, B, C), the time steps."""
        return self.project_in(x)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """In the dtype of the gate."""
        if self.norm is None:
            return self.ops.gated_norm(out, gate, GatedNorm(self.heads, None))
        return self.norm.gated(out, gate, norm_first=self.norm_first)


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
