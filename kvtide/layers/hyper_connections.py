"""Several residual streams instead of one, mixed anew around every sublayer (hyper-connections).

A sublayer takes a weighted sum of the streams. What it gives goes back to each of them by another
weight, and the streams themselves are mixed by a matrix whose rows and columns add up to one. All
weights depend on the token: they come from a projection of all its streams together.

Streams are (tokens, streams, width). Sums over the few streams are written out, so their order is
the same for every token.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import RMSNorm
from kvtide.layers.elementwise import rms_norm, sigmoid

if TYPE_CHECKING:
    from kvtide.layers.kernels.hyper_connections import Mixing


class _Mixes:
    """A token's mixing logits, from all its streams."""

    def __init__(self, blueprint: Blueprint, prefix: str) -> None:
        config = blueprint.config
        self.arithmetic = blueprint.arithmetic
        self.project = blueprint.tensor(f"{prefix}fn", torch.float32)
        self.scale = blueprint.tensor(f"{prefix}scale", torch.float32)
        self.base = blueprint.tensor(f"{prefix}base", torch.float32)
        self.count = config.count("hc_mult")
        self.eps = config.number("hc_eps")
        self.norm_eps = config.number("rms_norm_eps")
        self.one = torch.ones((), device=self.base.device)
        self.dtype = blueprint.dtype
        self.by_program = self.arithmetic.runs_programs(self.base.device)

    def logits(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(1).float()
        normed = self.arithmetic.rowwise(lambda rows: rms_norm(rows, self.one, self.norm_eps), flat)
        return self.arithmetic.linear(normed, self.project)

    def mixed(self, scales: Tensor, rounds: int = 0) -> Mixing:
        """The same, for programs."""
        from kvtide.layers.kernels.hyper_connections import Mixing

        numbers = {"eps": self.eps, "norm_eps": self.norm_eps, "rounds": rounds}
        return Mixing.of(self.project, scales, self.base, self.dtype, **numbers)


class Around(_Mixes):
    """What stands around one sublayer."""

    def __init__(self, blueprint: Blueprint, prefix: str) -> None:
        super().__init__(blueprint, prefix)
        self.rounds = blueprint.config.count("hc_sinkhorn_iters")
        self.scales = self.scale.repeat_interleave(
            torch.tensor([self.count, self.count, self.count**2], device=self.scale.device)
        )
        self.mixing = self.mixed(self.scales, self.rounds) if self.by_program else None

    def gathered(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input, and the weights with which its output is given back."""
        weights = self.arithmetic.rowwise(self._weights, self.logits(streams))
        return _weighed(weights[:, : self.count], streams), weights[:, self.count :]

    def normed(self, streams: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """As `gathered`, with the norm that the sublayer begins with."""
        if self.mixing is not None:
            from kvtide.layers.kernels.hyper_connections import gathered

            return gathered(self.mixing, streams, norm)
        x, weights = self.gathered(streams)
        return norm(x), weights

    def spread(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        """The streams after the sublayer."""
        if self.mixing is not None:
            from kvtide.layers.kernels.hyper_connections import spread

            return spread(given, streams, weights)
        back, mixing = weights[:, : self.count], weights[:, self.count :]
        mixing = mixing.unflatten(1, (self.count, self.count))
        wide = given.float()[:, None] * back[..., None]
        for number in range(self.count):
            wide = wide + mixing[:, number, :, None] * streams[:, number, None].float()
        return wide.to(streams.dtype)

    def passed(
        self, given: Tensor, streams: Tensor, weights: Tensor, following: Around, norm: RMSNorm
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The streams after the sublayer, and what `following.normed` gives of them."""
        if following.mixing is not None:
            from kvtide.layers.kernels.hyper_connections import passed

            return passed(given, streams, weights, following.mixing, norm)
        streams = self.spread(given, streams, weights)
        return streams, *following.normed(streams, norm)

    def _weights(self, logits: Tensor) -> Tensor:
        """Taking, giving back, mixing: (rows, count + count + count²)."""
        n = self.count
        logits = logits * self.scales + self.base
        take = sigmoid(logits[:, :n]) + self.eps
        back = 2 * sigmoid(logits[:, n : 2 * n])
        mixing = logits[:, 2 * n :].unflatten(1, (n, n)).softmax(-1) + self.eps
        mixing = mixing / (_sum(mixing, -2) + self.eps)
        for _ in range(self.rounds - 1):
            mixing = mixing / (_sum(mixing, -1) + self.eps)
            mixing = mixing / (_sum(mixing, -2) + self.eps)
        return torch.cat([take, back, mixing.flatten(1)], dim=1)


class Joined(_Mixes):
    """What makes one of the streams after the last layer."""

    def __init__(self, blueprint: Blueprint, prefix: str) -> None:
        super().__init__(blueprint, prefix)
        self.mixing = self.mixed(self.scale.expand_as(self.base)) if self.by_program else None

    def __call__(self, streams: Tensor) -> Tensor:
        if self.mixing is not None:
            from kvtide.layers.kernels.hyper_connections import joined

            return joined(self.mixing, streams)
        logits = self.logits(streams) * self.scale + self.base
        return _weighed(self.arithmetic.rowwise(sigmoid, logits) + self.eps, streams)


def _weighed(weights: Tensor, streams: Tensor) -> Tensor:
    parts = (weights[:, n, None] * streams[:, n].float() for n in range(streams.shape[1]))
    return reduce(torch.add, parts).to(streams.dtype)


def _sum(mixing: Tensor, axis: int) -> Tensor:
    return reduce(torch.add, mixing.unbind(axis)).unsqueeze(axis)
