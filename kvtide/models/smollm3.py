"""SmolLM3: the plain decoder, with some layers without a rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtide.layers import Blueprint
from kvtide.layers.rope import rope, rope_parameters
from kvtide.models.llama import Llama, LlamaLayer
from kvtide.models.model import Layer


class SmolLM3(Llama):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        config = base.config
        rotation = rope(rope_parameters(config), base.head_dim)
        period = config.count("no_rope_layer_interval", default=4)
        rotates = config.per_layer(base.memory.layers, "no_rope_layers")
        # Despite its name, a 1 in this field is a layer with a rotation.
        rotates = rotates or [(number + 1) % period for number in range(base.memory.layers)]
        return [
            LlamaLayer(each, number, rotation if rotates[number] else None)
            for number, each in base.layers()
        ]
