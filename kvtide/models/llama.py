"""The plain decoder: Llama, Qwen2, Qwen3, Mistral.

They differ in their checkpoints (biases, norms of queries and keys) and in their pools (windows),
and `Attention` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.model import Decoder, Layer


class LlamaLayer:
    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope | None) -> None:
        self.attention = Attention(blueprint.under("self_attn"), number, rotation)
        self.mlp = blueprint.under("mlp").mlp()
        self.before_attention = blueprint.norm("input_layernorm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        x, normed = self.before_mlp.add_and_norm(x, self.attention(self.before_attention(x), run))
        return x + self.mlp(normed)


class Llama(Decoder):
    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        return [LlamaLayer(each, number, rotation) for number, each in base.layers()]
