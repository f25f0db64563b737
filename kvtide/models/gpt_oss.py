"""gpt-oss: windowed and full layers by turns, a sink in every head, and experts in every MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.backend.kernel_args import ExpertActivation, ExpertGroup, ExpertWeights
from kvtide.layers.dense import Linear
from kvtide.layers.moe import Experts, stack_experts
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class ClampedExperts:
    """Experts that clamp gate and up values, and add one to up values."""

    def __init__(self, blueprint: Blueprint) -> None:
        config = blueprint.config
        self.ops = blueprint.ops
        self.router = blueprint.linear("router")
        self.top_k = config.count("num_experts_per_tok", "experts_per_token")
        gain, limit = config.number("swiglu_alpha"), config.number("swiglu_limit")
        group = ExpertGroup.of(config, blueprint.ranks, config.count("num_local_experts"))
        gate_up = _stack(blueprint, "experts.gate_up_proj", group, _gate_first)
        down = _stack(blueprint, "experts.down_proj", group)
        gating = ExpertActivation(limit=limit, gain=gain, offset=1.0)
        self.experts = Experts(group=group, gate_up=gate_up, down=down, gating=gating, ops=self.ops)

    def __call__(self, x: Tensor) -> Tensor:
        routing = self.ops.route_by_top_softmax(self.router(x), self.top_k)
        return self.experts(x, routing)


def _stack(
    blueprint: Blueprint,
    name: str,
    group: ExpertGroup,
    arranged: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> ExpertWeights:
    """Published weights are (inputs, outputs)."""
    weights, biases = blueprint.tensor(name), blueprint.tensor(f"{name}_bias")
    each = (
        Linear(blueprint.arithmetic, arranged(weights[number].T), arranged(biases[number]))
        for number in group.own
    )
    return stack_experts(each, len(group.own))


def _gate_first(rows: Tensor) -> Tensor:
    """Gate and up rows alternate in published weights."""
    return torch.cat([rows[::2], rows[1::2]])


class GptOssLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.attention = Attention(blueprint.under("self_attn"), number, rotation)
        self.experts = ClampedExperts(blueprint.under("mlp"))
        self.before_attention = blueprint.norm("input_layernorm")
        self.before_experts = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_experts.add_and_norm(
            x, self.attention(self.before_attention(x), run)
        )
        return x + self.experts(normed)


class GptOss(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150_000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [GptOssLayer(each, number, rotation) for number, each in base.layers()]
