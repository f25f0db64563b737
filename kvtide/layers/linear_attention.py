"""Linear attention with a matrix state a head: gated delta, and KDA.

Both project, convolve queries, keys and values, and run the gated delta rule. They differ in the
decay, one a head or one for each channel of a key, and in how their output is gated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import DeltaGates, GatedNorm
from kvtide.layers.blueprint import Blueprint, WeightPart
from kvtide.layers.causal_conv import conv_weights
from kvtide.layers.dense import Linear, RMSNorm
from kvtide.layers.elementwise import Activation, sigmoid
from kvtide.layers.forward import ForwardPass


class GatedDeltaState:
    """The convolution and the recurrence, from and to a sequence's recurrent state.

    `parts` are queries, keys and values; several heads of values may have one query and key. There
    are as many biases as time steps: one a head, or one for each channel of a key.
    """

    def __init__(
        self, blueprint: Blueprint, layer: int, parts: Sequence[WeightPart], names: Sequence[str]
    ) -> None:
        self.ops = blueprint.ops
        self.place = blueprint.place(layer, "delta")
        self.heads, self.key_dim, self.value_dim = self.place.field("delta").shape
        self.conv = conv_weights(blueprint, self.place, parts, names)
        self.activation = blueprint.activation()
        self.channels = self.conv.taps.shape[1]
        bias = blueprint.tensor("dt_bias", torch.float32)
        decays = blueprint.tensor("A_log", torch.float32).flatten()
        self.dt_bias = blueprint.shard(bias, len(bias) // len(decays))
        self.decay = -torch.exp(blueprint.shard(decays))

    def __call__(self, inputs: Tensor, dt: Tensor, beta: Tensor, run: ForwardPass) -> Tensor:
        """(tokens, heads, values) in fp32, from inputs before the convolution; time steps and
        strengths before their functions."""
        convolved = self.ops.causal_conv(run, self.place, self.conv, inputs, self.activation)
        gates = DeltaGates(dt, self.dt_bias, self.decay, beta)
        return self.ops.gated_delta(run, self.place, convolved, gates)


def _gated(out: Tensor, gate: Tensor, norm: RMSNorm, activation: Activation) -> Tensor:
    """Normed by head, then gated, in the dtype of the gate: (tokens, heads · values)."""
    how = GatedNorm(out.shape[1], norm.weight, norm.eps, activation=activation)
    return norm.ops.gated_norm(out.flatten(1), gate, how)


class GatedDelta:
    """Qwen's: one decay a head. The output is normed by head, then gated."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        config = blueprint.config
        decays = blueprint.tensor("A_log", torch.float32)
        heads = WeightPart(len(decays))
        keys = WeightPart(config.count("linear_num_key_heads"), config.count("linear_key_head_dim"))
        values = WeightPart(len(decays), config.count("linear_value_head_dim"))
        parts = [keys, keys, values, values, heads, heads]
        weight = blueprint.shard_parts(_by_kind(blueprint, parts), parts)
        self.project_in = Linear(blueprint.arithmetic, weight)
        self.memory = GatedDeltaState(blueprint, layer, [keys, keys, values], ["conv1d"])
        self.project_out = blueprint.rows("out_proj", unit=values.width)
        # Its weights are stored around one, also where those of other norms are not.
        self.norm = replace(blueprint, norm_offset=0.0).norm("norm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        heads, width = self.memory.heads, self.memory.value_dim
        widths = (self.memory.channels, heads * width, heads, heads)
        inputs, gate, beta, dt = self.project_in(x).split(widths, dim=-1)
        out = self.memory(inputs, dt, beta, run)
        return self.project_out(_gated(out, gate, self.norm, self.memory.activation))


def _by_kind(blueprint: Blueprint, parts: Sequence[WeightPart]) -> Tensor:
    """The rows of all queries, keys, values, gates, strengths and time steps, kind by kind.

    Qwen3-Next keeps them by key head: all that belongs to the first, then to the second.
    """
    if blueprint.has("in_proj_qkv.weight"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return torch.cat([blueprint.tensor(f"{name}.weight") for name in names])
    kinds: list[Tensor] = []
    for name, ours in (("in_proj_qkvz", parts[:4]), ("in_proj_ba", parts[4:])):
        by_key_head = blueprint.tensor(f"{name}.weight").unflatten(0, (parts[0].units, -1))
        widths = [part.channels // parts[0].units for part in ours]
        kinds += [kind.flatten(0, 1) for kind in by_key_head.split(widths, dim=1)]
    return torch.cat(kinds)


class KimiDelta:
    """KDA: a decay for each channel of a key. The output is normed by head, then gated."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        self.width = blueprint.place(layer, "delta").field("delta").shape[1]
        decays = blueprint.tensor("A_log", torch.float32).flatten()
        part = WeightPart(len(decays), self.width)
        self.qkv = blueprint.columns("q_proj", "k_proj", "v_proj", unit=self.width)
        self.beta = blueprint.columns("b_proj")
        self.narrow = blueprint.linear("f_a_proj", "g_a_proj")
        self.forget = blueprint.columns("f_b_proj", unit=self.width)
        self.gate = blueprint.columns("g_b_proj", unit=self.width)
        self.memory = GatedDeltaState(
            blueprint, layer, [part] * 3, ["q_conv1d", "k_conv1d", "v_conv1d"]
        )
        self.norm = blueprint.norm("o_norm")
        self.project_out = blueprint.rows("o_proj", unit=self.width)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        forgetting, gating = self.narrow(x).split(self.narrow.outputs // 2, dim=-1)
        out = self.memory(self.qkv(x), self.forget(forgetting), self.beta(x), run)
        return self.project_out(_gated(out, self.gate(gating), self.norm, sigmoid))
