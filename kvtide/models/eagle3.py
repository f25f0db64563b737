"""EAGLE3: a small draft that continues its target's hidden states, a token at a time.

A projection joins hidden states that enter several of the target's layers into one feature. The
first layer attends with the next token's embedding and the feature side by side, and adds to the
feature; layers after it, if there are any, are those of Llama. The output of the last layer is the
feature of the next pass; normed, it gives the logits.

Logits are over the draft's own vocabulary, which is usually the target's most frequent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass, Step, Weights
from kvtide.layers.dense import Embedding
from kvtide.layers.rope import Rope, rope, rope_parameters
from kvtide.models.llama import LlamaLayer
from kvtide.models.renamed_weights import RenamedWeights
from kvtide.spec.config import Config

FIRST_LAYER = "layers.0."
"""Published drafts also call their first layer `midlayer.`."""


@dataclass(frozen=True, slots=True)
class Eagle3Weights(RenamedWeights):
    """A draft's weights with all layers by number."""

    def stored_name(self, name: str) -> str:
        if name.startswith(FIRST_LAYER) and not self.weights.has(name):
            return name.replace(FIRST_LAYER, "midlayer.", 1)
        return name


class Eagle3Layer:
    """The first layer. `norms_residual`: the residual is the feature after its norm."""

    def __init__(self, blueprint: Blueprint, number: int, rotation: Rope) -> None:
        self.attention = Attention(blueprint.under("self_attn"), number, rotation)
        self.mlp = blueprint.under("mlp").mlp()
        self.of_token = blueprint.norm("input_layernorm")
        self.of_feature = blueprint.norm("hidden_norm")
        self.before_mlp = blueprint.norm("post_attention_layernorm")
        self.norms_residual = blueprint.config.flag("norm_before_residual")

    def __call__(self, token: Tensor, feature: Tensor, run: ForwardPass) -> Tensor:
        normed = self.of_feature(feature)
        residual = normed if self.norms_residual else feature
        attended = self.attention(torch.cat([self.of_token(token), normed], dim=-1), run)
        x, normed = self.before_mlp.add_and_norm(residual, attended)
        return x + self.mlp(normed)


class Eagle3:
    """A `DraftModel` with the weights of this blueprint, whose memory is the target's.

    embedding  the target's, for a draft without its own
    width      of a feature
    """

    def __init__(
        self, blueprint: Blueprint, captures: tuple[int, ...], embedding: Embedding
    ) -> None:
        config, memory = blueprint.config, blueprint.memory
        self.memory, self.captures = memory, captures
        self.width = config.count("hidden_size")
        self.joining = blueprint.linear("fc")
        own = "embed_tokens.weight"
        self.embedding = blueprint.embedding(own) if blueprint.has(own) else embedding
        self.number, *others = range(memory.layers, memory.end_layer)
        _, head_dim = blueprint.place(self.number, "k").field("k").shape
        rotation = rope(rope_parameters(config), head_dim)
        self.first = Eagle3Layer(blueprint.under("layers.0"), self.number, rotation)
        self.others = {
            number: LlamaLayer(blueprint.under(f"layers.{1 + i}"), number, rotation)
            for i, number in enumerate(others)
        }
        self.norm = blueprint.norm("norm")
        self.head = blueprint.head("lm_head.weight", "lm_head.bias")
        self.vocabulary = target_tokens(blueprint.weights)

    @torch.no_grad()
    def features(self, captured: Tensor) -> Tensor:
        return self.joining(captured)

    @torch.no_grad()
    def forward(self, step: Step, features: Tensor) -> Tensor:
        run = ForwardPass(step)
        step.wait(self.number)
        x = self.first(self.embedding(step.tokens), features, run)
        for number, layer in self.others.items():
            step.wait(number)
            x = layer(x, run)
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.gathered(self.head(self.norm(hidden)))


def target_tokens(weights: Weights) -> Tensor | None:
    """The target's token of each of the draft's; None where the vocabularies are the same."""
    if not weights.has("d2t"):
        return None
    ahead = weights.get("d2t").long()
    return ahead + torch.arange(len(ahead), device=ahead.device)


def captured_layers(config: Config, target_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs a draft with this config takes.

    The number of layers stands for the last layer's output. A config that lists none takes three,
    near the target's beginning, middle and end. Published configs number layers by their outputs
    under `eagle_config`, and by their inputs at the top level.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    nested = config.nested("eagle_config")
    outputs = nested.listing(name) if nested is not None else None
    shift = 1 if outputs else 0
    layers = outputs or config.listing(name) or [2, target_layers // 2, target_layers - 3]
    found = tuple(
        one + shift for one in layers if isinstance(one, int) and 0 <= one + shift <= target_layers
    )
    if len(found) != len(layers):
        raise config.refusal(
            f"it captures hidden states at the target's layers {layers}, and the target has "
            f"{target_layers} layers; give `{name}` numbers in {-shift}..{target_layers - shift}"
        )
    return found
