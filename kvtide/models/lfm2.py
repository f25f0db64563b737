"""LFM2: gated short convolutions, and attention every few layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.causal_conv import ShortConv
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class Lfm2Attention(Attention):
    QUERY_NORM = "q_layernorm"
    KEY_NORM = "k_layernorm"
    OUT = "out_proj"


class Lfm2Layer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.mixer: Layer
        if blueprint.keeps(number, "k"):
            self.mixer = Lfm2Attention(blueprint.under("self_attn"), number, rotation)
        else:
            self.mixer = ShortConv(blueprint.under("conv"), number)
        self.mlp = blueprint.under("feed_forward").mlp("w1", "w3", "w2")
        self.before_mixer = blueprint.norm("operator_norm")
        self.before_mlp = blueprint.norm("ffn_norm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.mixer(self.before_mixer(x), run))
        return x + self.mlp(normed)


class Lfm2(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
    FINAL_NORM = "embedding_norm"

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [Lfm2Layer(each, number, rotation) for number, each in base.layers()]
