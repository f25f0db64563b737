"""A draft's shape follows its target's, and fits into the size that is asked for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvtide.models.eagle3 import captured_layers
from kvtide.spec.config import Config
from kvtide.training.draft_shape import HeadFormat, ShapeRequest, draft_shape
from kvtide.training.prompts import TrainingError
from tests.models.tiny import checkpoint

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
}
LIMIT = 12_000_000


def test_a_draft_of_4096_tokens_for_smollm2_fits_into_12_mb() -> None:
    shape = draft_shape(SMOLLM2, ShapeRequest(max_bytes=LIMIT))
    assert shape.bytes <= LIMIT < shape.bytes + 2 * 3 * 576 * 32
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (9, 3, 64)
    assert shape.captures == (2, 15, 27)
    assert shape.intermediate == 672
    assert draft_shape(SMOLLM2, ShapeRequest()).intermediate == 1536


def test_in_fp8_a_draft_of_8192_tokens_is_as_wide_and_fits_into_12_mb() -> None:
    asked = ShapeRequest(8192, max_bytes=LIMIT, lm_head=HeadFormat.FP8)
    shape = draft_shape(SMOLLM2, asked)
    assert (shape.predicted, shape.intermediate) == (8192, 672)
    assert shape.bytes <= LIMIT < shape.bytes + 2 * 3 * 576 * 32
    with pytest.raises(TrainingError, match="a draft of 8,192 tokens takes"):
        draft_shape(SMOLLM2, replace(asked, lm_head=HeadFormat.BF16))


def test_the_config_names_captured_layers_as_published_ones_do() -> None:
    shape = draft_shape(SMOLLM2, ShapeRequest(captures=(0, 15, 30)))
    config = Config("draft", shape.config())
    assert captured_layers(config, 30) == (0, 15, 30)
    assert config.nested("eagle_config").listing("eagle_aux_hidden_state_layer_ids") == [-1, 14, 29]


@pytest.mark.parametrize(("layers", "captures"), [(1, (0, 1)), (2, (1,)), (4, (1, 2, 3))])
def test_small_models_have_layers_to_capture(layers: int, captures: tuple[int, ...]) -> None:
    shape = draft_shape({**SMOLLM2, "num_hidden_layers": layers}, ShapeRequest())
    assert shape.captures == captures


def test_scaled_rotation_is_the_target_s() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    shape = draft_shape({**SMOLLM2, "rope_scaling": scaling}, ShapeRequest())
    assert shape.config()["rope_scaling"] == scaling
    assert shape.config()["rope_theta"] == 100_000.0


def test_a_target_with_latents_gets_heads_of_the_draft_s_own() -> None:
    shape = draft_shape(checkpoint("deepseek_v3").config, ShapeRequest(vocabulary=64))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (1, 1, 64)


@pytest.mark.parametrize(
    ("config", "asked", "sentence"),
    [
        ({"hc_mult": 4}, ShapeRequest(), "llama has 4 hidden states of a token, and an EAGLE3"),
        ({}, ShapeRequest(captures=(2, 31)), "layer 31 cannot be captured: the model has 30"),
        ({}, ShapeRequest(max_bytes=9_000_000), "takes .* bytes, and 9,000,000 were asked for"),
        (
            {},
            ShapeRequest(intermediate=1536, max_bytes=LIMIT),
            "takes 14,9.* bytes, and 12,000,000 were asked for; use a smaller --draft-vocab",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: dict, asked: ShapeRequest, sentence: str) -> None:
    with pytest.raises(TrainingError) as refused:
        draft_shape({**SMOLLM2, **config}, asked)
    assert re.search(sentence, str(refused.value)), refused.value
