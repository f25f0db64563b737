"""Tiny random models of transformers with seeds of their own, and of families that kvtide's engine
does not have."""

from __future__ import annotations

from typing import Any

import torch
import transformers

WORDS = 97
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    return transformers.LlamaConfig(**_SIZES, num_hidden_layers=3)


def _gemma3() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **_SIZES, num_hidden_layers=3, sliding_window=24, layer_types=types
    )


def _qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        **_SIZES,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    )


def _zaya() -> Any:
    return transformers.ZayaConfig(
        **{name: size for name, size in _SIZES.items() if name != "intermediate_size"},
        num_hidden_layers=3,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        sliding_window=40,
        moe_intermediate_size=32,
        num_experts=4,
        router_hidden_size=16,
    )


def _mamba2() -> Any:
    return transformers.Mamba2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8
    )


CONFIGS = {
    "llama": _llama,
    "gemma3": _gemma3,
    "qwen3_next": _qwen3_next,
    "zaya": _zaya,
    "mamba2": _mamba2,
}


def tiny_model(family: str, seed: int = 0) -> Any:
    """In fp32, on the CPU; weights large enough that tokens depend on the whole prompt."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    return model


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(2, WORDS, (count,), generator=rng).tolist()
