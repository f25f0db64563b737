"""The short convolution, and the taps of every layer that has a causal convolution.

The declaration names the parts of a convolution's inputs (x, B, C) one by one, so that each
divides over ranks by itself; here they are one run of channels, in the order of the declaration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import ConvWeights
from kvtide.layers.blueprint import Blueprint, WeightPart
from kvtide.layers.forward import ForwardPass, Place


def conv_weights(
    blueprint: Blueprint, place: Place, parts: Sequence[WeightPart], names: Sequence[str]
) -> ConvWeights:
    """This rank's taps. `names` are those of several parts, if they have weights of their own."""
    weights = [blueprint.tensor(f"{name}.weight", torch.float32) for name in names]
    taps = blueprint.shard_parts(torch.cat(weights).squeeze(1), parts).T.contiguous()
    bias = None
    if blueprint.has(f"{names[0]}.bias"):
        biases = [blueprint.tensor(f"{name}.bias", torch.float32) for name in names]
        bias = blueprint.shard_parts(torch.cat(biases), parts)
    kept = tuple(field for field in place.pool.entry.fields if field.name.startswith("conv"))
    assert sum(field.shape[0] for field in kept) in (0, taps.shape[1])
    return ConvWeights(taps, bias, kept)


class ShortConv:
    """A convolution between two gates, whose last inputs are the only state."""

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        self.ops = blueprint.ops
        self.place = blueprint.place(layer, "conv")
        channels = WeightPart(blueprint.config.count("hidden_size"))
        self.project_in = blueprint.fused("in_proj", [channels] * 3)
        self.conv = conv_weights(blueprint, self.place, [channels], ["conv"])
        self.project_out = blueprint.rows("out_proj")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        before, after, inputs = self.project_in(x).chunk(3, dim=-1)
        convolved = self.ops.causal_conv(run, self.place, self.conv, before * inputs)
        return self.project_out(after * convolved.to(x.dtype))
