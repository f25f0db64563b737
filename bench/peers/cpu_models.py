"""Random models in fp32 of a hundred million parameters, one for each kind of memory.

Shapes are those of published models, with fewer layers or experts, and all with one vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 49152
_ALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_DENSE_MLA: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 12,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention over the whole history: SmolLM2-135M.
    "llama": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_theta": 100000.0,
        },
    ),
    # Windows of 512 tokens, one layer in six without: Gemma 3 270M.
    "gemma3": (
        "gemma3_text",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
        },
    ),
    # Latents for all heads: DeepSeek-V3's attention with dense MLPs.
    "deepseek_v3": ("deepseek_v3", _DENSE_MLA),
    # The same with an indexer.
    "deepseek_v32": (
        "deepseek_v32",
        {**_DENSE_MLA, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 512},
    ),
    # Mamba2 beside attention: Falcon-H1 0.5B, with a third of its layers.
    "falcon_h1": (
        "falcon_h1",
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_chunk_size": 128,
        },
    ),
    # The gated delta rule, one layer in four with attention: Qwen3-Next with few experts.
    "qwen3_next": (
        "qwen3_next",
        {
            "hidden_size": 640,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}


def write_model(family: str, folder: Path) -> None:
    """A checkpoint of random weights, by `transformers`."""
    import torch
    import transformers

    model_type, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**_ALL, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
