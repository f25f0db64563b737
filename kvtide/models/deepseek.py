"""DeepSeek-V2 and V3, and GLM-4 MoE lite: latent attention, and experts after the first layers.

They differ in how experts are scored and selected, which is in their configs, and in their
checkpoints: a layer has experts where there is a router. A next-token layer, numbered after the
last, is the draft's and built like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass
from kvtide.layers.backend.kernel_args import RoutingRule
from kvtide.layers.elementwise import Activation, sigmoid, softmax
from kvtide.layers.mla import LatentAttention, Rotation
from kvtide.layers.moe import CORRECTION_BIAS, Mixture, Router
from kvtide.layers.rope import (
    Rope,
    rope,
    rope_parameters,
    rotate_half,
    rotate_interleaved,
    softmax_gain,
)
from kvtide.models.model import Decoder, Layer
from kvtide.models.mtp import NextTokenDraft
from kvtide.spec.config import Config
from kvtide.spec.families import layer_count


def _experts(blueprint: Blueprint) -> Mixture:
    config, gate = blueprint.config, blueprint.under("gate")
    bias = CORRECTION_BIAS if gate.has(CORRECTION_BIAS) else None
    router = Router(gate, _routing_rule(config), _scoring(config), bias)
    under = blueprint.under("shared_experts")
    shared = under.mlp() if under.has("gate_proj.weight") else None
    return Mixture.numbered(router, blueprint.under("experts"), shared)


def _scoring(config: Config) -> Activation:
    name = str(config.find("scoring_func"))
    if name not in _SCORINGS:
        raise config.refusal(
            f"`scoring_func` is {name!r}, which is not known here; use {', '.join(_SCORINGS)}"
        )
    return _SCORINGS[name]


def _routing_rule(config: Config) -> RoutingRule:
    method = str(config.find("topk_method"))
    if method not in _GROUP_DEPTHS:
        raise config.refusal(
            f"`topk_method` is {method!r}, which is not known here; use {', '.join(_GROUP_DEPTHS)}"
        )
    depth = _GROUP_DEPTHS[method]
    grouped = depth is not None
    return RoutingRule(
        config.count("num_experts_per_tok"),
        groups=config.count("n_group", default=1) if grouped else 1,
        allowed=config.count("topk_group", default=1) if grouped else 1,
        group_depth=depth or 1,
        renormalised=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )


_SCORINGS: dict[str, Activation] = {"sigmoid": sigmoid, "softmax": softmax}
_GROUP_DEPTHS: dict[str, int | None] = {"greedy": None, "group_limited_greedy": 1, "noaux_tc": 2}
"""How many of its best experts score a group; None without groups."""


class DeepSeekLayer:
    def __init__(self, blueprint: Blueprint, attention: Layer) -> None:
        mlp = blueprint.under("mlp")
        self.attention = attention
        self.mlp = _experts(mlp) if mlp.has("gate.weight") else mlp.mlp()
        self.before_attention = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.attention(self.before_attention(x), run))
        return x + self.mlp(normed)


def latent_layer(
    blueprint: Blueprint, number: int, rotation: Rotation, scale: float
) -> DeepSeekLayer:
    attention = LatentAttention(blueprint.under("self_attn"), number, rotation, scale)
    return DeepSeekLayer(blueprint, attention)


class DeepSeek3(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "n_group": 8,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation, scale = rotation_of(base.config), scale_of(base.config)
        return [latent_layer(each, number, rotation, scale) for number, each in base.layers()]


class DeepSeek2(DeepSeek3):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "norm_topk_prob": False,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    }

    def __init__(self, blueprint: Blueprint) -> None:
        # The published code then leaves out the scale; other engines leave out the norm.
        if blueprint.config.flag("norm_topk_prob"):
            raise blueprint.config.refusal(
                "`norm_topk_prob` has two meanings among engines that run this family; unset it"
            )
        super().__init__(blueprint)


class Glm4MoeLite(DeepSeek3):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        **DeepSeek3.DEFAULTS,
        "n_group": 1,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
    }


class DeepSeekNextToken(NextTokenDraft):
    """A layer as the model's own. The embedding and head beside it are copies, and not read."""

    @classmethod
    def under(cls, config: Config) -> str:
        return f"model.layers.{layer_count(config)}"

    def build_layer(self, base: Blueprint) -> Layer:
        return latent_layer(base, self.number, rotation_of(base.config), scale_of(base.config))


def rope_of(config: Config) -> Rope:
    """Of the dimensions of queries and keys that are rotated, all of them."""
    dims = config.count("qk_rope_head_dim")
    rotary = rope(rope_parameters(config), dims)
    if rotary.dims != dims:
        raise config.refusal(
            "`partial_rotary_factor` is not 1 beside `qk_rope_head_dim`, which says already how "
            "much of a head is rotated; leave it out"
        )
    return rotary


def rotation_of(config: Config) -> Rotation:
    return Rotation(rope_of(config), rotation_style(config, "rope_interleave"))


def rotation_style(config: Config, field: str) -> Callable[[Tensor, Tensor], Tensor]:
    return rotate_interleaved if config.flag(field) else rotate_half


def scale_of(config: Config) -> float:
    """The scale of scores, with the gain of a scaled rope."""
    dims = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")
    return float(dims**-0.5 * softmax_gain(rope_parameters(config)))
