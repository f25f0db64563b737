"""Causal convolutions over the last inputs of every channel, as many as there are taps.

The declaration names the parts of a convolution's inputs (x, B, C) one by one, so that each
divides over ranks by itself; here they are one run of channels, in the order of the declaration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint, WeightPart
from kvtide.layers.elementwise import Activation
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import ConvWeights
from kvtide.layers.packing import Fields


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


# -- the torch reference -------------------------------------------------------------------------


def causal_conv(
    arithmetic: Arithmetic,
    run: ForwardPass,
    place: Place,
    conv: ConvWeights,
    inputs: Tensor,
    activation: Activation | None,
) -> Tensor:
    """The convolution of inputs (tokens, channels) in fp32, from and to the running states."""
    inputs = conv.rounded(run, place, inputs).float()
    convolved = []
    for rows in run.sequences:
        ours = inputs[rows.start : rows.end]
        sums, tail = convolve(conv, ours, run.read_state(place, rows))
        run.write_state(place, rows, tail)
        convolved.append(sums)
    together = torch.cat(convolved)
    return together if activation is None else arithmetic.rowwise(activation, together)


def convolve(conv: ConvWeights, inputs: Tensor, before: Fields | None) -> tuple[Tensor, Fields]:
    """One sequence's inputs (tokens, channels), after those in `before`; and its last inputs.

    The sum runs tap by tap and is the same for every token.
    """
    tail = len(conv.taps) - 1
    if before is None or tail == 0:
        earlier = inputs.new_zeros((tail, inputs.shape[1]))
    else:
        earlier = torch.cat([before[field.name] for field in conv.kept]).T.to(inputs.dtype)
    window = torch.cat([earlier, inputs])
    sums = sum(window[i : i + len(inputs)] * tap for i, tap in enumerate(conv.taps))
    assert isinstance(sums, Tensor)
    sums = sums if conv.bias is None else sums + conv.bias
    return sums, _parts(conv, window[len(inputs) :].T)


def _parts(conv: ConvWeights, tail: Tensor) -> Fields:
    widths = [field.shape[0] for field in conv.kept]
    parts = tail.split(widths) if widths else ()
    return {field.name: part for field, part in zip(conv.kept, parts, strict=True)}
