"""A model is a built-in name, a folder with a config.json, or that file."""

import json

import pytest

from kvtide.spec import SpecError, catalog

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# History bytes per token from the public configs, worked out by hand.
KNOWN = {
    "deepseek-v3.2": 61 * (576 + 128) * 2,
    "deepseek-v4-flash": 998_208 / 256,
    "deepseek-v4-pro": 1_430_208 / 256,
    "falcon-h1-34b": 72 * 2 * 4 * 128 * 2,
    "gemma-3-27b": 10 * 2 * 16 * 128 * 2,
    "glm-5": 78 * (576 + 128) * 2,
    "gpt-oss-120b": 18 * 2 * 8 * 64 * 2,
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2,
    "nemotron-h-47b": 5 * 2 * 8 * 128 * 2,
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,
    "qwen3-next-80b": 12 * 2 * 2 * 256 * 2,
}

# One checkpoint: convolution inputs in bf16, recurrent state in fp32, on every recurrent layer.
CHECKPOINTS = {
    "falcon-h1-34b": 72 * ((4096 + 2 * 2 * 256) * 3 * 2 + 32 * 128 * 256 * 4),
    "nemotron-h-47b": 45 * ((16384 + 2 * 8 * 256) * 3 * 2 + 256 * 64 * 256 * 4),
    "qwen3-next-80b": 36 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4),
}


def test_the_names_are_these():
    assert catalog.names() == sorted(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_built_in_model_has_its_published_size(name):
    memory = catalog.resolve(name)
    assert memory.model == name
    assert memory.history_bytes_per_token() == KNOWN[name]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_built_in_hybrid_has_its_published_state(name):
    assert catalog.resolve(name).slot_bytes("state") == CHECKPOINTS[name]


@pytest.mark.parametrize(
    ("name", "reach", "layers"), [("gpt-oss-120b", 127, 18), ("gemma-3-27b", 1023, 52)]
)
def test_a_built_in_windowed_model_has_its_published_window(name, reach, layers):
    window = catalog.resolve(name).pool("swa")
    assert window.reuse.reach == reach
    assert len(window.layers) == layers


@pytest.mark.parametrize("name", KNOWN)
def test_every_built_in_model_knows_its_active_parameters(name):
    assert 3e9 <= catalog.active_params(name) <= 49e9


def test_page_size_and_dtype_can_be_chosen():
    memory = catalog.resolve("llama-3.1-8b", page_tokens=16, kv_dtype="fp8")
    assert memory.page_tokens == 16
    assert memory.history_bytes_per_token() == KNOWN["llama-3.1-8b"] / 2


def test_a_folder_or_its_config_may_be_named(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    by_folder = catalog.resolve(str(folder))
    assert by_folder.model == "my-model"
    assert catalog.resolve(str(folder / "config.json")) == by_folder
    assert catalog.active_params(str(folder)) is None


def test_an_unknown_name_is_refused_with_the_names():
    with pytest.raises(SpecError, match="'gpt-9' is neither a built-in model nor") as refusal:
        catalog.resolve("gpt-9")
    assert ", ".join(catalog.names()) in str(refusal.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"the folder has no config\.json; put the model's there"):
        catalog.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{not json", "not readable as JSON"), ("[1, 2]", "holds a list; a config is a JSON object")],
)
def test_a_config_that_is_no_config_is_refused(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=sentence):
        catalog.resolve(str(tmp_path))
