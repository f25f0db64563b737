"""gpt-oss: windowed and full layers by turns, a sink in every head, and experts in every MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.elementary import swish
from kvtide.layers.moe import Crew, route_by_top_softmax
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class ClampedExperts:
    """Experts whose gate and up values are limited, and whose up values are taken plus one.

    Gate and up lie interleaved in the weights, which are kept input by output.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        config, experts = blueprint.config, blueprint.under("experts")
        self.arithmetic = blueprint.arithmetic
        self.router = blueprint.linear("router")
        self.chosen = config.count("num_experts_per_tok", "experts_per_token")
        self.gain, self.limit = config.number("swiglu_alpha"), config.number("swiglu_limit")
        self.crew = Crew.of(blueprint, config.count("num_local_experts"))
        self.gate_up, self.gate_up_bias, self.down, self.down_bias = (
            self.crew.share(experts.tensor(name))
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        )
        self.gate_up, self.down = (
            weight.transpose(1, 2).contiguous() for weight in (self.gate_up, self.down)
        )

    def __call__(self, x: Tensor) -> Tensor:
        routing = route_by_top_softmax(self.arithmetic, self.router(x), self.chosen)
        return self.crew.mix(x, routing, self._expert)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        gate_up = linear(x, self.gate_up[number], self.gate_up_bias[number])
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        opened = self.arithmetic.rowwise(lambda rows: swish(rows, self.gain), gate)
        return linear(opened * (up + 1), self.down[number], self.down_bias[number])


class GptOssLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.attention = Attention(blueprint.under("self_attn"), number, rotation)
        self.experts = ClampedExperts(blueprint.under("mlp"))
        self.before_attention = blueprint.norm("input_layernorm")
        self.before_experts = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x = x + self.attention(self.before_attention(x), run)
        return x + self.experts(self.before_experts(x))


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
