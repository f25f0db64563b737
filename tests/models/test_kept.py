"""What pages hold after a prompt is what `transformers` keeps in its cache, in the same form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.playing import Player
from tests.models.tiny import oracle, ours, prompt

TOKENS = 80


def kept_by_oracle(name: str) -> list[Any]:
    with torch.no_grad():
        return oracle(name)(torch.tensor([prompt(TOKENS)]), use_cache=True).past_key_values.layers


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama-yarn-rope", "qwen3", "gemma3", "gpt_oss", "falcon_h1"])
def test_keys_are_kept_after_rotation_and_values_as_they_are(name: str) -> None:
    player = Player(ours(name))
    sequence = player.begin(prompt(TOKENS))
    player.step((sequence, 37))
    player.step((sequence, TOKENS - 37))
    for layer, cache in enumerate(kept_by_oracle(name)):
        pool = next(p for p in player.memory.pools
                    if layer in p.layers and p.entry.fields[0].name == "k")  # fmt: skip
        held = player.held(sequence, pool.name, layer)
        # A window's first pages are gone, and so are the oracle's.
        reach = pool.reuse.reach if isinstance(pool.reuse.reach, int) else TOKENS
        for field, theirs in (("k", cache.keys), ("v", cache.values)):
            assert_close(held[field][TOKENS - reach : TOKENS], theirs[0].transpose(0, 1)[-reach:])


@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1-groups-norm"])
def test_a_recurrent_layer_keeps_its_state_and_the_convolutions_last_inputs(name: str) -> None:
    player = Player(ours(name))
    sequence = player.begin(prompt(TOKENS))
    player.step((sequence, TOKENS - 3))
    player.step((sequence, 3))
    for layer, cache in enumerate(kept_by_oracle(name)):
        held = {field: value[-1] for field, value in player.held(sequence, "state", layer).items()}
        inputs = torch.cat([held["conv_x"], held["conv_b"], held["conv_c"]])
        assert_close(inputs, cache.conv_states[0][0, :, -inputs.shape[1] :])
        assert_close(held["ssm"], cache.recurrent_states[0][0])
