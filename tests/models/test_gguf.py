"""GGUF: files written here come back exactly, odd ones are refused, the real one is itself."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.models.gguf import GGUF, quants
from kvtide.models.gguf.tensors import read_tensor
from kvtide.models.model_errors import CheckpointError
from tests.models import gguf_files as files
from tests.models.gguf_files import SCALARS, Number, Raw, f32, random_blocks, scalar_values, write

# -- the container -----------------------------------------------------------------------------


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    numbers = {0: 200, 1: -3, 2: 60_000, 3: -300, 4: 1 << 31, 5: -7, 6: 0.5, 7: True,
               10: 1 << 60, 11: -(1 << 60), 12: 0.1}  # fmt: skip
    metadata = {f"number.{kind}": Number(kind, value) for kind, value in numbers.items()}
    lists = {f"list.{k}": [Number(k, v), Number(k, v)] for k, v in numbers.items()}
    others = {"text": "naïve ▁😀", "texts": ["", "a", "ü"], "flags": [True, False]}
    file = GGUF(write(tmp_path / "m.gguf", {**metadata, **lists, **others}, {}))
    wanted = {f"number.{kind}": value for kind, value in numbers.items()}
    wanted |= {f"list.{kind}": [value, value] for kind, value in numbers.items()}
    assert file.metadata.values == {**wanted, **others}


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_lie_where_the_table_says(tmp_path: Path, version: int) -> None:
    tensors = {f"t{n}": torch.randn(n, 5, 3) for n in range(1, 5)}
    raw = {name: f32(tensor) for name, tensor in tensors.items()}
    file = GGUF(write(tmp_path / "t.gguf", {"a": "b"}, raw, version))
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(file, name), tensor)
        assert file.raw(name).tobytes() == raw[name].data


@pytest.mark.parametrize("name", SCALARS)
def test_stored_numbers_are_read_as_the_format_describes_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 1024)  # Several chunks, the last one short.
    form = SCALARS[name]
    data = random_blocks(form, blocks=22 * 256 // form.elements, seed=form.kind)
    shape = (11, len(data) // form.bytes * form.elements // 11)
    file = GGUF(write(tmp_path / "q.gguf", {}, {"w": Raw(form.kind, shape, data)}))
    assert file.tensors["w"].form.name == name
    read = read_tensor(file, "w")
    assert read.shape == shape
    np.testing.assert_array_equal(read.float().numpy().reshape(-1), scalar_values(form, data))
    for rows in (range(3), range(4, 11), range(10, 11)):
        part = read_tensor(file, "w", rows)
        assert torch.equal(part, read[rows.start : rows.stop])
        assert part.untyped_storage().nbytes() == part.nbytes
        assert len(file.raw("w", rows)) == len(data) // 11 * len(rows)


def test_half_precision_stays_as_it_is(tmp_path: Path) -> None:
    raw = {"h": Raw(files.F16, (2,), b"\0\x3c\0\x40"), "b": Raw(files.BF16, (1,), b"\x80\x3f")}
    file = GGUF(write(tmp_path / "h.gguf", {}, raw))
    assert torch.equal(read_tensor(file, "h"), torch.tensor([1, 2], dtype=torch.float16))
    assert torch.equal(read_tensor(file, "b"), torch.tensor([1], dtype=torch.bfloat16))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    metadata = {"tokens": ["a", "bc"], "n": 5, "scores": [0.5, 1.5]}
    path = write(tmp_path / "whole.gguf", metadata, {"w": f32(torch.ones(8))})
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GGUF(cut)


def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    metadata = {"tokens": ["a", "bc"], "n": 5, "general.alignment": 32}
    path = write(tmp_path / "whole.gguf", metadata, {"w": f32(torch.ones(8, 2))})
    whole, order = path.read_bytes(), random.Random(7)
    for _ in range(600):
        data = bytearray(whole)
        data[order.randrange(len(data) - 64)] = order.choice([0, 1, 9, 127, 255])
        path.write_bytes(data)
        try:
            file = GGUF(path)
            assert all(read_tensor(file, name).numel() >= 0 for name in file.tensors)
        except CheckpointError:
            pass


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"GGML" + struct.pack("<IQQ", 3, 0, 0), "not a GGUF file; pass a .gguf file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; use a little-endian file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "use a little-endian file of version 2 or 3"),
        (b"", "not a GGUF file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, head: bytes, sentence: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(head)
    with pytest.raises(CheckpointError, match=sentence):
        GGUF(path)


def test_a_format_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "q.gguf", {}, {"blk.0.x.weight": Raw(23, (256,), bytes(136))})
    with pytest.raises(CheckpointError, match=r"blk.0.x.weight is stored as IQ4_XS.*use .*Q4_K_M"):
        GGUF(path)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00003.gguf", {"split.count": Number(2, 3)}, {})
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*join them with `llama-gguf-split"):
        GGUF(path)


# -- what llama.cpp changed, undone --------------------------------------------------------------

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def _gguf_name(name: str, gemma: bool) -> str:
    module, kind = name.rsplit(".", 1)
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    norms = {"post_attention_layernorm": "ffn_norm"}
    if gemma:
        norms = {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    return f"blk.{layer}.{(_PARTS | norms)[part]}.{kind}"


def _paired(rows: Tensor, heads: int) -> Tensor:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _changed(name: str, tensor: Tensor, kind: str) -> Tensor:
    if kind == "llama" and ".q_proj." in name:
        return _paired(tensor, 4)
    if kind == "llama" and ".k_proj." in name:
        return _paired(tensor, 2)
    return tensor + 1 if kind == "gemma3" and "norm" in name else tensor


def _metadata(kind: str) -> dict[str, object]:
    settings: dict[str, object] = {
        "block_count": 7, "context_length": 256, "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0, "rope.dimension_count": 16,
    }  # fmt: skip
    if kind == "gemma3":
        settings["attention.sliding_window"] = 16
    tokens = {f"tokenizer.ggml.{role}_token_id": i for i, role in enumerate(("padding", "bos"))}
    named = {f"{kind}.{key}": value for key, value in settings.items()}
    return {"general.architecture": kind, "tokenizer.ggml.eos_token_id": 2, **tokens, **named}


def _converted(path: Path, kind: str, state: dict[str, Tensor], **more: object) -> Path:
    tensors = {
        _gguf_name(name, kind == "gemma3"): f32(_changed(name, tensor, kind))
        for name, tensor in state.items()
    }
    return write(path, {**_metadata(kind), **more}, tensors)


def _model(kind: str, **more: object) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    rope = {"rope_theta": 5000.0, "rms_norm_eps": 1e-5}
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "gemma3": (
            transformers.Gemma3TextConfig,
            transformers.Gemma3ForCausalLM,
            {"sliding_window": 16, "query_pre_attn_scalar": 16},
        ),
    }
    config, model, own = classes[kind]
    built = model(config(**{**_SIZES, **rope, **own, **more})).eval()
    with torch.no_grad():
        for name, weight in built.named_parameters():
            # Multiples of 1/64: adding one to a norm and taking it away again is exact.
            weight.copy_(torch.randint(-16, 17, weight.shape) / 64 + ("norm" in name))
    return built


def _state(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: t for name, t in model.state_dict().items() if name not in tied}


def _rebuilt(checkpoint: Checkpoint, like: transformers.PreTrainedModel) -> Tensor:
    """Logits of a model made of nothing but the checkpoint."""
    model = type(like)(type(like.config)(**checkpoint.config)).eval()
    weights = checkpoint.weights
    state = {name: weights.get(name) for name in weights.names()}
    if checkpoint.config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return _logits(model)


def _logits(model: transformers.PreTrainedModel) -> Tensor:
    tokens = torch.arange(40)[None] % 61
    with torch.no_grad():
        return model(tokens, attention_mask=torch.ones_like(tokens)).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_converted_model_is_the_model(tmp_path: Path, kind: str, tied: bool) -> None:
    model = _model(kind, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(_converted(tmp_path / "m.gguf", kind, _state(model)))
    state = _state(model)
    assert set(checkpoint.weights.names()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.weights.get(name), tensor), name
    assert torch.equal(_rebuilt(checkpoint, model), _logits(model))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rows_are_those_of_the_whole_weight(tmp_path: Path, kind: str) -> None:
    state = _state(_model(kind, tie_word_embeddings=False))
    weights = open_checkpoint(_converted(tmp_path / "m.gguf", kind, state)).weights
    for name, tensor in state.items():
        assert weights.shape(name) == tuple(tensor.shape)
        rows = range(len(tensor) // 3, len(tensor) - 2)
        assert torch.equal(weights.get_rows(name, rows), weights.get(name)[rows.start : rows.stop])


def test_biases_are_paired_like_their_rows(tmp_path: Path) -> None:
    model = _model("llama", attention_bias=True)
    checkpoint = open_checkpoint(_converted(tmp_path / "m.gguf", "llama", _state(model)))
    assert checkpoint.config["attention_bias"] is True
    assert torch.equal(_rebuilt(checkpoint, model), _logits(model))


def test_the_two_rotations_of_gemma3_are_read(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    model = _model("gemma3", rope_scaling=scaling, rope_local_base_freq=700.0)
    more = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 4.0,
            "gemma3.rope.freq_base_swa": 700.0}  # fmt: skip
    checkpoint = open_checkpoint(_converted(tmp_path / "m.gguf", "gemma3", _state(model), **more))
    assert torch.equal(_rebuilt(checkpoint, model), _logits(model))


def test_the_largest_gemma3_scales_queries_by_its_width(tmp_path: Path) -> None:
    """llama.cpp tells the 27B model by its 62 layers, too: its files do not say."""
    metadata = {**_metadata("gemma3"), "gemma3.block_count": 62}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", metadata, _EMBEDDING))
    assert checkpoint.config["query_pre_attn_scalar"] == 32 // 4
    assert checkpoint.config["layer_types"].count("full_attention") == 10


def _llama31_factors(theta: float, dim: int, factor: float) -> list[float]:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's convert_hf_to_gguf.py."""
    found = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * theta ** (i / dim)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_the_rope_scaling_of_llama_3_is_read_out_of_its_factors(tmp_path: Path) -> None:
    factors = torch.tensor(_llama31_factors(5e5, 128, 32.0))
    settings = {"llama.attention.key_length": 128, "llama.rope.dimension_count": 128}
    more = {**_metadata("llama"), **settings, "llama.rope.freq_base": 5e5}
    tensors = {"token_embd.weight": f32(torch.zeros(61, 32)), "rope_freqs.weight": f32(factors)}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", more, tensors))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert not checkpoint.weights.has("rope_freqs.weight")
    tensors["rope_freqs.weight"] = f32(factors * torch.linspace(1, 1.01, 64))
    with pytest.raises(CheckpointError, match=r"not Llama 3.1's; use the model's safetensors"):
        open_checkpoint(write(tmp_path / "odd.gguf", more, tensors))


