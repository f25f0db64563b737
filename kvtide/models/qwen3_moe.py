"""Qwen3-MoE: the plain decoder, with experts in most of its MLPs.

`SparseMLP` and `SparseLayer` are what Qwen's and Mistral's mixtures have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.backend.kernel_args import RoutingRule
from kvtide.layers.elementwise import softmax
from kvtide.layers.moe import Experts
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config


class SparseMLP:
    """The experts with the best scores by a softmax over all of them.

    `names` are those of an expert's gate, up and down projections. Qwen3.5 has the experts of a
    layer in two weights.
    """

    def __init__(self, blueprint: Blueprint, rule: RoutingRule, *names: str) -> None:
        self.ops = blueprint.ops
        self.router = blueprint.linear("gate")
        self.rule = rule
        experts, count = blueprint.under("experts"), len(self.router.weight)
        if experts.has("gate_up_proj"):
            self.experts = Experts.stacked(experts, count, "gate_up_proj", "down_proj")
        else:
            self.experts = Experts.numbered(experts, count, *names)

    def __call__(self, x: Tensor) -> Tensor:
        routing = self.ops.route(self.router(x), self.rule, softmax)
        return self.experts(x, routing)


def routing_rule(config: Config) -> RoutingRule:
    """From the fields of Qwen's configs."""
    top_k = config.count("num_experts_per_tok")
    return RoutingRule(top_k, renormalised=config.flag("norm_topk_prob"))


class SparseLayer:
    def __init__(
        self, blueprint: Blueprint, number: int, rotation: Rope, mlp: Callable[[Tensor], Tensor]
    ) -> None:
        self.attention = Attention(blueprint.under("self_attn"), number, rotation)
        self.mlp = mlp
        self.before_attention = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.attention(self.before_attention(x), run))
        return x + self.mlp(normed)


class Qwen3Moe(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {"num_experts_per_tok": 8}

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        layers = []
        for number, each in base.layers():
            mlp = each.under("mlp")
            sparse = mlp.has("gate.weight")
            part = SparseMLP(mlp, routing_rule(mlp.config)) if sparse else mlp.mlp()
            layers.append(SparseLayer(each, number, rotation, part))
        return layers
