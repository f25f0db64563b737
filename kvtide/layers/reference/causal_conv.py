"""Causal convolutions over the last inputs of every channel, as many as there are taps."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import ConvWeights
from kvtide.layers.elementwise import Activation
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields


def causal_conv(
    arithmetic: Arithmetic,
    run: ForwardPass,
    place: Place,
    conv: ConvWeights,
    inputs: Tensor,
    activation: Activation | None,
) -> Tensor:
    """The convolution of inputs (tokens, channels) in fp32, from and to the recurrent states."""
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
