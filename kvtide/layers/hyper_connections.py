"""Hyper-connections: several residual streams instead of one, mixed around every sublayer.

A sublayer's input is a weighted sum of the streams. Its output is added to each stream by another
weight, after a doubly stochastic matrix has mixed the streams. All weights depend on the token:
they come from a projection of all its streams together. Streams are (tokens, streams, width).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import StreamMixing
from kvtide.layers.backend.ops import Ops
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import RMSNorm


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
        widths = (count, count, count**2)
        scales = torch.cat([one.expand(n) for one, n in zip(scale, widths, strict=True)])
        rounds = config.count("hc_sinkhorn_iters")
        mixing = _mixing(blueprint, prefix, scales, rounds)
        self.mixing = self.ops.packed_mixing(mixing, blueprint.dtype)

    def normed(self, streams: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The sublayer's input after its norm, and the weights with which its output goes back."""
        return self.ops.gather_streams(self.mixing, streams, norm.params)

    def spread(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        """The streams after the sublayer."""
        return self.ops.spread_streams(given, streams, weights)


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
