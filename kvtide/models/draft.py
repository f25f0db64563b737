"""The interface of draft models to the engine, and the hidden states of a target that they take.

A draft proposes the next tokens of a sequence from its target's hidden states. Its layers are
numbered after the target's and keep their KV in the optional pools of the target's memory
(`spec.with_draft`).

A row of a draft's pass stands at position t: its token is the one at t + 1, its feature is what the
target computed at t, or what the draft itself did where the target has not been there. It predicts
the token at t + 2.

A draft and its target share one memory, so they are built in three steps: the draft is opened
(`draft_checkpoint.open_draft`), the target is built with it (`build(..., draft=...)`), then the
draft itself is built beside the target, with whose embedding it may work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvtide.layers import Step
from kvtide.spec import ModelMemory
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType


class CapturedStates:
    """Hidden states of every token of a step that enter some of the target's layers.

    layers  numbers of layers; the target's number of layers stands for its last layer's output

    States are not copied: no layer writes over its input.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}

    def enter(self, layer: int, x: Tensor) -> None:
        """The forward pass is about to run a layer on `x`."""
        if layer in self.layers:
            self._states[layer] = x

    @property
    def states(self) -> dict[int, Tensor]:
        """What entered so far, by layer in ascending order."""
        return {layer: self._states[layer] for layer in sorted(self._states)}

    @property
    def joined(self) -> Tensor:
        """(tokens, …, layers · width): of every token, the states side by side."""
        return torch.cat([self._states[layer] for layer in self.layers], dim=-1)


class DraftSource(Protocol):
    """A draft that is opened and not built."""

    def declare(self, target: Config, memory: ModelMemory, kv_dtype: KVDType | None) -> ModelMemory:
        """What the draft keeps, for `with_draft`; `memory` is the target's alone.

        Refuses a target that it does not fit, before the target's weights are read.
        """


class DraftModel(Protocol):
    """A forward pass over a draft's own paged state.

    memory      the target's memory with the draft's pools
    captures    the layers of the target whose inputs it takes, as of `CapturedStates`
    vocabulary  the target's token of each of the draft's; None where they are the same
    """

    memory: ModelMemory
    captures: tuple[int, ...]
    vocabulary: Tensor | None

    def features(self, captured: Tensor) -> Tensor:
        """The features of tokens that the target has computed, from `CapturedStates.joined`."""

    def forward(self, step: Step, features: Tensor) -> Tensor:
        """Hidden states, a row for every token of the step: the features of a next pass."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of these rows in fp32, over the draft's vocabulary. Tensor ranks call this
        together, and get the same bits."""
