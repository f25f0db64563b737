"""Qwen3-Next and Qwen3.5: gated delta layers, and gated attention every few layers.

MLPs are plain, or experts beside a shared MLP with a gate of its own. Norms have weights around
zero. The next-token layer has gated attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass
from kvtide.layers.elementwise import sigmoid
from kvtide.layers.linear_attention import GatedDelta
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.layers.self_attention import GatedAttention
from kvtide.models.model import Decoder, Layer
from kvtide.models.mtp import NextTokenDraft
from kvtide.models.qwen3_moe import SparseMLP, routing_rule
from kvtide.spec.config import Config


class SharedSparseMLP:
    def __init__(self, blueprint: Blueprint) -> None:
        self.ops = blueprint.ops
        self.experts = SparseMLP(blueprint, routing_rule(blueprint.config))
        self.shared = blueprint.under("shared_expert").mlp()
        self.gate = blueprint.linear("shared_expert_gate")

    def __call__(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.ops.gated(self.gate(x), self.shared(x), sigmoid)


class Qwen3NextLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.mixer: Layer
        if blueprint.keeps(number, "k"):
            self.mixer = GatedAttention(blueprint.under("self_attn"), number, rotation)
        else:
            self.mixer = GatedDelta(blueprint.under("linear_attn"), number)
        mlp = blueprint.under("mlp")
        self.mlp: Callable[[Tensor], Tensor]
        self.mlp = SharedSparseMLP(mlp) if mlp.has("gate.weight") else mlp.mlp()
        self.before_mixer = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.mixer(self.before_mixer(x), run))
        return x + self.mlp(normed)


class Qwen3Next(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 32_768,
        "norm_topk_prob": True,
        "num_experts_per_tok": 10,
        "partial_rotary_factor": 0.25,
    }

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(replace(blueprint, norm_offset=1.0))

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [Qwen3NextLayer(each, number, rotation) for number, each in base.layers()]


class Qwen3NextToken(NextTokenDraft):
    TOKEN_NORM = "pre_fc_norm_embedding"
    FEATURE_NORM = "pre_fc_norm_hidden"
    PROJECTION = "fc"
    NORM = "norm"

    def __init__(self, target: Decoder, blueprint: Blueprint) -> None:
        if blueprint.config.flag("mtp_use_dedicated_embeddings"):
            raise blueprint.config.refusal(
                "`mtp_use_dedicated_embeddings` is set, and a draft here has the model's own "
                "embedding; use --speculate ngram or eagle3"
            )
        super().__init__(target, replace(blueprint, norm_offset=1.0))

    @classmethod
    def under(cls, config: Config) -> str:
        return "mtp"

    def build_layer(self, base: Blueprint) -> Layer:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return Qwen3NextLayer(base.under("layers.0"), self.number, rotation)
