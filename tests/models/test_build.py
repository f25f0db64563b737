"""Building a model: published spellings of a config, and sentences for what cannot be built."""

from __future__ import annotations

import json

import pytest
import torch

from kvtide.models import FAMILIES, build
from kvtide.spec import SpecError
from kvtide.spec.families import KVDType, supported
from tests.models.playing import Player
from tests.models.tiny import CONFIGS, StateDict, expected, oracle, prompt


def published(name: str, **changes: object) -> dict[str, object]:
    return {**json.loads(oracle(name).config.to_json_string()), **changes}


def test_every_family_with_a_forward_pass_declares_its_memory() -> None:
    assert set(FAMILIES) <= set(supported())
    built = {oracle(name).config.model_type for name in CONFIGS}
    assert built == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type 'gpt2' has no forward pass here; use one of"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu' is not known here; use gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not one that cached keys can use; use default, linear",
        ),
        ("llama", {"rms_norm_eps": "small"}, "`rms_norm_eps` is 'small'; use a number"),
        ("gemma3", {"use_bidirectional_attention": True}, "has no cache; unset it"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "use a list of 2 numbers"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(
    name: str, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        build(published(name, **changes), StateDict(oracle(name).state_dict()), page_tokens=16)


@pytest.mark.parametrize(
    ("name", "gone", "instead"),
    [
        (
            "llama-biases-llama3-rope",
            ["rope_parameters"],
            {
                "rope_theta": 10_000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        (
            "gemma3-scaled-rope",
            ["rope_parameters"],
            {
                "rope_theta": 30_000.0,
                "rope_local_base_freq": 500.0,
                "rope_scaling": {"type": "linear", "factor": 8.0},
            },
        ),
        ("gemma3", ["rope_parameters", "layer_types"], {}),
        ("gpt_oss", ["rope_parameters", "layer_types"], {}),
    ],
)
def test_configs_as_labs_publish_them_give_the_same_model(
    name: str, gone: list[str], instead: dict[str, object]
) -> None:
    config = {key: value for key, value in published(name).items() if key not in gone}
    weights = StateDict(oracle(name).state_dict())
    model = build({**config, **instead}, weights, kv_dtype=KVDType.FP32)
    logits = Player(model).prefill(prompt(40), 40)
    torch.testing.assert_close(logits, expected(name, 40), rtol=0, atol=2e-5)


def test_a_tied_head_needs_no_weights_of_its_own() -> None:
    weights = {
        name: weight
        for name, weight in oracle("gemma3").state_dict().items()
        if name != "lm_head.weight"
    }
    model = build(published("gemma3"), StateDict(weights))
    assert model.vocabulary == len(weights["model.embed_tokens.weight"])
    assert model.logits(torch.zeros(1, 96)).shape == (1, model.vocabulary)
