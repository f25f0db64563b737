"""Recurrent layers: a running state instead of a history, kept where a sequence's last page lies.

The declaration names the parts of a convolution's inputs (x, B, C) one by one, so that each
divides over ranks by itself; here they are one run of channels, in the order of the declaration.
What a layer holds is its rank's share: heads, and the groups that those heads belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint, WeightPart
from kvtide.layers.elementwise import rms_norm, softplus, swish
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.ssd_scan import ScanInput, scan_chunks, scan_tokens
from kvtide.layers.step import Rows
from kvtide.layers.tensor_ranks import TensorRanks


class CausalConv:
    """A convolution over the last inputs of every channel, as many as it has taps.

    The sum runs tap by tap and is the same for every token. `names` are of the convolutions of
    several parts, if they have weights of their own.
    """

    def __init__(
        self, blueprint: Blueprint, place: Place, parts: Sequence[WeightPart], names: Sequence[str]
    ) -> None:
        weights = [blueprint.tensor(f"{name}.weight", torch.float32) for name in names]
        taps = blueprint.share_parts(torch.cat(weights).squeeze(1), parts)
        self.taps = taps.T.contiguous()
        self.bias = None
        if blueprint.has(f"{names[0]}.bias"):
            biases = [blueprint.tensor(f"{name}.bias", torch.float32) for name in names]
            self.bias = blueprint.share_parts(torch.cat(biases), parts)
        self.kept = [field for field in place.pool.entry.fields if field.name.startswith("conv")]
        assert sum(field.shape[0] for field in self.kept) in (0, self.taps.shape[1])

    def __call__(self, inputs: Tensor, before: Fields | None) -> tuple[Tensor, Fields]:
        """Inputs (tokens, channels) as they are kept, and what was kept of those before them."""
        tail = len(self.taps) - 1
        if before is None or tail == 0:
            earlier = inputs.new_zeros((tail, inputs.shape[1]))
        else:
            earlier = torch.cat([before[field.name] for field in self.kept]).T.to(inputs.dtype)
        window = torch.cat([earlier, inputs])
        sums = sum(window[i : i + len(inputs)] * tap for i, tap in enumerate(self.taps))
        assert isinstance(sums, Tensor)
        sums = sums if self.bias is None else sums + self.bias
        return sums, self._parts(window[len(inputs) :].T)

    def _parts(self, tail: Tensor) -> Fields:
        widths = [field.shape[0] for field in self.kept]
        parts = tail.split(widths) if widths else ()
        return {field.name: part for field, part in zip(self.kept, parts, strict=True)}

    def rounded(self, run: ForwardPass, place: Place, inputs: Tensor) -> Tensor:
        """Inputs with the precision in which a later step will see them."""
        return run.rounded(place, self.kept[0].name, inputs) if self.kept else inputs


class ShortConv:
    """A convolution between two gates, and nothing else that remembers."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        self.arithmetic = blueprint.arithmetic
        self.place = blueprint.place(layer, "conv")
        channels = WeightPart(blueprint.config.count("hidden_size"))
        self.project_in = blueprint.fused("in_proj", [channels] * 3)
        self.conv = CausalConv(blueprint, self.place, [channels], ["conv"])
        self.project_out = blueprint.rows("out_proj")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        before, after, inputs = self.project_in(x).chunk(3, dim=-1)
        return self.project_out(after * self._convolved(before * inputs, run).to(x.dtype))

    def _convolved(self, inputs: Tensor, run: ForwardPass) -> Tensor:
        if self.arithmetic.runs_programs(inputs.device):
            from kvtide.layers.kernels.causal_conv import convolve

            return convolve(run, self.place, self.conv, inputs, swished=False)
        inputs = self.conv.rounded(run, self.place, inputs).float()
        mixed = []
        for rows in run.sequences:
            ours = inputs[rows.start : rows.end]
            convolved, tail = self.conv(ours, run.recall(self.place, rows))
            run.remember(self.place, rows, tail)
            mixed.append(convolved)
        return torch.cat(mixed)


