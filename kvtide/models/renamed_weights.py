"""Weights of a checkpoint under other names than it has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtide.layers import Weights
from kvtide.layers.backend.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class RenamedWeights:
    """A subclass says what a name is in the checkpoint."""

    weights: Weights

    def stored_name(self, name: str) -> str:
        """The name in this checkpoint, whether or not it has the tensor."""
        raise NotImplementedError

    def get(self, name: str) -> Tensor:
        return self.weights.get(self.stored_name(name))

    def has(self, name: str) -> bool:
        return self.weights.has(self.stored_name(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(self.stored_name(name))

    def get_rows(self, name: str, rows: range) -> Tensor:
        return self.weights.get_rows(self.stored_name(name), rows)

    def packed(self, name: str) -> PackedWeight | None:
        return self.weights.packed(self.stored_name(name))
