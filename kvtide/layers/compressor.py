"""Compressed streams: one entry for every block of tokens, a mean weighted by gates.

`reference/compressor.py` says how the mean is computed, and what a block costs that stays open.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import CompressedStream
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.forward import ForwardPass
from kvtide.layers.rope import Rope


class Compressor:
    """A layer's compressed stream: its weights, and the pools that its entries and means lie in."""

    def __init__(self, blueprint: Blueprint, layer: int, pool: str, rope: Rope) -> None:
        self.ops = blueprint.ops
        position = blueprint.tensor("ape", torch.float32)
        within = blueprint.pool(f"{pool}_open", layer)
        self.overlaps = position.shape[1] == 2 * within.field("mixed").shape[0]
        self.stream = CompressedStream(
            blueprint.pool(pool, layer),
            blueprint.pool(f"{pool}_state", layer) if self.overlaps else within,
            within if self.overlaps else None,
            position,
            blueprint.norm("norm").params,
            rope,
            blueprint.dtype,
        )

    @staticmethod
    def weight(blueprint: Blueprint) -> Tensor:
        """The projection of tokens to values and gates, side by side.

        In fp32 whatever the model computes in, as the published code does.
        """
        names = ("wkv.weight", "wgate.weight")
        return torch.cat([blueprint.tensor(name, torch.float32) for name in names])

    def __call__(self, values_gates: Tensor, run: ForwardPass) -> list[Tensor]:
        """Writes what the step's tokens add to the stream; `Ops.compress` says what comes back.

        values_gates  the projection of tokens by `weight`, side by side, in fp32
        """
        return self.ops.compress(run, self.stream, values_gates)