_EMBEDDING = {"token_embd.weight": f32(torch.zeros(61, 32))}


@pytest.mark.parametrize(
    ("more", "tensors", "sentence"),
    [
        ({"general.architecture": "rwkv7"}, {}, "architecture rwkv7 is not read.*safetensors"),
        ({}, {"blk.0.ffn_gate_exps.weight": f32(torch.zeros(2))}, "ffn_gate_exps.weight has no pl"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "RoPE is scaled by yarn.*safetensors folder"),
        ({"llama.rope.dimension_count": 4}, {}, "RoPE turns 4 of the 16 dimensions.*safetensors"),
        ({"llama.block_count": "seven"}, {}, "`llama.block_count` is 'seven'; it should be a who"),
        ({"llama.block_count": True}, {}, "`llama.block_count` is True; it should be a whole"),
    ],
)
def test_what_a_row_does_not_know_is_refused(
    tmp_path: Path, more: dict[str, object], tensors: dict[str, Raw], sentence: str
) -> None:
    metadata = {**_metadata("llama"), **more}
    path = write(tmp_path / "m.gguf", metadata, {**_EMBEDDING, **tensors})
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(path)


def test_a_missing_setting_or_embedding_is_refused(tmp_path: Path) -> None:
    metadata = _metadata("llama")
    with pytest.raises(CheckpointError, match=r"no tensor token_embd.weight; use a whole model"):
        open_checkpoint(write(tmp_path / "a.gguf", metadata, {}))
    del metadata["llama.block_count"]
    with pytest.raises(CheckpointError, match=r"no `llama.block_count`; convert the model again"):
        open_checkpoint(write(tmp_path / "b.gguf", metadata, _EMBEDDING))


# -- the default model ---------------------------------------------------------------------------


def test_smollm2_is_a_llama_of_135m_weights(smollm2: Checkpoint) -> None:
    assert smollm2.config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152,
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
        "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**smollm2.config))
    wanted = {name: tuple(t.shape) for name, t in _state(model).items()}
    assert smollm2.gguf is not None
    shapes = {name: smollm2.gguf.tensors[_gguf_name(name, False)].shape for name in wanted}
    assert shapes == wanted
    assert set(smollm2.weights.names()) == set(wanted)
    assert sum(t.numel() for t in model.parameters()) == 134_515_008
