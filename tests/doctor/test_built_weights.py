"""Bytes of weights as a doctor counts them are those of a model that was really built."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from kvtide.doctor import built_weights
from kvtide.doctor.built_weights import held_bytes, weight_bytes
from kvtide.doctor.model_facts import model_facts
from kvtide.layers import choose
from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.ops import Ops
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.models import build
from kvtide.models.checkpoint import Checkpoint, OnDevice, open_checkpoint
from kvtide.models.default_model import default_model
from kvtide.server.settings import MTP, Settings
from kvtide.server.setup.speculation_setup import build_draft, choose_speculation
from tests.models.gguf_files import Raw, f32, write
from tests.models.tiny import CONFIGS, oracle

CPU = torch.device("cpu")
FP32 = torch.float32
BF16_ROWS, Q8_0, F32 = 30, 8, 0


def kept(dtype: torch.dtype) -> int:
    """Bytes of a number of a matrix of this dtype: packed, where this machine has kernels."""
    packs = bool(choose(False, CPU).arithmetic.packed_forms)
    return dtype.itemsize if packs else 4


def really(checkpoint: Checkpoint, ops: Ops | None = None) -> int:
    """Of a model that is built as a server does it, with its draft."""
    choice = choose_speculation(Settings(), checkpoint)
    model = build(
        checkpoint.config,
        OnDevice(checkpoint.weights, CPU),
        mtp=choice.method == MTP,
        draft=choice.draft,
        ops=ops,
    )
    return held_bytes(CPU, model, build_draft(choice, checkpoint, model))


def saved(name: str, dtype: torch.dtype, folder: Path) -> Checkpoint:
    copy.deepcopy(oracle(name)).to(dtype).save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.mark.quick(name=["llama-yarn-rope", "gemma3", "deepseek_v32", "falcon_h1", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS])
def test_every_familys_weights_are_counted_as_its_layers_keep_them(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = saved(name, dtype, tmp_path)
    assert weight_bytes(checkpoint, CPU, FP32) == really(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
def test_matrices_in_16_bits_count_two_bytes_and_norms_four(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = saved("qwen3", dtype, tmp_path)
    weights = checkpoint.weights
    shapes = [weights.shape(name) for name in weights.names()]
    matrices = sum(rows * inputs for rows, inputs in (s for s in shapes if len(s) == 2))
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    expected = matrices * kept(dtype) + 4 * vectors
    rotations = 4 * 16  # At most a few frequencies, which are no weights.
    assert expected <= weight_bytes(checkpoint, CPU, FP32) <= expected + rotations


def mixed(path: Path) -> Path:
    """A Llama of one layer with blocks of eight bits, 16 bits and fp32. Keys are in another form
    than queries and values, with which they are joined; gates and ups are in one form."""
    hidden, inner, tokens = 64, 96, 40
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        **{
            f"llama.{name}": value
            for name, value in {
                "block_count": 1, "context_length": 256, "embedding_length": hidden,
                "feed_forward_length": inner, "attention.head_count": 4,
                "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5,
                "vocab_size": tokens,
            }.items()
        },
    }  # fmt: skip

    def blocks(rows: int, inputs: int) -> Raw:
        return Raw(Q8_0, (rows, inputs), bytes(rows * inputs // 32 * 34))

    def halves(rows: int, inputs: int) -> Raw:
        return Raw(BF16_ROWS, (rows, inputs), bytes(2 * rows * inputs))

    layer = {
        "attn_q": blocks(hidden, hidden),
        "attn_k": f32(torch.zeros(hidden, hidden)),
        "attn_v": blocks(hidden, hidden),
        "attn_output": halves(hidden, hidden),
        "ffn_gate": blocks(inner, hidden),
        "ffn_up": blocks(inner, hidden),
        "ffn_down": blocks(hidden, inner),
        "attn_norm": f32(torch.ones(hidden)),
        "ffn_norm": f32(torch.ones(hidden)),
    }
    tensors = {
        "token_embd.weight": halves(tokens, hidden),
        "output_norm.weight": f32(torch.ones(hidden)),
        **{f"blk.0.{name}.weight": raw for name, raw in layer.items()},
    }
    return write(path, metadata, tensors)


def test_blocks_of_a_gguf_file_count_as_they_are_and_unpacked_where_they_are_joined_with_others(
    tmp_path: Path,
) -> None:
    checkpoint = open_checkpoint(mixed(tmp_path / "mixed.gguf"))
    counted = weight_bytes(checkpoint, CPU, FP32)
    assert counted == really(checkpoint)
    if kept(torch.bfloat16) == 2:
        joined = 3 * 64 * 64 * 4
        halves = 2 * (64 * 64 + 40 * 64)
        blocks = (2 * 96 * 64 + 64 * 96) // 32 * 34
        assert 0 <= counted - (joined + halves + blocks + 3 * 64 * 4) <= 4 * 16


def test_where_torch_computes_alone_weights_count_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = TorchOps(Batched())
    monkeypatch.setattr(built_weights, "choose", lambda deterministic, device: alone)
    checkpoint = saved("qwen3", torch.bfloat16, tmp_path)
    counted = weight_bytes(checkpoint, CPU, FP32)
    assert counted == really(checkpoint, alone)
    params = sum(param.numel() for param in oracle("qwen3").parameters())
    assert 0 <= counted - 4 * params <= 4 * 16


def test_the_default_models_blocks_and_draft_take_a_fifth_of_fp32() -> None:
    """SmolLM2-135M in Q4_1: 98 MB of file, 538 MB of numbers."""
    checkpoint = open_checkpoint(default_model())
    facts = model_facts(str(default_model()), on_gpu=False)
    assert facts.weights_bytes == weight_bytes(checkpoint, CPU, FP32) == really(checkpoint)
    assert facts.active_params is not None
    if kept(torch.bfloat16) == 2:
        assert facts.weights_bytes < 1.3 * checkpoint.path.stat().st_size
        assert facts.weights_bytes < facts.active_params


def test_a_checkpoints_layer_for_multi_token_prediction_counts(tmp_path: Path) -> None:
    from tests.server.test_speculation import save_mtp

    checkpoint = open_checkpoint(save_mtp("deepseek_v3-mtp", tmp_path / "model"))
    counted = weight_bytes(checkpoint, CPU, FP32)
    assert counted == really(checkpoint)
    plain = held_bytes(CPU, build(checkpoint.config, OnDevice(checkpoint.weights, CPU)))
    assert counted > 1.2 * plain


def test_no_weight_is_read_or_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved("llama-yarn-rope", torch.bfloat16, tmp_path)

    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    for name in ("get", "get_rows", "packed", "stored"):
        monkeypatch.setattr(type(checkpoint.weights), name, read)
    assert weight_bytes(checkpoint, CPU, FP32) > 0


def test_weights_beside_a_gpu_count_in_the_models_dtype(tmp_path: Path) -> None:
    checkpoint = saved("qwen3", FP32, tmp_path)
    params = sum(param.numel() for param in oracle("qwen3").parameters())
    counted = weight_bytes(checkpoint, torch.device("cuda"), torch.bfloat16)
    assert 2 * params <= counted < 2.1 * params
