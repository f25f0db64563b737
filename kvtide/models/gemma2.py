"""Gemma 2: Gemma 3's layer, with windowed and full layers by turns and limits on all logits.

Attention scores and the logits that come out are softly capped; all layers have the same rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtide.layers import Blueprint
from kvtide.layers.rope import rope, rope_parameters
from kvtide.models.gemma3 import Gemma3, Gemma3Layer
from kvtide.models.model import Layer


class Gemma2(Gemma3):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10_000.0,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [Gemma3Layer(each, number, rotation) for number, each in base.layers()]
