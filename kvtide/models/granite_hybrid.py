"""Granite 4: Mamba2 mixers, attention at some layers, and experts beside a shared MLP.

Four constants of the config multiply the embedding, the scores, the outputs of sublayers and the
logits. Models without experts have the shared MLP alone; most have no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.blueprint import WeightPart
from kvtide.layers.dense import GatedMLP
from kvtide.layers.mamba import Mamba2
from kvtide.layers.moe import Experts
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class GraniteExperts:
    def __init__(self, blueprint: Blueprint) -> None:
        self.ops = blueprint.ops
        self.router = blueprint.linear("router.layer")
        self.top_k = blueprint.config.count("num_experts_per_tok")
        weights = ("input_linear.weight", "output_linear.weight")
        self.experts = Experts.stacked(blueprint, len(self.router.weight), *weights)

    def __call__(self, x: Tensor) -> Tensor:
        routing = self.ops.route_by_top_softmax(self.router(x), self.top_k)
        return self.experts(x, routing)


class GraniteLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope | None) -> None:
        config = blueprint.config
        self.gain = config.number("residual_multiplier", default=1.0)
        self.mixer: Layer
        if blueprint.keeps(number, "k"):
            scale = config.number("attention_multiplier", default=1.0)
            self.mixer = Attention(blueprint.under("self_attn"), number, rotation, scale)
        else:
            self.mixer = Mamba2(blueprint.under("mamba"), number, norm_groups=1)
        self.experts = None
        if blueprint.has("block_sparse_moe.router.layer.weight"):
            self.experts = GraniteExperts(blueprint.under("block_sparse_moe"))
        self.mlp = _shared_mlp(blueprint.under("shared_mlp"))
        self.before_mixer = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        out = self.mixer(self.before_mixer(x), run) * self.gain
        x, normed = self.before_mlp.add_and_norm(x, out)
        added = self.mlp(normed)
        if self.experts is not None:
            added = self.experts(normed) + added
        return x + added * self.gain


def _shared_mlp(blueprint: Blueprint) -> GatedMLP:
    channels = WeightPart(blueprint.config.count("shared_intermediate_size"))
    gate_up = blueprint.fused("input_linear", [channels, channels])
    down = blueprint.rows("output_linear")
    return GatedMLP(blueprint.ops, gate_up, down, blueprint.activation())


class GraniteHybrid(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    }

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self.embedding_gain = blueprint.config.number("embedding_multiplier", default=1.0)
        self.logit_divisor = blueprint.config.number("logits_scaling", default=1.0)

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        kind, rotation = base.config.find("position_embedding_type"), None
        if kind == "rope":
            rotation = rope(rope_parameters(base.config), base.head_dim)
        elif kind not in (None, "nope"):
            raise base.config.refusal(f"`position_embedding_type` is {kind!r}; use rope or nope")
        return [GraniteLayer(each, number, rotation) for number, each in base.layers()]

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.embedding_gain

    def shard_logits(self, hidden: Tensor) -> Tensor:
        return super().shard_logits(hidden) / self.logit_divisor
