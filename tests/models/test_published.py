"""Checkpoints in eight and four bits: what the bytes stand for, worked out one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvtide.models import build, fp8
from kvtide.models.checkpoint import Checkpoint, StoredWeights, open_checkpoint
from kvtide.models.model_errors import CheckpointError
from kvtide.spec.families import KVDType
from tests.models.playing import Player
from tests.models.test_logits import TOLERANCE
from tests.models.tiny import Tensors, oracle, prompt

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
V4 = {**FP8, "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "expert_dtype": "fp4"}
NIBBLES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NIBBLES += tuple(-value for value in NIBBLES)


def write(folder: Path, tensors: dict[str, Tensor], method: object, shards: int = 1) -> Checkpoint:
    """A folder with so many shards, neighbours of a name in different ones."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "deepseek_v4", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return open_checkpoint(folder)
    names, places = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[number::shards]}, folder / file)
        places.update(dict.fromkeys(names[number::shards], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return open_checkpoint(folder)


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -size if code & 128 else size


def eight_bits(rows: int, columns: int, scales: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random codes, and what they stand for with these scales, number by number."""
    rng = np.random.default_rng(seed)
    codes = rng.choice([code for code in range(256) if code & 127 != 127], (rows, columns))
    values, each = np.empty((rows, columns), np.float32), scales.float().numpy()
    for row in range(rows):
        for column in range(columns):
            scale = each[row // 128, column // 128]
            values[row, column] = np.float32(e4m3(int(codes[row, column]))) * scale
    packed = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    return packed, torch.from_numpy(values)


def four_bits(rows: int, columns: int, exponents: Tensor, seed: int = 2) -> tuple[Tensor, Tensor]:
    codes = np.random.default_rng(seed).integers(0, 16, (rows, columns))
    values = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            exponent = int(exponents[row, column // 32]) - 127
            values[row, column] = math.ldexp(NIBBLES[codes[row, column]], exponent)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(packed).view(torch.int8), torch.from_numpy(values)


def exponents(*shape: int, low: int = 100, high: int = 140) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def scales_in_fp32(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 3e-3 + 1e-5


# -- what is read --------------------------------------------------------------------------------


def test_eight_bits_with_scales_of_blocks_are_read_as_float32(tmp_path: Path) -> None:
    """300 × 150: two whole blocks, and smaller ones at both edges."""
    scales = scales_in_fp32(3, 2)
    weight, values = eight_bits(300, 150, scales)
    name = "model.layers.0.mlp.up_proj.weight"
    found = write(tmp_path, {name: weight, f"{name}_scale_inv": scales}, FP8).weights
    assert found.has(name) and found.get(name).dtype is torch.float32
    assert torch.equal(found.get(name), values)


@pytest.mark.parametrize("form", ["e8m0", "bytes", "fp32"])
def test_scales_may_be_powers_of_two(tmp_path: Path, form: str) -> None:
    powers = exponents(2, 3)
    numbers = powers.view(torch.float8_e8m0fnu)
    scale = {"e8m0": numbers, "bytes": powers, "fp32": numbers.float()}[form]
    weight, values = eight_bits(256, 257, numbers)
    tensors = {"layers.0.attn.wkv.weight": weight, "layers.0.attn.wkv.scale": scale}
    found = write(tmp_path, tensors, V4).weights
    assert torch.equal(found.get("layers.0.attn.wkv.weight"), values)


def test_experts_in_four_bits_are_read_as_they_lie(tmp_path: Path) -> None:
    powers = exponents(40, 3)
    weight, values = four_bits(40, 96, powers)
    name = "layers.3.ffn.experts.7.w1"
    tensors = {f"{name}.weight": weight, f"{name}.scale": powers.view(torch.float8_e8m0fnu)}
    found = write(tmp_path, tensors, V4).weights.get(f"{name}.weight")
    assert found.dtype is torch.bfloat16 and torch.equal(found.float(), values)


def test_the_low_nibble_comes_first_and_its_highest_bit_is_the_sign(tmp_path: Path) -> None:
    row = torch.tensor([[0x21, 0x7F, *[0] * 14]], dtype=torch.uint8).view(torch.int8)
    tensors = {"w1.weight": row, "w1.scale": torch.full((1, 1), 2.0).to(torch.float8_e8m0fnu)}
    found = write(tmp_path, tensors, V4).weights.get("w1.weight")
    assert found.shape == (1, 32) and found[0, :5].tolist() == [1.0, 2.0, -12.0, 12.0, 0.0]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("method", [V4, None], ids=["named", "not named"])
def test_one_checkpoint_holds_all_forms(tmp_path: Path, shards: int, method: object) -> None:
    """The tensors show which; what is not quantised comes back as it was stored."""
    powers, four = exponents(1, 2), exponents(16, 2)
    weight, values = eight_bits(64, 200, powers.view(torch.float8_e8m0fnu))
    packed, small = four_bits(16, 64, four)
    plain = {
        "norm.weight": torch.randn(8).bfloat16(),
        "layers.0.hc_attn_scale": torch.randn(3),
        "layers.0.ffn.gate.tid2eid": torch.arange(12).view(6, 2),
        "layers.0.attn.compressor.ape": torch.randn(4, 6),
    }
    tensors = {
        **plain,
        "layers.0.attn.wq_a.weight": weight,
        "layers.0.attn.wq_a.scale": powers.view(torch.float8_e8m0fnu),
        "layers.0.ffn.experts.0.w2.weight": packed,
        "layers.0.ffn.experts.0.w2.scale": four.view(torch.float8_e8m0fnu),
    }
    found = write(tmp_path, tensors, method, shards).weights
    assert set(found.names()) == set(tensors)
    assert torch.equal(found.get("layers.0.attn.wq_a.weight"), values)
    assert torch.equal(found.get("layers.0.ffn.experts.0.w2.weight").float(), small)
    for name, tensor in plain.items():
        assert found.get(name).dtype is tensor.dtype and torch.equal(found.get(name), tensor)


def test_rows_are_those_of_the_whole_weight_in_every_form(tmp_path: Path) -> None:
    # 300 rows are blocks of 128, 128 and 44.
    eight, _ = eight_bits(300, 200, fp32 := scales_in_fp32(3, 2))
    four, _ = four_bits(300, 64, powers := exponents(300, 2))
    tensors = {
        "a.weight": eight,
        "a.weight_scale_inv": fp32,
        "b.weight": four,
        "b.scale": powers,
        "c.weight": torch.randn(300, 8),
    }
    weights = write(tmp_path, tensors, V4).weights
    for name, width in {"a.weight": 200, "b.weight": 64, "c.weight": 8}.items():
        whole = weights.get(name)
        assert weights.shape(name) == tuple(whole.shape) == (300, width)
        for rows in (range(128), range(100, 260), range(128, 256), range(299, 300), range(3, 5)):
            assert torch.equal(weights.get_rows(name, rows), whole[rows.start : rows.stop])


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Each value the nearest there is, with the largest of every block at 448."""
    rows, columns = weight.shape
    table = torch.tensor([e4m3(code) for code in range(127)])
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max() / 448
            sizes = (weight[at].abs() / scales[i, j])[..., None]
            nearest = (sizes - table).abs().argmin(-1).to(torch.uint8)
            codes[at] = nearest | (weight[at] < 0).to(torch.uint8) << 7
    return codes.view(torch.float8_e4m3fn), scales


def test_eight_bits_are_the_nearest_with_the_smallest_powers_of_two_as_scales() -> None:
    """300 × 150 in blocks of 128 × 128: smaller ones at both edges, one of zeros."""
    weight = torch.randn(300, 150, generator=torch.Generator().manual_seed(7))
    weight *= torch.logspace(-3, 2, 300)[:, None]
    weight[128:256, 128:] = 0.0
    weight[256:, 128:] *= 400 / weight[256:, 128:].abs().max()
    weight[-1, -1] = 448.0
    codes, scales = fp8.quantise(weight)
    assert scales.shape == (3, 2) and scales[1, 1] == scales[2, 1] == 1.0
    table = torch.tensor([e4m3(code) for code in range(127)])
    for i in range(3):
        for j in range(2):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale, sizes = float(scales[i, j]), weight[at].abs()
            assert math.frexp(scale)[0] == 0.5
            assert sizes.max() <= 448 * scale and (sizes.max() > 224 * scale or i == j == 1)
            distance = (sizes[..., None] / scale - table).abs().amin(-1)
            assert torch.equal((codes[at].float().abs() - sizes / scale).abs(), distance)
            assert torch.equal(
                codes[at].float().sign(), torch.where(codes[at].float() == 0, 0, weight[at].sign())
            )
    values = fp8.dequantise(codes, scales, fp8.BLOCK)
    assert torch.equal(fp8.rounded(values), values) and torch.equal(values.bfloat16(), values)


@pytest.mark.parametrize("block", [(128, 128), (32, 64)])
def test_a_model_in_eight_bits_answers_as_the_same_numbers_in_float32(
    tmp_path: Path, block: tuple[int, int]
) -> None:
    """And near the model that it was made from. Where arithmetic is deterministic, to the last bit;
    other arithmetic may multiply packed weights, whose sums have another order."""
    model, tensors, numbers = oracle("llama"), {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            numbers[name] = tensors[name] = weight
            continue
        tensors[name], scales = quantised(weight, block)
        tensors[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        codes = tensors[name].view(torch.uint8).long()
        table = torch.tensor([e4m3(code) for code in range(256)])
        numbers[name] = table[codes] * spread[: weight.shape[0], : weight.shape[1]]
        assert float((numbers[name] - weight).norm() / weight.norm()) < 0.05
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads(model.config.to_json_string())
    method = {**FP8, "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    found = open_checkpoint(tmp_path)

    def logits(weights: StoredWeights | Tensors, *, deterministic: bool = False) -> Tensor:
        built = build(
            *(found.config, weights),
            page_tokens=16,
            kv_dtype=KVDType.FP32,
            deterministic=deterministic,
        )
        return Player(built).prefill(prompt(40), 17)

    wanted = logits(Tensors(numbers), deterministic=True)
    assert torch.equal(logits(found.weights, deterministic=True), wanted)
    torch.testing.assert_close(logits(found.weights), wanted, rtol=0, atol=TOLERANCE)


# -- what is refused -----------------------------------------------------------------------------

NAME = "layers.1.attn.wq_b"


def _no_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{NAME}.scale"]


def _few_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.scale"] = tensors[f"{NAME}.scale"][:1].contiguous()


def _one_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.scale"] = torch.ones(())


def _four_without(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight"] = torch.zeros(20, 32, dtype=torch.int8)
    del tensors[f"{NAME}.scale"]


def _four_with_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight"] = torch.zeros(20, 32, dtype=torch.int8)


def _four_with_numbers(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight"] = torch.zeros(20, 32, dtype=torch.int8)
    tensors[f"{NAME}.scale"] = torch.ones(20, 2)


def _four_by_odd(tensors: dict[str, Tensor]) -> None:
    tensors[f"{NAME}.weight"] = torch.zeros(20, 40, dtype=torch.int8)
    tensors[f"{NAME}.scale"] = torch.ones(20, 2).to(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_no_scale, rf"in torch.float8_e4m3fn and has no scales .* or {NAME}.scale\).*; download"),
        (_few_scales, r"\[200, 150\] .* scales \[1, 2\] .* each block of 128 × 128; use the conf"),
        (_one_scale, r"with scales \[\] in torch.float32, which is not a scale for each block"),
        (_four_without, r"is in torch.int8 and has no scales beside it"),
        (_four_with_blocks, r"scales \[2, 2\] .* not an eight-bit exponent for each 16 bytes"),
        (_four_with_numbers, r"scales \[20, 2\] in torch.float32, which is not an eight-bit"),
        (_four_by_odd, r"\[20, 40\] in torch.int8 with scales \[20, 2\] .* which is not an eight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    tensors = {
        f"{NAME}.weight": torch.zeros(200, 150).to(torch.float8_e4m3fn),
        f"{NAME}.scale": torch.ones(2, 2).to(torch.float8_e8m0fnu),
    }
    assert not write(tmp_path / "good", tensors, V4).weights.get(f"{NAME}.weight").any()
    spoil(tensors)
    with pytest.raises(CheckpointError, match=f"{NAME}.weight.*{sentence}"):
        write(tmp_path / "bad", tensors, V4).weights.get(f"{NAME}.weight")


@pytest.mark.parametrize("size", [[128], [128, 0], "128", [128, 128, 128]])
def test_blocks_of_no_size_are_refused(tmp_path: Path, size: object) -> None:
    with pytest.raises(CheckpointError, match=r"`weight_block_size` is .*; use two numbers"):
        write(tmp_path, {"a": torch.ones(1)}, {**FP8, "weight_block_size": size})


def test_a_fingerprint_covers_codes_and_scales(tmp_path: Path) -> None:
    weight, _ = eight_bits(40, 40, torch.ones(1, 1))
    packed, _ = four_bits(4, 32, exponents(4, 1))
    tensors = {
        "a.weight": weight,
        "a.scale": torch.ones(1, 1),
        "b.weight": packed,
        "b.scale": exponents(4, 1).view(torch.float8_e8m0fnu),
    }
    prints = {write(tmp_path / "whole", tensors, V4).fingerprint()}
    for name in tensors:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(torch.uint8).view(-1)[2] ^= 1
        prints.add(write(tmp_path / name, changed, V4).fingerprint())
    assert len(prints) == 5
