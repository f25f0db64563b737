"""What a model is to the engine, and what decoders have in common.

A decoder embeds tokens, passes them through its layers, and norms what comes out. A family gives it
its layers, and overrides a step where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers import Blueprint, ForwardPass, Step
from kvtide.layers.dense import Linear
from kvtide.spec import ModelMemory

Layer = Callable[[Tensor, ForwardPass], Tensor]


class Model(Protocol):
    """A forward pass over paged state. `memory` declares every tensor it keeps between tokens."""

    memory: ModelMemory
    vocabulary: int
    max_positions: int

    def forward(self, step: Step) -> Tensor:
        """Hidden states after the final norm, a row for every token of the step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32, for the rows that the caller wants them of."""


class Decoder:
    """`DEFAULTS` are config fields that published configs of the family leave out."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {}
    FINAL_NORM: ClassVar[str] = "norm"

    def __init__(self, blueprint: Blueprint) -> None:
        config, base = blueprint.config, blueprint.under("model")
        self.memory = blueprint.memory
        self.arithmetic = blueprint.arithmetic
        self.max_positions = config.count("max_position_embeddings")
        self.embedding = base.tensor("embed_tokens.weight")
        self.vocabulary = len(self.embedding)
        self.layers = self.build_layers(base)
        self.norm = base.norm(self.FINAL_NORM)
        tied = config.flag("tie_word_embeddings") or not blueprint.has("lm_head.weight")
        head = self.embedding if tied else blueprint.tensor("lm_head.weight")
        self.head = Linear(self.arithmetic, head)

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        """One for each of the model's layers, from what is under `model.`."""
        raise NotImplementedError

    def forward(self, step: Step) -> Tensor:
        with torch.no_grad():
            run = ForwardPass(step)
            x = self.embed(step.tokens)
            for number, layer in enumerate(self.layers):
                step.wait(number)
                x = layer(x, run)
            return self.norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head(hidden).float()
