"""Tiny random EAGLE3 drafts on disk, under the published names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def tiny_eagle3(
    target_config: Mapping[str, object],
    folder: Path,
    *,
    layers: int = 1,
    captures: tuple[int, ...] = (0, 1, 2),
    draft_vocabulary: int | None = 64,
    own_embedding: bool = False,
    midlayer: bool = True,
    seed: int = 0,
    **fields: object,
) -> Path:
    """Writes a draft for this target, and returns its folder.

    midlayer  the first layer has that name; else `layers.0`
    fields    of its config, instead of the usual ones
    None as a vocabulary: the target's.
    """
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target_config["hidden_size"],
        "vocab_size": target_config["vocab_size"],
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in captures]},
    }
    if draft_vocabulary is not None:
        config["draft_vocab_size"] = draft_vocabulary
    config |= fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    chance = torch.Generator().manual_seed(seed)
    tensors = _tensors(config, len(captures), chance, own_embedding=own_embedding)
    if draft_vocabulary is not None:
        tensors |= _vocabulary(config, draft_vocabulary, chance)
    if midlayer:
        tensors = {k.replace("layers.0.", "midlayer.", 1): v for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _tensors(
    config: Mapping[str, object], captures: int, chance: torch.Generator, *, own_embedding: bool
) -> dict[str, Tensor]:
    width, tokens = _count(config, "hidden_size"), _count(config, "vocab_size")
    outer = _count(config, "target_hidden_size", width)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, captures * outer),
        "norm.weight": (width,),
        "lm_head.weight": (_count(config, "draft_vocab_size", tokens), width),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = (tokens, width)
    for number in range(_count(config, "num_hidden_layers")):
        for name, shape in _layer(config, is_first=number == 0).items():
            shapes[f"layers.{number}.{name}.weight"] = shape
    return {name: _random(shape, chance) for name, shape in shapes.items()}


def _layer(config: Mapping[str, object], *, is_first: bool) -> dict[str, tuple[int, ...]]:
    width, inner, dim = (
        _count(config, x) for x in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = dim * _count(config, "num_attention_heads")
    keys = dim * _count(config, "num_key_value_heads")
    inputs = 2 * width if is_first else width
    norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] * is_first)]
    return {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        **dict.fromkeys(norms, (width,)),
    }


def _vocabulary(
    config: Mapping[str, object], count: int, chance: torch.Generator
) -> dict[str, Tensor]:
    """Some of the target's tokens, in their order."""
    tokens = _count(config, "vocab_size")
    chosen = torch.randperm(tokens, generator=chance)[:count].sort().values
    known = torch.zeros(tokens, dtype=torch.bool)
    known[chosen] = True
    return {"d2t": chosen - torch.arange(count), "t2d": known}


def _random(shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=chance)
    return 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


def _count(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    assert isinstance(value, int)
    return value
