"""Gemma 3: five windowed layers to one that sees everything, each kind with its own rotation.

Norms stand before and after attention and MLP, with weights around zero; embeddings are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config


class Gemma3Layer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        config = blueprint.config
        scale = config.number("query_pre_attn_scalar") ** -0.5
        capped = config.find("attn_logit_softcapping") is not None
        cap = config.number("attn_logit_softcapping") if capped else None
        self.attention = Attention(blueprint.under("self_attn"), number, rotation, scale, cap)
        self.mlp = blueprint.under("mlp").mlp()
        self.before_attention = blueprint.norm("input_layernorm")
        self.after_attention = blueprint.norm("post_attention_layernorm")
        self.before_mlp = blueprint.norm("pre_feedforward_layernorm")
        self.after_mlp = blueprint.norm("post_feedforward_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        attended = self.after_attention(self.attention(self.before_attention(x), run))
        x, normed = self.before_mlp.add_and_norm(x, attended)
        return x + self.after_mlp(self.mlp(normed))


class Gemma3(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
    }

    def __init__(self, blueprint: Blueprint) -> None:
        config = blueprint.config
        if config.flag("use_bidirectional_attention"):
            raise config.refusal("`use_bidirectional_attention` has no cache; unset it")
        super().__init__(replace(blueprint, norm_offset=1.0))
        # Rounded as the model was trained with it.
        root = config.count("hidden_size") ** 0.5
        self.scale = float(torch.tensor(root, dtype=blueprint.dtype, device="cpu"))
        cap = config.find("final_logit_softcapping")
        self.cap = None if cap is None else config.number("final_logit_softcapping")

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        everything = rope(rope_parameters(base.config), base.head_dim)
        windowed = rope(_windowed(base.config), base.head_dim)
        layers = []
        for number, each in base.layers():
            sees_everything = each.place(number, "k").window is None
            layers.append(Gemma3Layer(each, number, everything if sees_everything else windowed))
        return layers

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) * self.scale

    def shard_logits(self, hidden: Tensor) -> Tensor:
        logits = super().shard_logits(hidden)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _windowed(config: Config) -> Config:
    """Windowed layers turn by a base of their own, and published scalings leave them out."""
    if config.nested("rope_parameters") is not None:
        return rope_parameters(config, "sliding_attention")
    return Config(config.model, {"rope_theta": config.number("rope_local_base_freq")})
