"""gpt-oss as it is published: experts in MXFP4, read as `transformers` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvtide.models import build, mxfp4
from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.model_errors import CheckpointError
from kvtide.spec.families import KVDType
from tests.models.playing import Player
from tests.models.tiny import oracle, prompt

EXPERTS = ("gate_up_proj", "down_proj")
TOKENS = 60


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of (experts, inputs, outputs), each value the nearest there is."""
    by_block = weights.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = by_block.abs().amax(-1, keepdim=True).log2().floor() - 2
    distances = (by_block / 2**exponents)[..., None] - mxfp4.VALUES.float()
    codes = distances.abs().argmin(-1).to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.contiguous(), (exponents.squeeze(-1) + 127).to(torch.uint8)


def publish(folder: Path) -> Path:
    """The tiny gpt-oss, its experts quantised and everything else in bf16."""
    model, tensors = oracle("gpt_oss"), {}
    for name, weight in model.state_dict().items():
        if name.endswith(EXPERTS):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantised(weight)
        else:
            tensors[name] = weight.bfloat16()
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config = {**json.loads(model.config.to_json_string()), "quantization_config": method}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_value_at_every_scale_is_that_of_transformers() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    blocks = every_byte.expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(2, 255, 16).contiguous()
    scales[1] = scales[1].flip(0)
    ours, theirs = mxfp4.dequantise(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert ours.dtype is torch.bfloat16 and ours.shape == theirs.shape == (2, 512, 255)
    assert torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))
    assert ours[0, 6, 127] == 1.5 and ours[0, 7, 129] == 0, "the low nibble of byte 3 comes first"


def test_a_published_checkpoint_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Its weights to the bit, however they lie, and so its logits."""
    folder = publish(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    checkpoint = open_checkpoint(folder)
    for name, weight in theirs.state_dict().items():
        found = checkpoint.weights.get(name)
        assert checkpoint.weights.has(name) and found.dtype is torch.bfloat16
        assert torch.equal(found, weight), name
    with torch.no_grad():
        wanted = theirs.float()(torch.tensor([prompt(TOKENS)]), use_cache=False).logits[0]
    model = build(checkpoint.config, checkpoint.weights, page_tokens=16, kv_dtype=KVDType.FP32)
    logits = Player(model).prefill(prompt(TOKENS), 17)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-5)


def test_a_range_of_experts_is_read_by_itself(tmp_path: Path) -> None:
    weights = open_checkpoint(publish(tmp_path / "m")).weights
    for name in EXPERTS:
        whole = weights.get(f"model.layers.0.mlp.experts.{name}")
        assert weights.shape(f"model.layers.0.mlp.experts.{name}") == tuple(whole.shape)
        part = weights.get_rows(f"model.layers.0.mlp.experts.{name}", range(1, 3))
        assert torch.equal(part, whole[1:3])


def test_the_encoder_of_these_tests_is_near_what_it_encodes() -> None:
    weights = torch.randn(3, 64, 20, generator=torch.Generator().manual_seed(1))
    error = mxfp4.dequantise(*quantised(weights)) - weights
    assert float(error.abs().mean()) < 0.15 * float(weights.abs().mean())


def test_a_tensor_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    weights = open_checkpoint(publish(tmp_path / "model")).weights
    assert not weights.has("model.layers.9.mlp.experts.down_proj")
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.9.mlp.experts.down_proj,"):
        weights.get("model.layers.9.mlp.experts.down_proj")


def test_a_fingerprint_covers_blocks_and_scales(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(publish(tmp_path / "model"))
    prints = {checkpoint.fingerprint()}
    tensors = {name: checkpoint.weights.get(name) for name in checkpoint.weights.names()}
    for part in ("blocks", "scales"):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[f"model.layers.1.mlp.experts.down_proj_{part}"][2, 3] ^= 1
        save_file(changed, tmp_path / "model" / "model.safetensors")
        prints.add(open_checkpoint(tmp_path / "model").fingerprint())
    assert len(prints) == 3


def test_scales_that_do_not_fit_their_blocks_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "model")
    weights = open_checkpoint(folder).weights
    tensors = {name: weights.get(name).clone() for name in weights.names()}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][..., :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has blocks .* and scales .*; download it"):
        open_checkpoint(folder).weights.get(name)
