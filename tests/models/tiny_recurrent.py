"""Tiny configs of families with recurrent layers, in the form of `tests.models.tiny.CONFIGS`."""

from __future__ import annotations

Fields = dict[str, object]


def _fields(**fields: object) -> Fields:
    return fields


def _config(family: str, **fields: object) -> tuple[str, Fields]:
    return family, fields


_MAMBA = _fields(mamba_n_heads=8, mamba_d_state=16, mamba_chunk_size=32, num_hidden_layers=2)
_NEMOTRON = _fields(
    ssm_state_size=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    chunk_size=32,
    head_dim=24,
    moe_intermediate_size=48,
    moe_shared_expert_intermediate_size=40,
    # The oracle raises time steps to the least one, which the published code does not do.
    time_step_min=1e-9,
    time_step_floor=0.2,
)
_DELTA = _fields(
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)
_SPARSE = _fields(
    moe_intermediate_size=48,
    shared_expert_intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=2,
)
_KIMI = _fields(
    num_key_value_heads=4,
    kv_lora_rank=32,
    q_lora_rank=None,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=24,
    moe_intermediate_size=48,
    num_local_experts=8,
    num_experts_per_tok=2,
    linear_head_dim=16,
    linear_num_heads=4,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)

RECURRENT: dict[str, tuple[str, Fields]] = {
    "granitemoehybrid": _config(
        "GraniteMoeHybrid",
        **_MAMBA,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        embedding_multiplier=2.5,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=1.7,
    ),
    "granitemoehybrid-dense-rope-groups": _config(
        "GraniteMoeHybrid",
        **_MAMBA,
        layer_types=["full_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=72,
        position_embedding_type="rope",
        mamba_n_groups=4,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "bamba": _config("Bamba", **_MAMBA, attn_layer_indices=[1]),
    "bamba-groups-whole-rotation": _config(
        "Bamba",
        **_MAMBA,
        attn_layer_indices=[0],
        mamba_n_groups=2,
        mamba_conv_bias=False,
        rope_parameters=_fields(
            rope_type="default", rope_theta=10_000.0, partial_rotary_factor=1.0
        ),
    ),
    "nemotron_h": _config(
        "NemotronH",
        **_NEMOTRON,
        n_groups=2,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
    ),
    "nemotron_h-experts": _config(
        "NemotronH",
        **_NEMOTRON,
        n_groups=4,
        layers_block_type=["moe", "linear_attention"],
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.8,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
    ),
    "nemotron_h-latent-experts": _config(
        "NemotronH",
        **_NEMOTRON,
        n_groups=1,
        conv_kernel=2,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        n_routed_experts=4,
        moe_latent_size=32,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    "qwen3_next": _config("Qwen3Next", **_DELTA, **_SPARSE),
    "qwen3_next-some-dense-whole-rotation": _config(
        "Qwen3Next",
        **{**_DELTA, **_SPARSE},
        mlp_only_layers=[1],
        norm_topk_prob=False,
        linear_conv_kernel_dim=2,
        attention_bias=True,
        rope_parameters=_fields(
            rope_type="default", rope_theta=10_000.0, partial_rotary_factor=1.0
        ),
        tie_word_embeddings=True,
    ),
    "qwen3_5": _config("Qwen3_5Text", **_DELTA),
    "qwen3_5-one-head-each": _config(
        "Qwen3_5Text",
        **{
            **_DELTA,
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 16,
            "layer_types": ["full_attention", "linear_attention"],
        },
        linear_conv_kernel_dim=3,
    ),
    "qwen3_5_moe": _config("Qwen3_5MoeText", **_DELTA, **_SPARSE),
    "qwen3_5_moe-one-head-each": _config(
        "Qwen3_5MoeText",
        **{
            **_DELTA,
            **_SPARSE,
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 16,
            "layer_types": ["full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 3,
        },
        linear_conv_kernel_dim=3,
        attention_bias=True,
    ),
    "lfm2": _config("Lfm2", full_attn_idxs=[1]),
    "lfm2-biases-long-kernel": _config(
        "Lfm2",
        full_attn_idxs=[2],
        conv_L_cache=5,
        conv_bias=True,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    "kimi_linear": _config("KimiLinear", **_KIMI),
    "kimi_linear-groups-narrow-queries": _config(
        "KimiLinear",
        **{**_KIMI, "q_lora_rank": 40, "linear_num_heads": 2, "num_experts_per_tok": 3},
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        linear_conv_kernel_dim=2,
        mlp_layer_types=["sparse", "dense"],
        routed_scaling_factor=1.3,
    ),
}
