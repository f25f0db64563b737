"""Recurrent layers: a running state instead of a history, kept where a sequence's last page lies.

The declaration names the parts of a convolution's inputs (x, B, C) one by one, so that each
divides over ranks by itself; here they are one run of channels, in the order of the declaration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import RMSNorm
from kvtide.layers.elementary import softplus, swish
from kvtide.layers.forward import Fields, ForwardPass, Place
from kvtide.layers.scan import ScanInput, scan_chunks, scan_tokens
from kvtide.layers.step import Rows


class CausalConv:
    """A convolution over the last inputs of every channel, as many as it has taps.

    The sum runs tap by tap and is the same for every token.
    """

    def __init__(self, blueprint: Blueprint, place: Place) -> None:
        self.taps = blueprint.tensor("weight", torch.float32).squeeze(1).T.contiguous()
        self.bias = blueprint.tensor("bias", torch.float32) if blueprint.has("bias") else None
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


class Mamba2:
    """A gated Mamba2 mixer. Without weights for a norm, the gate alone closes it."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        config = blueprint.config
        self.arithmetic: Arithmetic = blueprint.arithmetic
        self.place = blueprint.place(layer, "ssm")
        self.heads, self.head_dim, self.width = self.place.field("ssm").shape
        self.groups = config.count("mamba_n_groups", "n_groups", default=1)
        self.project_in = blueprint.linear("in_proj")
        self.project_out = blueprint.linear("out_proj")
        self.scan = self.arithmetic.order(scan_chunks, scan_tokens)
        self.conv = CausalConv(blueprint.under("conv1d"), self.place)
        self.dt_bias = blueprint.tensor("dt_bias", torch.float32)
        self.decay = -torch.exp(blueprint.tensor("A_log", torch.float32))
        self.skip = blueprint.tensor("D", torch.float32)[:, None]
        self.norm = blueprint.norm("norm") if blueprint.has("norm.weight") else None
        self.norm_first = bool(config.values.get("mamba_norm_before_gate", True))
        self.dt_limits = config.numbers("time_step_limit", 0.0, float("inf"))

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        inner = self.heads * self.head_dim
        split = (inner, inner + 2 * self.groups * self.width, self.heads)
        gate, inputs, dt = self.project(x).split(split, dim=-1)
        inputs = self.conv.rounded(run, self.place, inputs).float()
        dt = self.arithmetic.rowwise(softplus, dt.float() + self.dt_bias).clamp(*self.dt_limits)
        mixed = [
            self._sequence(run, rows, inputs[rows.start : rows.end], dt[rows.start : rows.end])
            for rows in run.sequences
        ]
        return self.project_out(self._gated(torch.cat(mixed), gate.float()).to(x.dtype))

    def project(self, x: Tensor) -> Tensor:
        """Side by side: the gate, the convolution's inputs (x, B, C), the time steps."""
        return self.project_in(x)

    def _sequence(self, run: ForwardPass, rows: Rows, inputs: Tensor, dt: Tensor) -> Tensor:
        """One sequence's tokens, from and to its running state: (tokens, inner)."""
        before = run.recall(self.place, rows)
        convolved, tail = self.conv(inputs, before)
        convolved = self.arithmetic.rowwise(swish, convolved)
        shared = self.groups * self.width
        x, b, c = convolved.split((self.heads * self.head_dim, shared, shared), dim=-1)
        x = x.reshape(-1, self.heads, self.head_dim)
        b, c = (t.reshape(-1, self.groups, self.width) for t in (b, c))
        shape = (self.heads, self.head_dim, self.width)
        state = inputs.new_zeros(shape) if before is None else before["ssm"]
        output, state = self.scan(ScanInput(x, dt, self.decay, b, c), state)
        run.remember(self.place, rows, {**tail, "ssm": state})
        mixed: Tensor = output + x * self.skip
        return mixed.flatten(1)

    def _gated(self, mixed: Tensor, gate: Tensor) -> Tensor:
        opened = self.arithmetic.rowwise(swish, gate)
        if self.norm is None:
            return mixed * opened
        if self.norm_first:
            return self._normed(mixed, self.norm) * opened
        return self._normed(mixed * opened, self.norm)

    def _normed(self, mixed: Tensor, norm: RMSNorm) -> Tensor:
        """Every group of channels by itself."""
        grouped = mixed.view(len(mixed), self.groups, -1)
        weight = norm.weight.view(self.groups, -1)
        return RMSNorm(norm.arithmetic, weight, norm.eps)(grouped).flatten(1)
