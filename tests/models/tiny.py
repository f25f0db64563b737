"""Tiny random models of `transformers`, and ours beside them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.models import Model, build
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.spec.families import KVDType
from tests.models.tiny_latent import LATENT
from tests.models.tiny_recurrent import RECURRENT

transformers.logging.set_verbosity_error()

VOCABULARY = 211

Fields = dict[str, object]


def _fields(**fields: object) -> Fields:
    return fields


def _config(family: str, **fields: object) -> tuple[str, Fields]:
    return family, fields


_BASE = _fields(
    vocab_size=VOCABULARY,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=None,
)
_LLAMA3 = _fields(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_LINEAR = _fields(rope_type="linear", rope_theta=30_000.0, factor=8.0)
_YARN = _fields(
    rope_type="yarn", rope_theta=10_000.0, factor=16.0, original_max_position_embeddings=256
)
_FALCON = _fields(
    mamba_d_ssm=128,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_chunk_size=32,
    embedding_multiplier=2.5,
    lm_head_multiplier=0.7,
    key_multiplier=1.7,
    attention_in_multiplier=1.3,
    attention_out_multiplier=0.8,
    ssm_in_multiplier=0.9,
    ssm_out_multiplier=1.4,
    ssm_multipliers=[0.8, 1.1, 0.7, 1.2, 0.9],
    mlp_multipliers=[1.3, 0.6],
)

_V4 = _fields(
    moe_intermediate_size=64,
    num_key_value_heads=1,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=48,
    o_groups=2,
    o_lora_rank=24,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_shared_experts=1,
    num_hash_layers=1,
    sliding_window=12,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=6,
    compress_rope_theta=160_000.0,
    rope_scaling=_fields(
        type="yarn", factor=16, original_max_position_embeddings=64, beta_fast=32, beta_slow=1
    ),
)
_V4_LAYERS = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "sliding_attention",
]
_SMALL_BLOCKS = _fields(compressed_sparse_attention=4, heavily_compressed_attention=16)

CONFIGS: dict[str, tuple[str, Fields]] = {
    # Blocks of 16 in place of 128, so that small pages hold whole ones.
    "deepseek_v4": _config(
        "DeepseekV4", **_V4, layer_types=_V4_LAYERS[:3], compress_rates=_SMALL_BLOCKS
    ),
    "deepseek_v4-no-hash-other-shapes": _config(
        "DeepseekV4",
        **_V4
        | _fields(
            num_hash_layers=0,
            n_routed_experts=8,
            o_groups=4,
            head_dim=24,
            qk_rope_head_dim=16,
            num_experts_per_tok=3,
            layer_types=_V4_LAYERS[2:],
            compress_rates=_fields(compressed_sparse_attention=8, heavily_compressed_attention=16),
            hc_mult=2,
            hc_sinkhorn_iters=3,
            routed_scaling_factor=2.5,
            swiglu_limit=0.3,
        ),
    ),
    "llama": _config("Llama", head_dim=24),
    "llama-tied-wide-heads": _config(
        "Llama",
        head_dim=40,
        num_attention_heads=6,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "llama-biases-llama3-rope": _config(
        "Llama",
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=4,
        rope_parameters=_LLAMA3,
    ),
    "llama-linear-rope": _config("Llama", rope_parameters=_LINEAR),
    "llama-yarn-rope": _config("Llama", rope_parameters=_YARN),
    "mistral": _config("Mistral", head_dim=24, sliding_window=None),
    "mistral-windows": _config("Mistral", head_dim=32, sliding_window=21),
    "qwen2": _config("Qwen2", num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2-some-windows": _config(
        "Qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1
    ),
    "qwen3": _config("Qwen3", head_dim=32),
    "qwen3-yarn-rope": _config(
        "Qwen3", head_dim=16, num_key_value_heads=1, attention_bias=True, rope_parameters=_YARN
    ),
    "gemma3": _config(
        "Gemma3Text",
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=24,
        num_hidden_layers=7,
    ),
    "gemma3-scaled-rope": _config(
        "Gemma3Text",
        head_dim=16,
        num_key_value_heads=1,
        sliding_window=64,
        query_pre_attn_scalar=40,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=0.3,
        tie_word_embeddings=False,
        rope_parameters=_fields(
            full_attention=_LINEAR,
            sliding_attention=_fields(rope_type="default", rope_theta=500.0),
        ),
    ),
    "gpt_oss": _config(
        "GptOss", head_dim=32, sliding_window=24, num_local_experts=6, num_experts_per_tok=2
    ),
    "gpt_oss-plain-rope-tight-clamp": _config(
        "GptOss",
        head_dim=16,
        num_key_value_heads=4,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=3,
        num_hidden_layers=4,
        swiglu_limit=0.05,
        swiglu_alpha=1.1,
        layer_types=["full_attention", *["sliding_attention"] * 3],
        rope_parameters=_fields(rope_type="default", rope_theta=10_000.0),
    ),
    "qwen3_moe": _config(
        "Qwen3Moe",
        head_dim=32,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "qwen3_moe-some-dense-windows": _config(
        "Qwen3Moe",
        head_dim=16,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=21,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "mixtral": _config("Mixtral", num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=2),
    "mixtral-windows": _config(
        "Mixtral",
        head_dim=16,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=3,
        sliding_window=21,
        tie_word_embeddings=True,
    ),
    "smollm3": _config("SmolLM3", no_rope_layers=[1, 0, 1]),
    "smollm3-by-interval": _config(
        "SmolLM3", no_rope_layer_interval=2, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma2": _config(
        "Gemma2",
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=0.4,
        final_logit_softcapping=0.3,
    ),
    "gemma2-no-caps": _config(
        "Gemma2",
        head_dim=16,
        num_key_value_heads=1,
        num_hidden_layers=2,
        sliding_window=64,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    ),
    "falcon_h1": _config("FalconH1", **_FALCON),
    "falcon_h1-groups-norm": _config(
        "FalconH1",
        **_FALCON,
        head_dim=40,
        mamba_n_groups=2,
        mamba_d_conv=3,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
    ),
    "falcon_h1-norm-first-no-conv": _config(
        "FalconH1",
        **_FALCON,
        mamba_n_groups=4,
        mamba_d_conv=1,
        mamba_rms_norm=True,
        mamba_conv_bias=False,
        time_step_limit=[0.6, 1.1],
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    **RECURRENT,
    **LATENT,
}


@dataclass(frozen=True, slots=True)
class Tensors:
    """Weights that are at hand, as a checkpoint."""

    tensors: Mapping[str, Tensor]

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get_rows(self, name: str, rows: range) -> Tensor:
        return self.tensors[name][rows.start : rows.stop]

    def packed(self, name: str) -> PackedWeight | None:
        return PackedWeight.of_halves(self.tensors[name])


_ATTENTION_LAST = ["linear_attention", "full_attention", "full_attention"]


def _three_layers(name: str, **fields: object) -> tuple[str, Fields]:
    family, known = CONFIGS[name]
    return family, {**known, "num_hidden_layers": 3, **fields}


LONG: dict[str, tuple[str, Fields]] = {
    "deepseek_v4-blocks-of-128": _config("DeepseekV4", **_V4, layer_types=_V4_LAYERS),
    "deepseek_v4-mtp": _config(
        "DeepseekV4",
        **_V4,
        layer_types=[*_V4_LAYERS[1:3], "sliding_attention"],
        compress_rates=_SMALL_BLOCKS,
    ),
    "deepseek_v3-mtp": _three_layers("deepseek_v3"),
    "deepseek_v32-mtp": _three_layers("deepseek_v32"),
    "glm4_moe_lite-mtp": _three_layers("glm4_moe_lite"),
    "glm_moe_dsa-one-indexer": _config(
        "GlmMoeDsa",
        **LATENT["glm_moe_dsa"][1]
        | _fields(
            num_hidden_layers=8,
            index_topk_pattern="FSSSSSSS",
            index_head_dim=16,
            first_k_dense_replace=8,
        ),
    ),
    "glm_moe_dsa-mtp": _three_layers("glm_moe_dsa-shared", index_topk_pattern="FSF"),
    "qwen3_next-mtp": _three_layers("qwen3_next", layer_types=_ATTENTION_LAST),
    "qwen3_5-mtp": _three_layers("qwen3_5", layer_types=_ATTENTION_LAST),
    "qwen3_5_moe-mtp": _three_layers("qwen3_5_moe", layer_types=_ATTENTION_LAST),
}
"""Models with tests of their own: ordinary pages do not fit them, or their last layer is a draft's.
"""


def config_of(name: str) -> transformers.PreTrainedConfig:
    family, fields = {**CONFIGS, **LONG}[name]
    listed = fields.get("layer_types")
    layers = {"num_hidden_layers": len(listed)} if isinstance(listed, list) else {}
    return getattr(transformers, f"{family}Config")(**{**_BASE, **layers, **fields})


def family_of(name: str) -> str:
    """The `model_type` of a tiny config."""
    return str(config_of(name).model_type)


_LEARNED_BUFFERS = ("e_score_correction_bias", "tid2eid")


@functools.cache
def oracle(name: str) -> transformers.PreTrainedModel:
    """With nothing at its trivial initial value: norms, sinks, biases, time steps."""
    config = config_of(name)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        learned = [pair for pair in model.named_buffers() if pair[0].endswith(_LEARNED_BUFFERS)]
        for key, weight in (*model.named_parameters(), *learned):
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                weight.copy_(torch.rand(len(weight), experts, generator=generator)
                             .argsort(1)[:, : weight.shape[1]])  # fmt: skip
            elif key.endswith("A_log"):
                weight.add_(noise - 4)  # So that states last for hundreds of tokens.
            elif weight.dim() == 1 or key.endswith("_bias") or key.endswith("sinks"):
                weight.add_(noise * 0.2)
            else:
                weight.add_(noise * 0.05)
        for key, weight in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    """The oracle as `save_pretrained` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        oracle(name).save_pretrained(folder)
        return open_checkpoint(folder)  # Mapped files live on without their names.


def ours(
    name: str,
    *,
    deterministic: bool = False,
    page_tokens: int = 16,
    kv_dtype: KVDType = KVDType.FP32,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Model:
    """Our model from the oracle's checkpoint. `more` is what else `build` takes."""
    saved = checkpoint(name)
    return build(
        saved.config,
        saved.weights,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        dtype=dtype,
        deterministic=deterministic,
        **more,
    )


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@functools.cache
def expected(name: str, length: int, seed: int = 1) -> Tensor:
    """The oracle's logits of every token of a prompt."""
    with torch.no_grad():
        ids = torch.tensor([prompt(length, seed)])
        return oracle(name)(ids, use_cache=False).logits[0]