@dataclass(frozen=True, slots=True)
class GroupedNorm:
    """RMS norm over each group of channels by itself, in fp32.

    weight  this rank's, (groups, channels)
    groups  on all ranks: where they are fewer than ranks, several ranks have a part of one, and
            tell each other the sums of their squares
    """

    arithmetic: Arithmetic
    weight: Tensor
    eps: float
    groups: int
    ranks: TensorRanks

    @classmethod
    def of(cls, blueprint: Blueprint, name: str, groups: int) -> GroupedNorm:
        norm, ranks = blueprint.norm(name), blueprint.ranks
        weight = blueprint.share(norm.weight, len(norm.weight) // max(groups, ranks.count))
        own = weight.view(max(1, groups // ranks.count), -1)
        return cls(blueprint.arithmetic, own, norm.eps, groups, ranks)

    @property
    def stands_alone(self) -> bool:
        """Whether each group is on one rank."""
        return self.groups >= self.ranks.count

    def __call__(self, x: Tensor) -> Tensor:
        grouped = x.view(len(x), *self.weight.shape)
        if self.stands_alone:
            return self.arithmetic.rowwise(self._normed, grouped).flatten(1)
        squares = self.arithmetic.rowwise(lambda rows: (rows * rows).sum(-1), grouped)
        sums = x.new_zeros(len(x), self.groups)
        mine = self.ranks.rank * self.groups // self.ranks.count
        sums[:, mine] = squares[:, 0]
        sharing = self.ranks.count // self.groups
        mean = self.ranks.total(sums)[:, mine, None] / (sharing * self.weight.shape[1])
        return x * torch.rsqrt(mean + self.eps) * self.weight[0]

    def _normed(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight, self.eps)


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
        self.arithmetic: Arithmetic = blueprint.arithmetic
        self.place = blueprint.place(layer, "ssm")
        self.heads, self.head_dim, self.width = self.place.field("ssm").shape
        decays = blueprint.tensor("A_log", torch.float32)
        groups = config.count("mamba_n_groups", "n_groups", default=1)
        heads, by_head = WeightPart(len(decays)), WeightPart(len(decays), self.head_dim)
        by_group = WeightPart(groups, self.width)
        self.project_in = blueprint.fused("in_proj", [by_head, by_head, by_group, by_group, heads])
        self.project_out = blueprint.rows("out_proj", unit=self.head_dim)
        self.scan = self.arithmetic.order(scan_chunks, scan_tokens)
        self.conv = CausalConv(blueprint, self.place, [by_head, by_group, by_group], ["conv1d"])
        self.shared = (self.conv.taps.shape[1] - self.heads * self.head_dim) // 2
        self.dt_bias = blueprint.share(blueprint.tensor("dt_bias", torch.float32))
        self.decay = -torch.exp(blueprint.share(decays))
        self.skip = blueprint.share(blueprint.tensor("D", torch.float32))[:, None]
        self.norm = None
        if blueprint.has("norm.weight"):
            self.norm = GroupedNorm.of(blueprint, "norm", norm_groups or groups)
        self.norm_first = norm_first
        self.dt_limits = config.numbers("time_step_limit", 0.0, float("inf"))

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        inner = self.heads * self.head_dim
        gate, inputs, dt = self.project(x).split((inner, inner + 2 * self.shared, self.heads), -1)
        mixed = self._mixed(inputs, dt, run)
        return self.project_out(self._gated(mixed, gate))

    def project(self, x: Tensor) -> Tensor:
        """Side by side: the gate, the convolution's inputs (x, B, C), the time steps."""
        return self.project_in(x)

    def _mixed(self, inputs: Tensor, dt: Tensor, run: ForwardPass) -> Tensor:
        """(tokens, inner) in fp32, from and to the running states."""
        if self.arithmetic.runs_programs(inputs.device):
            from kvtide.layers.kernels.causal_conv import convolve
            from kvtide.layers.kernels.ssd_scan import Scanning, scan

            convolved = convolve(run, self.place, self.conv, inputs, swished=True)
            how = Scanning(self.dt_bias, self.decay, self.skip, self.dt_limits)
            return scan(run, self.place, how, convolved, dt)
        inputs = self.conv.rounded(run, self.place, inputs).float()
        dt = self.arithmetic.rowwise(softplus, dt.float() + self.dt_bias).clamp(*self.dt_limits)
        mixed = [
            self._sequence(run, rows, inputs[rows.start : rows.end], dt[rows.start : rows.end])
            for rows in run.sequences
        ]
        return torch.cat(mixed)

    def _sequence(self, run: ForwardPass, rows: Rows, inputs: Tensor, dt: Tensor) -> Tensor:
        """One sequence's tokens, from and to its running state: (tokens, inner)."""
        before = run.recall(self.place, rows)
        convolved, tail = self.conv(inputs, before)
        convolved = self.arithmetic.rowwise(swish, convolved)
        x, b, c = convolved.split((self.heads * self.head_dim, self.shared, self.shared), dim=-1)
        x = x.reshape(-1, self.heads, self.head_dim)
        b, c = (t.reshape(len(x), -1, self.width) for t in (b, c))
        shape = (self.heads, self.head_dim, self.width)
        state = inputs.new_zeros(shape) if before is None else before["ssm"]
        output, state = self.scan(ScanInput(x, dt, self.decay, b, c), state)
        run.remember(self.place, rows, {**tail, "ssm": state})
        mixed: Tensor = output + x * self.skip
        return mixed.flatten(1)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """In the dtype of the gate."""
        norm, groups = self.norm, self.heads if self.norm is None else len(self.norm.weight)
        if self.arithmetic.runs_programs(mixed.device) and (norm is None or norm.stands_alone):
            from kvtide.layers.kernels.gated_norm import GatedNorm, open_gates

            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return open_gates(mixed, gate, GatedNorm(groups, weight, eps, self.norm_first))
        opened = self.arithmetic.rowwise(swish, gate.float())
        if norm is None:
            closed = mixed * opened
        else:
            closed = norm(mixed) * opened if self.norm_first else norm(mixed * opened)
        return closed.to(gate.dtype)
