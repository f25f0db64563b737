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


@pytest.mark.parametrize(
    "name",
    [
        "falcon_h1",
        "falcon_h1-groups-norm",
        "granitemoehybrid",
        "nemotron_h",
        "qwen3_next",
        "qwen3_5-one-head-each",
        "lfm2",
        "kimi_linear",
    ],
)
def test_a_recurrent_layer_keeps_its_state_and_the_convolutions_last_inputs(name: str) -> None:
    player = Player(ours(name))
    sequence = player.begin(prompt(TOKENS))
    player.step((sequence, TOKENS - 3))
    player.step((sequence, 3))
    caches = kept_by_oracle(name)
    for layer in player.memory.pool("state").layers:
        cache, kept = caches[layer], player.held(sequence, "state", layer)
        held = {field: value[-1] for field, value in kept.items()}
        inputs = torch.cat([value for field, value in held.items() if field.startswith("conv")])
        assert_close(inputs, cache.conv_states[0][0, :, -inputs.shape[1] :])
        for state in (value for field, value in held.items() if field in ("ssm", "delta")):
            assert_close(state, cache.recurrent_states[0][0])


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3-yarn-halves", "deepseek_v32"])
def test_latents_are_kept_after_their_norm_and_shared_keys_after_rotation(name: str) -> None:
    player = Player(ours(name))
    sequence = player.begin(prompt(TOKENS))
    player.step((sequence, 37))
    player.step((sequence, TOKENS - 37))
    for layer, cache in enumerate(kept_by_oracle(name)):
        held = player.held(sequence, "kv", layer)
        assert_close(held["latent"], cache.keys[0, 0])
        theirs = cache.values[0, 0]
        if name == "deepseek_v32":
            # The oracle takes pairs of neighbours apart when it turns them.
            theirs = theirs.unflatten(-1, (2, -1)).mT.flatten(-2)
            assert_close(player.held(sequence, "index", layer)["index_key"], cache.indexer_keys[0])
        assert_close(held["rope"], theirs)
