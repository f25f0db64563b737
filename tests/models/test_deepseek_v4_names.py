"""DeepSeek-V4's weights by one set of names, from checkpoints in either."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvtide.models.checkpoint import open_checkpoint
from kvtide.models.deepseek_v4_names import DeepSeekV4Weights
from kvtide.models.model_errors import CheckpointError
from tests.models.tiny import Tensors


@functools.cache
def oracle() -> Any:
    torch.manual_seed(6)
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, qk_rope_head_dim=8,
        q_lora_rank=16, o_groups=2, o_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, compress_ratios=[0, 4, 128, 4], num_hash_layers=1, sliding_window=16,
        index_n_heads=16, index_head_dim=16, index_topk=8, pad_token_id=None, bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def as_published(name: str) -> str:
    """The lab's name, from a list of every kind that there is."""
    kinds = {
        r"model\.embed_tokens\.weight": r"embed.weight",
        r"model\.norm\.weight": r"norm.weight",
        r"model\.hc_head\.hc_(fn|base|scale)": r"hc_head_\1",
        r"head\.weight": r"head.weight",
        r"model\.(layers\.\d+)\.attn\.norm\.weight": r"\1.attn.kv_norm.weight",
        r"model\.(layers\.\d+\.attn\.(q_norm|w[a-z_]+)\.weight)": r"\1",
        r"model\.(layers\.\d+\.attn\.attn_sink)": r"\1",
        r"model\.(layers\.\d+\.attn(\.indexer)?\.compressor\.(ape|\w+\.weight))": r"\1",
        r"model\.(layers\.\d+\.attn\.indexer\.(wq_b|weights_proj)\.weight)": r"\1",
        r"model\.(layers\.\d+\.(attn|ffn)_norm\.weight)": r"\1",
        r"model\.(layers\.\d+\.hc_(attn|ffn)_(fn|base|scale))": r"\1",
        r"model\.(layers\.\d+\.ffn\.gate\.(weight|bias|tid2eid))": r"\1",
        r"model\.(layers\.\d+\.ffn\.(shared_experts|experts\.\d+)\.w[123]\.weight)": r"\1",
    }
    found = [re.sub(ours, lab, name) for ours, lab in kinds.items() if re.fullmatch(ours, name)]
    assert len(found) == 1, f"{name} is of {len(found)} kinds"
    return found[0]


def saved(folder: Path) -> dict[str, Tensor]:
    oracle().save_pretrained(folder)
    weights = open_checkpoint(folder).weights
    return {name: weights.get(name) for name in weights.names()}


def publish(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file({as_published(name): tensor for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(oracle().config.to_json_string())


def test_either_naming_gives_every_weight(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "saved")
    publish(tmp_path / "lab", tensors)
    assert len({as_published(name) for name in tensors}) == len(tensors)
    for folder in ("saved", "lab"):
        weights = DeepSeekV4Weights(open_checkpoint(tmp_path / folder).weights)
        for name, tensor in tensors.items():
            assert weights.has(name) and torch.equal(weights.get(name), tensor), name


def test_the_labs_names_in_these_tests_are_those_that_transformers_reads(tmp_path: Path) -> None:
    publish(tmp_path / "lab", saved(tmp_path / "saved"))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "lab", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    for name, tensor in oracle().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_layers_for_multi_token_prediction_are_asked_for_as_the_lab_names_them() -> None:
    stored = {
        "embed.weight": torch.ones(1),
        "mtp.0.enorm.weight": torch.full((1,), 2.0),
        "mtp.0.attn.kv_norm.weight": torch.full((1,), 3.0),
        "mtp.0.hc_head_fn": torch.full((1,), 4.0),
        "mtp.0.norm.weight": torch.full((1,), 5.0),
    }
    weights = DeepSeekV4Weights(Tensors(stored))
    assert all(weights.get(name) is tensor for name, tensor in stored.items())
    assert weights.get("mtp.0.attn.norm.weight") == 3
    assert weights.get("mtp.0.hc_head.hc_fn") == 4
    assert not weights.has("mtp.1.enorm.weight")


def test_what_is_not_there_is_named_as_it_would_be_stored(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "saved")
    publish(tmp_path / "lab", tensors)
    asked = "model.layers.9.attn.norm.weight"
    for folder, named in (("saved", asked), ("lab", "layers.9.attn.kv_norm.weight")):
        weights = DeepSeekV4Weights(open_checkpoint(tmp_path / folder).weights)
        assert not weights.has(asked)
        with pytest.raises(CheckpointError, match=f"no tensor {named},"):
            weights.get(asked)


def test_scales_are_found_beside_the_labs_names(tmp_path: Path) -> None:
    tensors = {
        "embed.weight": torch.ones(4, 4),
        "layers.0.attn.wkv.weight": torch.full((4, 4), 2.0).to(torch.float8_e4m3fn),
        "layers.0.attn.wkv.scale": torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    weights = DeepSeekV4Weights(open_checkpoint(tmp_path).weights)
    assert torch.equal(weights.get("model.layers.0.attn.wkv.weight"), torch.full((4, 4), 0.5))
