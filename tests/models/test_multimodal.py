"""Multimodal checkpoints: their language model, read from where it lies among the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvtide.models import build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.model_errors import CheckpointError
from kvtide.spec import SpecError
from kvtide.spec.families import KVDType
from tests.models.playing import Player
from tests.models.tiny import Tensors, config_of, prompt

TOKENS = 60
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
WRAPPERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gemma3": (
        "gemma3",
        "siglip_vision_model",
        {"mm_tokens_per_image": 4, "boi_token_index": 1, "eoi_token_index": 2},
    ),
    "mistral3": ("mistral", "pixtral", {"tie_word_embeddings": False}),
}


@functools.cache
def wrapper(name: str) -> Any:
    """A tiny one, whose language model is the tiny model of that family."""
    text, vision, more = WRAPPERS[name]
    config = transformers.AutoConfig.for_model(
        name,
        text_config=json.loads(config_of(text).to_json_string()),
        vision_config={**VISION, "model_type": vision},
        image_token_index=1,
        **more,
    )
    torch.manual_seed(3)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


def assert_same_logits(name: str, config: Any, weights: Any) -> None:
    model = build(config, weights, page_tokens=16, kv_dtype=KVDType.FP32)
    with torch.no_grad():
        wanted = wrapper(name)(torch.tensor([prompt(TOKENS)]), use_cache=False).logits[0]
    logits = Player(model).prefill(prompt(TOKENS), 17)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


def _begins(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_saved_wrapper_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    wrapper(name).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["model_type"] == name
    assert _begins(checkpoint.weights.names(), "language_model.model.layers.")
    assert _begins(checkpoint.weights.names(), "vision_tower.")
    assert_same_logits(name, checkpoint.config, checkpoint.weights)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_newer_names_are_read_too(name: str) -> None:
    weights = wrapper(name).state_dict()
    assert _begins(weights, "model.language_model.layers.")
    config = json.loads(wrapper(name).config.to_json_string())
    assert_same_logits(name, config, Tensors(weights))


def test_qwen3_5_is_read_from_the_names_it_is_published_with(tmp_path: Path) -> None:
    sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 96, "patch_size": 14}  # fmt: skip
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    unused = dict.fromkeys(ids, 2)  # Which prompts here have not.
    text = json.loads(config_of("qwen3_5").to_json_string())
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=sees, **unused
    )
    torch.manual_seed(3)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert _begins(checkpoint.weights.names(), "model.language_model.layers.")
    model = build(checkpoint.config, checkpoint.weights, page_tokens=16, kv_dtype=KVDType.FP32)
    with torch.no_grad():
        wanted = whole(torch.tensor([prompt(TOKENS)]), use_cache=False).logits[0]
    logits = Player(model).prefill(prompt(TOKENS), 17)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


def test_what_is_not_there_is_named_as_it_would_be_stored(tmp_path: Path) -> None:
    wrapper("gemma3").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    text: Any = checkpoint.config["text_config"]
    layers = {"num_hidden_layers": 8, "layer_types": ["sliding_attention"] * 8}
    config = {**checkpoint.config, "text_config": {**text, **layers}}
    with pytest.raises(CheckpointError, match=r"no tensor language_model.model.layers.7.self_attn"):
        build(config, checkpoint.weights)


def test_a_wrapper_of_another_language_model_is_refused_by_that_models_type() -> None:
    config = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}
    with pytest.raises(SpecError, match="mllama: model_type 'mllama_text_model' has no forward"):
        build(config, Tensors({}))
