"""Hyper-connections: several residual streams instead of one, mixed around every sublayer.

A sublayer's input is a weighted sum of the streams. Its output is added to each stream by another
weight, after a doubly stochastic matrix has mixed the streams. All weights depend on the token:
they come from a projection of all its streams together.

Streams are (tokens, streams, width). Sums over the few streams are written out, so their order is
the same for every token.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import RMSNorm
from kvtide.layers.elementwise import rms_norm, sigmoid
from kvtide.layers.kernel_args import StreamMixing
from kvtide.layers.ops import Ops


def _mixing(blueprint: Blueprint, prefix: str, scales: Tensor, rounds: int) -> StreamMixing:
    config = blueprint.config
    return StreamMixing(
        blueprint.tensor(f"{prefix}fn", torch.float32),
        scales,
        blueprint.tensor(f"{prefix}base", torch.float32),
        config.number("hc_eps"),
        config.number("rms_norm_eps"),
        rounds,
    )


class HyperConnection:
    """The mixing around one sublayer."""

    def __init__(self, blueprint: Blueprint, prefix: str) -> None:
        self.ops: Ops = blueprint.ops
        count, config = blueprint.config.count("hc_mult"), blueprint.config
        scale = blueprint.tensor(f"{prefix}scale", torch.float32)
        widths = torch.tensor([count, count, count**2], device=scale.device)
        scales, rounds = scale.repeat_interleave(widths), config.count("hc_sinkhorn_iters")
        mixing = _mixing(blueprint, prefix, scales, rounds)
        self.mixing = self.ops.packed_mixing(mixing, blueprint.dtype)

    def normed(self, streams: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The sublayer's input after its norm, and the weights with which its output goes back."""
        return self.ops.gather_streams(self.mixing, streams, norm.params)

    def spread(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        """The streams after the sublayer."""
        return self.ops.spread_streams(given, streams, weights)

    def passed(
        self,
        given: Tensor,
        streams: Tensor,
        weights: Tensor,
        following: HyperConnection,
        norm: RMSNorm,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The streams after the sublayer, and what `following.normed` gives of them."""
        return self.ops.pass_streams(given, streams, weights, following.mixing, norm.params)


class HyperHead:
    """Joins the streams after the last layer."""

    def __init__(self, blueprint: Blueprint, prefix: str) -> None:
        self.ops: Ops = blueprint.ops
        base = blueprint.tensor(f"{prefix}base", torch.float32)
        scales = blueprint.tensor(f"{prefix}scale", torch.float32).expand_as(base)
        mixing = _mixing(blueprint, prefix, scales, 0)
        self.mixing = self.ops.packed_mixing(mixing, blueprint.dtype)

    def __call__(self, streams: Tensor) -> Tensor:
        return self.ops.join_streams(self.mixing, streams)


# -- the torch reference -------------------------------------------------------------------------


def gather(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> tuple[Tensor, Tensor]:
    """The sublayer's input before its norm, and the weights with which its output goes back."""
    count, logits = streams.shape[1], _logits(arithmetic, mixing, streams)
    weights = arithmetic.rowwise(lambda rows: _weights(mixing, rows, count), logits)
    return _weighed(weights[:, :count], streams), weights[:, count:]


def spread(given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
    """The streams after the sublayer."""
    count = streams.shape[1]
    back, mixing = weights[:, :count], weights[:, count:].unflatten(1, (count, count))
    wide = given.float()[:, None] * back[..., None]
    for number in range(count):
        wide = wide + mixing[:, number, :, None] * streams[:, number, None].float()
    return wide.to(streams.dtype)


def join(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> Tensor:
    """One stream of all of them."""
    logits = _logits(arithmetic, mixing, streams) * mixing.scales + mixing.base
    return _weighed(arithmetic.rowwise(sigmoid, logits) + mixing.eps, streams)


def _logits(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> Tensor:
    flat, one = streams.flatten(1).float(), torch.ones((), device=streams.device)
    normed = arithmetic.rowwise(lambda rows: rms_norm(rows, one, mixing.norm_eps), flat)
    return arithmetic.linear(normed, mixing.project)


def _weights(mixing: StreamMixing, logits: Tensor, n: int) -> Tensor:
    """Weights of the input, of the output, and the mixing matrix: (rows, n + n + n²)."""
    logits, eps = logits * mixing.scales + mixing.base, mixing.eps
    take = sigmoid(logits[:, :n]) + eps
    back = 2 * sigmoid(logits[:, n : 2 * n])
    matrix = logits[:, 2 * n :].unflatten(1, (n, n)).softmax(-1) + eps
    matrix = matrix / (_sum(matrix, -2) + eps)
    for _ in range(mixing.rounds - 1):
        matrix = matrix / (_sum(matrix, -1) + eps)
        matrix = matrix / (_sum(matrix, -2) + eps)
    return torch.cat([take, back, matrix.flatten(1)], dim=1)


def _weighed(weights: Tensor, streams: Tensor) -> Tensor:
    parts = (weights[:, n, None] * streams[:, n].float() for n in range(streams.shape[1]))
    return reduce(torch.add, parts).to(streams.dtype)


def _sum(mixing: Tensor, axis: int) -> Tensor:
    return reduce(torch.add, mixing.unbind(axis)).unsqueeze(axis)
