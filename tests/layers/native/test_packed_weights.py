"""Weights that stay packed: the kernels' numbers are the format's, and a GEMM is that of them.

The second reading of the format (`tests/models/gguf_files`) shares no code with the kernels.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend import choice
from kvtide.layers.backend.packed_weight import PackedRows, PackedWeight, joined
from kvtide.layers.dense import Embedding
from kvtide.layers.native.c_functions import FORMS
from kvtide.layers.native.native_arithmetic import NativeArithmetic
from kvtide.layers.native.native_ops import NativeOps
from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.models import build, fp8
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.default_model import shipped_draft
from kvtide.models.draft_checkpoint import open_draft
from kvtide.models.model import Decoder
from kvtide.models.outlined_weights import OutlinedWeights
from kvtide.spec.families import KVDType
from tests.layers.native.test_native_ops import native
from tests.models.conftest import smollm2
from tests.models.gguf_files import SCALARS, random_blocks, scalar_values
from tests.models.playing import Player
from tests.models.test_logits import ONE_PER_FAMILY, TOLERANCE
from tests.models.test_published import FP8, eight_bits, exponents, scales_in_fp32, write
from tests.models.tiny import Tensors, checkpoint, prompt

__all__ = ["native", "smollm2"]

HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
QUANTISED = [name for name in SCALARS if name not in HALVES]


def packed(form: str, rows: int, inputs: int, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """A random weight, and its numbers by the other reading."""
    if form in HALVES:
        values = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
        given = values.to(HALVES[form])
        weight = PackedWeight.of_halves(given)
        assert weight is not None
        return weight, given.float()
    if form == fp8.FORM:
        scales = torch.rand(-(-rows // 128), -(-inputs // 128)) + 0.1
        codes, numbers = eight_bits(rows, inputs, scales, seed)
        data = fp8.packed(codes, scales, fp8.BLOCK)
        return PackedWeight(inputs, (PackedRows(form, data),)), numbers
    scalar = SCALARS[form]
    data = random_blocks(scalar, rows * inputs // scalar.elements, seed)
    numbers = torch.from_numpy(scalar_values(scalar, data).copy()).view(rows, inputs)
    raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(rows, -1)
    return PackedWeight(inputs, (PackedRows(form, raw),)), numbers


def assert_close(found: Tensor, wanted: Tensor) -> None:
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6 * largest)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_the_format(form: str, native: NativeOps) -> None:
    weight, numbers = packed(form, 9, 512)
    assert torch.equal(native.arithmetic.unpacked(weight), numbers)
    some = torch.tensor([5, 8, 5, 0])
    assert torch.equal(native.arithmetic.unpacked(weight.take(some)), numbers[some])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_gemm_is_that_of_the_numbers(form: str, bias: bool, native: NativeOps) -> None:
    """Of few rows in registers, of more in panels, whose last one has fewer rows and outputs."""
    outputs, inputs, arithmetic = 131, 768, native.arithmetic
    weight, numbers = packed(form, outputs, inputs)
    added = torch.randn(outputs) if bias else None
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 43, 96):
        x = torch.randn(rows, inputs)
        wanted = functional.linear(x, numbers, added)
        assert_close(arithmetic.packed_linear(x, weight, added), wanted)


@pytest.mark.parametrize("threads", [1, 3])
def test_wide_weights_are_multiplied_part_by_part(threads: int, native: NativeOps) -> None:
    """Also where many rows, or few outputs for all threads, divide the rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows, inputs in ((33, 4608), (210, 2304), (600, 256)):
            weight, numbers = packed("Q4_K", 50, inputs)
            x, bias = torch.randn(rows, inputs), torch.randn(50)
            wanted = functional.linear(x, numbers, bias)
            for found in (
                native.arithmetic.packed_linear(x, weight, bias),
                native.arithmetic.linear(x, numbers, bias),
            ):
                assert_close(found, wanted)
    finally:
        torch.set_num_threads(before)


def test_rows_of_several_forms_stand_beside_each_other(native: NativeOps) -> None:
    parts = [packed(form, rows, 512, rows) for form, rows in (("Q4_K", 5), ("Q6_K", 11))]
    again = packed("Q6_K", 9, 512)
    weight = joined([weight for weight, _ in (*parts, again)])
    numbers = torch.cat([numbers for _, numbers in (*parts, again)])
    assert [run.count for run in weight.runs] == [5, 20]
    arithmetic, bias = native.arithmetic, torch.randn(25)
    for rows in (3, 72):
        x = torch.randn(2 * rows, 512)[::2]
        found, wanted = (
            arithmetic.packed_linear(x, weight, bias),
            arithmetic.linear(x, numbers, bias),
        )
        assert_close(found, wanted)


def test_tokens_of_several_sequences_are_embedded_together(native: NativeOps) -> None:
    weight, numbers = packed("Q4_1", 9, 512)
    tokens = torch.tensor([[5, 8, 5], [0, 1, 3]])
    packed_rows, rows = (
        Embedding(native.arithmetic, held, 9)(tokens) for held in (weight, numbers)
    )
    assert packed_rows.shape == (2, 3, 512)
    assert torch.equal(packed_rows, rows)


