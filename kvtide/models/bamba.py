"""Bamba: Mamba2 mixers, attention at some layers, an MLP in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.mamba import Mamba2
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class BambaLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.mixer: Layer
        if blueprint.keeps(number, "k"):
            self.mixer = Attention(blueprint.under("self_attn"), number, rotation)
        else:
            self.mixer = Mamba2(blueprint.under("mamba"), number, norm_groups=1)
        self.mlp = blueprint.under("feed_forward").mlp()
        self.before_mixer = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("pre_ff_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.mixer(self.before_mixer(x), run))
        return x + self.mlp(normed)


class Bamba(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    }
    FINAL_NORM = "final_layernorm"

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [BambaLayer(each, number, rotation) for number, each in base.layers()]
