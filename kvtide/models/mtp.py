"""Multi-token prediction (MTP): a checkpoint's own next-token layer as the draft of its model.

Checkpoints of some families have layers past the last one, trained to predict the token after next
from the model's hidden state and the next token. The draft is the first of them, with the model's
own embedding and head. Where a checkpoint has several, the first is applied again and again, as it
is where there is one: of the others no weight is read and nothing is kept.

The feature of a token is what the head takes there: of the target, its output after the final norm;
of the draft, its output after the layer's own norm. vLLM and SGLang do so for
DeepSeek-V3 and V3.2, GLM, Qwen3-Next and Qwen3.5. DeepSeek-V4 differs: its file says how.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass, Step
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config


class NextTokenDraft:
    """A draft of one layer, numbered after the target's last.

    The next token's embedding and the feature, each normed, go through one projection to the layer.
    The names are those of weights under the draft's own.
    """

    TOKEN_NORM: ClassVar[str] = "enorm"
    FEATURE_NORM: ClassVar[str] = "hnorm"
    PROJECTION: ClassVar[str] = "eh_proj"
    NORM: ClassVar[str] = "shared_head.norm"

    vocabulary: Tensor | None = None

    def __init__(self, target: Decoder, blueprint: Blueprint) -> None:
        self.target, self.memory = target, target.memory
        self.number = self.memory.layers
        self.captures: tuple[int, ...] = (self.number,)
        base = blueprint.under(self.under(blueprint.config))
        self.token_norm = base.norm(self.TOKEN_NORM)
        self.feature_norm = base.norm(self.FEATURE_NORM)
        self.build_projections(base)
        self.layer = self.build_layer(base)
        self.norm = base.norm(self.NORM)

    @classmethod
    def under(cls, config: Config) -> str:
        """What the names of the draft's weights begin with."""
        raise NotImplementedError

    @classmethod
    def first_tensor(cls, config: Config) -> str:
        """A weight of every checkpoint that has the layer."""
        return f"{cls.under(config)}.{cls.TOKEN_NORM}.weight"

    @classmethod
    def remark(cls, config: Config) -> str:
        """What the config asks of drafts and these do otherwise; empty if nothing."""
        return ""

    def build_projections(self, base: Blueprint) -> None:
        """Builds what joins tokens and features."""
        self.project = base.linear(self.PROJECTION)

    def build_layer(self, base: Blueprint) -> Layer:
        raise NotImplementedError

    def features(self, captured: Tensor) -> Tensor:
        return self.target.closed(captured)

    @torch.no_grad()
    def forward(self, step: Step, features: Tensor) -> Tensor:
        both = [self.embed(step.tokens), self.feature_norm(features)]
        x = self.project(torch.cat(both, dim=-1))
        step.wait(self.number)
        return self.norm(self.layer(x, ForwardPass(step)))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.token_norm(self.target.embedding(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)
