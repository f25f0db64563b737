"""Kimi Linear: KDA layers, and latent attention every few layers; experts after the first ones.

There is no rotation: the KDA layers alone tell the order of tokens. A layer has experts where there
is a router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass
from kvtide.layers.backend.kernel_args import RoutingRule
from kvtide.layers.linear_attention import KimiDelta
from kvtide.layers.mla import LatentAttention
from kvtide.layers.moe import Mixture, Router
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config


def _experts(blueprint: Blueprint) -> Mixture:
    router = Router(blueprint.under("gate"), _routing_rule(blueprint.config))
    shared = blueprint.under("shared_experts").mlp()
    return Mixture.numbered(router, blueprint.under("experts"), shared, "w1", "w3", "w2")


def _routing_rule(config: Config) -> RoutingRule:
    scoring = config.find("moe_router_activation_func")
    if scoring not in (None, "sigmoid"):
        raise config.refusal(
            f"`moe_router_activation_func` is {scoring!r}; only sigmoid is known here"
        )
    return RoutingRule(
        config.count("num_experts_per_token", "num_experts_per_tok"),
        groups=config.count("num_expert_group", "n_group", default=1),
        allowed=config.count("topk_group", default=1),
        renormalised=bool(config.values.get("moe_renormalize", True)),
        scale=config.number("routed_scaling_factor"),
    )


class KimiLayer:
    def __init__(self, blueprint: Blueprint, number: int) -> None:
        mixer = blueprint.under("self_attn")
        self.mixer: Layer
        if blueprint.keeps(number, "latent"):
            self.mixer = LatentAttention(mixer, number, None)
        else:
            self.mixer = KimiDelta(mixer, number)
        self.mlp = _mlp(blueprint)
        self.before_mixer = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.mixer(self.before_mixer(x), run))
        return x + self.mlp(normed)


def _mlp(blueprint: Blueprint) -> Callable[[Tensor], Tensor]:
    """Labs call a plain one `mlp`; `transformers` saves it under the other name, too."""
    plain, sparse = blueprint.under("mlp"), blueprint.under("block_sparse_moe")
    if sparse.has("gate.weight"):
        return _experts(sparse)
    return plain.mlp() if plain.has("gate_proj.weight") else sparse.mlp()


class KimiLinear(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "model_max_length": 1_048_576,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        if base.config.values.get("mla_use_nope") is False:
            raise base.config.refusal(
                "`mla_use_nope` is false, which no published model is; unset it"
            )
        return [KimiLayer(each, number) for number, each in base.layers()]
