"""The interface of models to the engine, and the decoder that families build on.

A decoder embeds tokens, passes them through its layers, and norms the result. A family gives it its
layers, and overrides a method where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass, Step, Weights
from kvtide.layers.dense import Head, Linear
from kvtide.models.checkpoint import OnDevice
from kvtide.models.draft import CapturedStates
from kvtide.spec import ModelMemory
from kvtide.spec.config import Config

Layer = Callable[[Tensor, ForwardPass], Tensor]


class Model(Protocol):
    """A forward pass over paged state. `memory` declares every tensor it keeps between tokens.

    A model may be one pipeline stage: the range of layers in `memory`. `uses_kernels`: whether
    Triton kernels do its work, so that its forward pass can be captured in a CUDA graph.
    """

    memory: ModelMemory
    vocabulary: int
    max_positions: int
    uses_kernels: bool

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        """Hidden states, a row for every token of the step: after the final norm, or the next
        stage's `before`. Hidden states that a draft asks for go to `captured`."""

    def carried(self, tokens: Tensor) -> Tensor:
        """An empty tensor for the output of the stage before; beyond the first stage only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of these rows in fp32; on the last stage only. Its tensor ranks call this
        together, and get the same bits."""


def max_positions(config: Config) -> int:
    """Tokens of the longest sequence that a model may have."""
    return config.count("max_position_embeddings", "model_max_length")


class Decoder:
    """`DEFAULTS` are config fields that published configs of the family leave out."""

    DEFAULTS: ClassVar[Mapping[str, object]] = {}
    BASE: ClassVar[str] = "model"
    EMBEDDING: ClassVar[str] = "embed_tokens.weight"
    FINAL_NORM: ClassVar[str] = "norm"
    HEAD: ClassVar[str] = "lm_head.weight"

    def __init__(self, blueprint: Blueprint) -> None:
        config, base = blueprint.config, blueprint.under(self.BASE)
        self.memory = blueprint.memory
        self.ops, self.ranks = blueprint.ops, blueprint.ranks
        self.arithmetic, self.uses_kernels = blueprint.arithmetic, blueprint.ops.uses_kernels
        self.max_positions = max_positions(config)
        self.vocabulary = config.count("vocab_size")
        self.width, self.dtype = config.count("hidden_size"), blueprint.dtype
        self.is_first, self.is_last = self.memory.is_first_stage, self.memory.is_last_stage
        tied = config.flag("tie_word_embeddings") or not blueprint.has(self.HEAD)
        drafts = self.memory.end_layer > self.memory.layers
        if self.is_first or (self.is_last and (tied or drafts)):
            self.embedding = base.embedding(self.EMBEDDING)
            self.vocabulary = self.embedding.tokens
        self.layers = dict(zip(self.memory.own_layers, self.build_layers(base), strict=True))
        if self.is_last:
            self.head = self._tied_head() if tied else blueprint.head(self.HEAD)
            self.close(base)

    def _tied_head(self) -> Head:
        linear = Linear(self.arithmetic, self.embedding.held)
        return Head(linear, self.embedding.tokens, self.ranks)

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        """The layers of this stage, from the weights under `BASE`."""
        raise NotImplementedError

    def close(self, base: Blueprint) -> None:
        """Builds what comes after the last layer."""
        self.norm = base.norm(self.FINAL_NORM)

    def forward(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        x = self.through(step, before, captured)
        return self.closed(x) if self.is_last else x

    @torch.no_grad()
    def through(
        self, step: Step, before: Tensor | None = None, captured: CapturedStates | None = None
    ) -> Tensor:
        """The output of the stage's last layer."""
        run = ForwardPass(step)
        x = self.embed(step.tokens) if before is None else before
        for number, layer in self.layers.items():
            if captured is not None:
                captured.enter(number, x)
            step.wait(number)
            x = layer(x, run)
        if captured is not None and self.is_last:
            captured.enter(self.memory.layers, x)
        return x

    def draft_blueprint(self, config: Config, weights: Weights) -> Blueprint:
        """For a draft beside this model: on its device, in its dtype and arithmetic, on its ranks,
        with its memory. On the last stage only."""
        there = OnDevice(weights, self.head.device)
        return Blueprint(config, there, self.memory, self.ops, self.dtype, ranks=self.ranks)

    def carried(self, tokens: Tensor) -> Tensor:
        return torch.empty(len(tokens), self.width, dtype=self.dtype, device=tokens.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    @torch.no_grad()
    def closed(self, x: Tensor) -> Tensor:
        """From the last layer's output to the hidden states that `logits` takes."""
        return self.norm(x)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.gathered(self.shard_logits(hidden))

    def shard_logits(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's tokens."""
        return self.head(hidden)
