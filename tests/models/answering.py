"""Greedy answers of real models: ours over paged state, and those of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from torch import Tensor

from kvtide.models import Model
from tests.models.playing import Player


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """One token at a time over paged state, the prompt in chunks of 16."""
    player = Player(model)
    sequence = player.begin(prompt)
    while sequence.left:
        (logits,) = player.step((sequence, min(16, sequence.left)))
    for _ in range(count - 1):
        sequence.tokens.append(int(logits[-1].argmax()))
        (logits,) = player.step((sequence, 1))
    return [*sequence.tokens[len(prompt) :], int(logits[-1].argmax())]


def greedy_of_transformers(
    config: Mapping[str, object], weights: Mapping[str, Tensor], prompt: list[int], count: int
) -> list[int]:
    """The same weights in `transformers`, with nothing of ours but the reader."""
    (architecture,) = config["architectures"]
    model = getattr(transformers, architecture).from_pretrained(
        None, config=transformers.AutoConfig.for_model(**config), state_dict=dict(weights)
    )
    tokens, past, found = torch.tensor([prompt]), None, []
    with torch.no_grad():
        while len(found) < count:
            out = model(tokens, past_key_values=past, use_cache=True)
            past, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(int(tokens))
    return found
