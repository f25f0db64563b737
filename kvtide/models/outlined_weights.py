"""A checkpoint's weights in outline: tensors on torch's meta device, which have no bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.backend.packed_weight import PackedRows, PackedWeight
from kvtide.models.checkpoint import StoredWeights
from kvtide.models.safetensors_folder import WeightOutline
from kvtide.models.weight_digest import Stored

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class OutlinedWeights:
    """What is built from them takes what it takes when it is built from the weights, and is built
    in a moment. Only whole numbers are read: tables of tokens, which builders look into."""

    weights: StoredWeights

    def names(self) -> Collection[str]:
        return self.weights.names()

    def stored(self, name: str) -> Stored:
        return self.weights.stored(name)

    def outline(self, name: str) -> WeightOutline:
        return self.weights.outline(name)

    def get(self, name: str) -> Tensor:
        dtype = self.weights.outline(name).dtype
        if not dtype.is_floating_point:
            return self.weights.get(name)
        return torch.empty(self.weights.shape(name), dtype=dtype, device=META)

    def has(self, name: str) -> bool:
        return self.weights.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def get_rows(self, name: str, rows: range) -> Tensor:
        return self.get(name)[rows.start : rows.stop]

    def packed(self, name: str) -> PackedWeight | None:
        outline = self.weights.outline(name)
        if outline.form is None:
            return None
        rows, inputs = self.weights.shape(name)
        data = torch.empty(rows, outline.row_bytes, dtype=torch.uint8, device=META)
        return PackedWeight(inputs, (PackedRows(outline.form, data),))