@pytest.mark.parametrize("powers", [False, True])
def test_published_weights_in_eight_bits_stay_packed(
    tmp_path: Path, powers: bool, native: NativeOps
) -> None:
    """300 × 160: in blocks of 128 × 128, with smaller ones at both edges."""
    scales = exponents(3, 2).view(torch.float8_e8m0fnu) if powers else scales_in_fp32(3, 2)
    codes, numbers = eight_bits(300, 160, scales)
    weights = write(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales}, FP8).weights
    outlined = OutlinedWeights(weights).packed("a.weight")
    found = weights.packed("a.weight")
    assert found is not None and outlined is not None and found.is_of(FORMS)
    assert torch.equal(native.arithmetic.unpacked(found), numbers)
    (run,), (outline,) = found.runs, outlined.runs
    assert (run.form, run.data.shape) == (outline.form, outline.data.shape)
    assert run.data.nbytes == 300 * 160 * 36 // 32


@pytest.mark.parametrize(("columns", "block"), [(150, 128), (160, 48)])
def test_rows_or_blocks_that_are_no_whole_runs_are_read_as_numbers(
    tmp_path: Path, columns: int, block: int
) -> None:
    blocks = -(-columns // block)
    tensors = {
        "a.weight": torch.ones(8, columns).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(1, blocks),
    }
    method = {**FP8, "weight_block_size": [128, block]}
    weights = write(tmp_path, tensors, method).weights
    assert weights.packed("a.weight") is None
    assert OutlinedWeights(weights).packed("a.weight") is None
    assert weights.get("a.weight").shape == (8, columns)


# -- models --------------------------------------------------------------------------------------


def in_16_bits(name: str) -> Tensors:
    weights = checkpoint(name).weights
    tensors = {each: weights.get(each) for each in weights.names()}
    return Tensors({k: t.bfloat16() if t.is_floating_point() else t for k, t in tensors.items()})


@pytest.mark.quick(name=["llama", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_models_with_packed_weights_compute_what_others_do(name: str, native: NativeOps) -> None:
    """Prompts of many rows, a few and one; every projection of every family."""
    config, weights = checkpoint(name).config, in_16_bits(name)
    model = build(config, weights, page_tokens=16, kv_dtype=KVDType.FP32)
    with mock.patch.object(NativeArithmetic, "packed_forms", ()):
        dense = build(config, weights, page_tokens=16, kv_dtype=KVDType.FP32)
    for chunks in ((90,), (20, 5, 1)):
        found, wanted = (Player(each).prefill(prompt(90), *chunks) for each in (model, dense))
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def held(model: Decoder) -> list[bool]:
    """Whether the weights of a Llama are packed: of its vocabulary and of its first layer."""
    (layer,) = (layer for number, layer in model.layers.items() if number == 0)
    linears = [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    weights = [model.embedding.held, model.head.linear.held, *(each.held for each in linears)]
    return [isinstance(each, PackedWeight) for each in weights]


def test_what_cannot_multiply_packed_weights_has_their_numbers(native: NativeOps) -> None:
    config, weights = checkpoint("llama").config, in_16_bits("llama")
    assert all(held(build(config, weights)))
    with mock.patch.object(choice, "library", return_value=None):
        without_compiler = build(config, weights)
    others = [
        without_compiler,
        build(config, weights, deterministic=True),
        build(config, weights, dtype=torch.bfloat16),
        build(config, weights, ranks=TensorRanks(0, 2)),
    ]
    for model in others:
        assert not any(held(model))
        assert model.layers[0].attention.out.weight.dtype is model.dtype


def test_the_default_model_stays_packed(smollm2: Checkpoint, native: NativeOps) -> None:
    model = build(smollm2.config, smollm2.weights)
    assert all(held(model))
    taken = [run.data.nbytes for run in model.layers[0].attention.qkv.held.runs]
    assert (
        sum(taken) == model.layers[0].attention.qkv.outputs * smollm2.config["hidden_size"] * 5 / 8
    )


def test_the_draft_of_the_default_model_stays_packed(
    smollm2: Checkpoint, native: NativeOps
) -> None:
    """All its matrices, `lm_head` in eight bits; drafts are sampled from logits as close as those
    of other packed weights."""
    folder = shipped_draft()
    assert folder is not None
    opened = open_draft(folder)
    target = build(smollm2.config, smollm2.weights, draft=opened)
    draft = opened.build(target)
    mlp, head = draft.first.mlp, draft.head.linear
    linears = [draft.joining, draft.first.attention.qkv, draft.first.attention.out]
    for linear in (*linears, mlp.gate_up, mlp.down, head):
        assert isinstance(linear.held, PackedWeight)
    (rows,) = head.held.runs
    width = smollm2.config["hidden_size"]
    assert rows.data.nbytes == head.outputs * width * 36 // 32
    hidden = torch.randn(4, width)
    wanted = functional.linear(draft.norm(hidden), opened.weights.get("lm_head.weight"))
    assert_close(draft.logits(hidden), wanted)
