"""Falcon-H1: attention and a Mamba2 mixer side by side in every layer.

It was trained with muP: nearly everything is multiplied by a constant of the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.mamba import Mamba2
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class ScaledMamba2(Mamba2):
    def __init__(self, blueprint: Blueprint, number: int) -> None:
        config = blueprint.config
        norm_first = bool(config.values.get("mamba_norm_before_gate", True))
        super().__init__(blueprint, number, norm_first=norm_first)
        self.gain = config.number("ssm_in_multiplier", default=1.0)
        gains = config.numbers("ssm_multipliers", *[1.0] * 5)
        inner = self.heads * self.head_dim
        # Of the gate, x, B, C and the time steps.
        widths = (inner, inner, self.shared, self.shared, self.heads)
        spread = [torch.full((n,), gain) for gain, n in zip(gains, widths, strict=True)]
        self.gains = torch.cat(spread).to(self.dt_bias.device, blueprint.dtype)

    def project(self, x: Tensor) -> Tensor:
        return super().project(x * self.gain) * self.gains


class ScaledMLP:
    def __init__(self, blueprint: Blueprint) -> None:
        self.mlp = blueprint.mlp()
        self.gate_gain, self.gain = blueprint.config.numbers("mlp_multipliers", 1.0, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.mlp.gate_up(x).chunk(2, dim=-1)
        return self.mlp.gated(gate * self.gate_gain, up) * self.gain


class FalconH1Layer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        config = blueprint.config
        self.mamba = ScaledMamba2(blueprint.under("mamba"), number)
        key_gain = config.number("key_multiplier", default=1.0)
        self.attention = Attention(
            blueprint.under("self_attn"), number, rotation, key_gain=key_gain
        )
        self.mlp = ScaledMLP(blueprint.under("feed_forward"))
        self.before_mixers = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("pre_ff_layernorm")
        self.mamba_gain = config.number("ssm_out_multiplier", default=1.0)
        self.attention_in = config.number("attention_in_multiplier", default=1.0)
        self.attention_gain = config.number("attention_out_multiplier", default=1.0)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        normed = self.before_mixers(x)
        remembered = self.mamba(normed, run) * self.mamba_gain
        attended = self.attention(normed * self.attention_in, run) * self.attention_gain
        x, normed = self.before_mlp.add_and_norm(x, remembered + attended)
        return x + self.mlp(normed)


class FalconH1(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }
    FINAL_NORM = "final_layernorm"

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint)
        self.embedding_gain = blueprint.config.number("embedding_multiplier", default=1.0)
        self.logit_gain = blueprint.config.number("lm_head_multiplier", default=1.0)

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [FalconH1Layer(each, number, rotation) for number, each in base.layers()]

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.embedding_gain

    def shard_logits(self, hidden: Tensor) -> Tensor:
        return super().shard_logits(hidden) * self.logit_gain
