"""A small DeepSeek-V4 as the lab publishes one: its names, its config, eight and four bits.

The oracle is given the numbers that the bytes stand for, and has to say the same.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvtide.models import build
from kvtide.models.checkpoint import open_checkpoint
from kvtide.spec.families import KVDType
from tests.models.playing import Player
from tests.models.test_deepseek_v4 import REAL, labs_config
from tests.models.test_deepseek_v4_names import as_published
from tests.models.test_logits import assert_close
from tests.models.test_published import NIBBLES, V4
from tests.models.tiny import checkpoint, config_of, prompt

QUANTISED = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "shared_experts.w1", "shared_experts.w2",
             "shared_experts.w3", "indexer.wq_b")  # fmt: skip
TOKENS = 200


def _eight_bits(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """One power of two for all of a small weight."""
    exponent = int(torch.ceil(torch.log2(weight.abs().max() / 448)))
    codes = (weight * 2.0**-exponent).to(torch.float8_e4m3fn)
    blocks = [-(-side // 128) for side in weight.shape]
    scale = torch.full(blocks, exponent + 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": codes, "scale": scale}, codes.float() * 2.0**exponent


def _four_bits(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A power of two for 32 inputs each, and the nearest of sixteen values."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6)).int()
    scaled = groups * torch.exp2(-exponents.float())[..., None]
    table = torch.tensor(NIBBLES)
    codes = (scaled[..., None] - table).abs().argmin(-1)
    values = (table[codes] * torch.exp2(exponents.float())[..., None]).flatten(1)
    codes = codes.flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": packed, "scale": scale}, values


def _published(folder: Path) -> dict[str, Tensor]:
    """Writes the folder; the numbers in it by the names of `save_pretrained`."""
    weights = checkpoint(REAL).weights
    stored, meant = {}, {}
    for name in weights.names():
        lab, weight = as_published(name), weights.get(name)
        kind = name.removesuffix(".weight").split(".attn.")[-1].split(".ffn.")[-1]
        if ".ffn.experts." in name:
            parts, weight = _four_bits(weight)
        elif kind in QUANTISED:
            parts, weight = _eight_bits(weight)
        else:
            parts = {"": weight.contiguous()}
        base = lab.removesuffix(".weight")
        stored |= {f"{base}.{part}" if part else lab: value for part, value in parts.items()}
        meant[name] = weight
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = {**labs_config(), "quantization_config": V4}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_a_published_folder_answers_as_the_oracle_with_the_same_numbers(tmp_path: Path) -> None:
    meant = _published(tmp_path / "lab")
    found = open_checkpoint(tmp_path / "lab")
    kinds = {str(found.weights.stored(name).form).split()[0] for name in found.weights.names()}
    assert {"torch.float8_e4m3fn", "torch.int8", "torch.float8_e8m0fnu"} <= kinds
    model = build(found.config, found.weights, page_tokens=128, kv_dtype=KVDType.FP32)
    logits = Player(model).prefill(prompt(TOKENS), TOKENS)

    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({k: v.contiguous() for k, v in meant.items()}, plain / "model.safetensors")
    config = copy.deepcopy(config_of(REAL))
    config._attn_implementation = config._experts_implementation = "eager"
    config.architectures = ["DeepseekV4ForCausalLM"]
    config.save_pretrained(plain)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    with torch.no_grad():
        wanted = oracle(torch.tensor([prompt(TOKENS)]), use_cache=False).logits[0]
    assert_close(logits, wanted)
