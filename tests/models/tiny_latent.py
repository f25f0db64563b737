"""Tiny configs of families with latent attention, in the form of `tests.models.tiny.CONFIGS`."""

from __future__ import annotations

Fields = dict[str, object]


def _fields(**fields: object) -> Fields:
    return fields


_LATENT = _fields(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_INDEXED = _fields(index_topk=24, index_head_dim=32, index_n_heads=16)
_YARN = _fields(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=16.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.7,
    mscale_all_dim=1.2,
)


def _config(family: str, *more: Fields, **fields: object) -> tuple[str, Fields]:
    joined = dict(_LATENT)
    for each in (*more, fields):
        joined |= each
    return family, joined


LATENT: dict[str, tuple[str, Fields]] = {
    "deepseek_v2": _config(
        "DeepseekV2",
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.7,
        rope_parameters=_YARN,
    ),
    "deepseek_v2-wide-queries": _config(
        "DeepseekV2",
        q_lora_rank=None,
        n_shared_experts=2,
        attention_bias=True,
        mlp_bias=True,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
    ),
    "deepseek_v3": _config("DeepseekV3", n_group=4, topk_group=2),
    "deepseek_v3-yarn-halves": _config(
        "DeepseekV3",
        rope_interleave=False,
        rope_parameters=_YARN,
        attention_bias=True,
        norm_topk_prob=False,
        num_experts_per_tok=5,
        n_group=2,
        topk_group=2,
        rms_norm_eps=1e-3,
    ),
    "deepseek_v3-wide-queries": _config(
        "DeepseekV3",
        q_lora_rank=None,
        num_attention_heads=6,
        num_key_value_heads=6,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        tie_word_embeddings=True,
    ),
    "glm4_moe_lite": _config("Glm4MoeLite", qk_nope_head_dim=16, v_head_dim=32),
    "glm4_moe_lite-mixed-layers": _config(
        "Glm4MoeLite",
        q_lora_rank=None,
        mlp_layer_types=["sparse", "dense"],
        rope_interleave=False,
        n_group=2,
    ),
    "deepseek_v32": _config("DeepseekV32", _INDEXED, n_group=4, topk_group=2),
    "deepseek_v32-yarn": _config(
        "DeepseekV32",
        _INDEXED,
        index_topk=7,
        index_n_heads=32,
        index_head_dim=16,
        attention_bias=True,
        rope_parameters=_YARN,
    ),
    "glm_moe_dsa": _config("GlmMoeDsa", _INDEXED),
    "glm_moe_dsa-shared": _config(
        "GlmMoeDsa",
        _INDEXED,
        num_hidden_layers=4,
        index_topk_pattern="FSSF",
        rope_parameters=_YARN,
        tie_word_embeddings=True,
    ),
    "glm_moe_dsa-every-other": _config(
        "GlmMoeDsa",
        _INDEXED,
        num_hidden_layers=3,
        index_topk_freq=2,
        index_skip_topk_offset=1,
        n_group=2,
    ),
}
