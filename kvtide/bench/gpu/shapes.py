"""Models of real shapes with random weights: config, tensor shapes by name, page size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtide.layers.backend.packed_weight import PackedWeight
from kvtide.models import Model, build
from kvtide.spec import catalog
from kvtide.spec.families import KVDType
from kvtide.spec.residency import ALL_RESIDENT, Residency

Shapes = Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its config, its tensor shapes by name pattern, and its page size."""

    name: str
    config: Mapping[str, Any]
    tensors: Shapes
    page_tokens: int

    def build(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kv: KVDType | None = None,
        resident: Residency = ALL_RESIDENT,
    ) -> Model:
        weights = RandomWeights(self.tensors(self.config), device, dtype)
        with device:
            return build(
                self.config,
                weights,
                page_tokens=self.page_tokens,
                kv_dtype=kv,
                dtype=dtype,
                resident=resident,
            )


class RandomWeights:
    """Weights for every name that a pattern matches: ones for norms, small random values else."""

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shapes = {re.compile(pattern): shape for pattern, shape in tensors.items()}
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        return self._shape(name) is not None

    def get(self, name: str) -> Tensor:
        shape = self._shape(name)
        assert shape is not None, name
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        if name.endswith("tid2eid"):
            values = torch.rand(shape[0], shape[2], generator=self._generator, device=self._device)
            return values.argsort(-1)[:, : shape[1]]
        if "norm" in name:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(std=shape[-1] ** -0.5, generator=self._generator)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._shape(name)
        assert shape is not None, name
        return shape

    def get_rows(self, name: str, rows: range) -> Tensor:
        return self.get(name)[rows.start : rows.stop]

    def packed(self, name: str) -> PackedWeight | None:
        return None

    def _shape(self, name: str) -> tuple[int, ...] | None:
        found = (shape for pattern, shape in self._shapes.items() if pattern.fullmatch(name))
        return next(found, None)


def _qwen3(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = (config[f] for f in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f] * dim for f in ("num_attention_heads", "num_key_value_heads"))
    layer = r"model\.layers\.\d+\."
    return {
        r"model\.embed_tokens\.weight|lm_head\.weight": (config["vocab_size"], hidden),
        rf"model\.norm\.weight|{layer}\w+_layernorm\.weight": (hidden,),
        rf"{layer}self_attn\.[qk]_norm\.weight": (dim,),
        rf"{layer}self_attn\.q_proj\.weight": (queries, hidden),
        rf"{layer}self_attn\.[kv]_proj\.weight": (keys, hidden),
        rf"{layer}self_attn\.o_proj\.weight": (hidden, queries),
        rf"{layer}mlp\.(gate|up)_proj\.weight": (inner, hidden),
        rf"{layer}mlp\.down_proj\.weight": (hidden, inner),
    }


def _falcon_h1(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = (config[f] for f in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f] * dim for f in ("num_attention_heads", "num_key_value_heads"))
    mixed, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
    convolved = mixed + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    layer = r"model\.layers\.\d+\."
    return {
        r"model\.embed_tokens\.weight|lm_head\.weight": (config["vocab_size"], hidden),
        rf"model\.final_layernorm\.weight|{layer}\w+_layernorm\.weight": (hidden,),
        rf"{layer}self_attn\.q_proj\.weight": (queries, hidden),
        rf"{layer}self_attn\.[kv]_proj\.weight": (keys, hidden),
        rf"{layer}self_attn\.o_proj\.weight": (hidden, queries),
        rf"{layer}feed_forward\.(gate|up)_proj\.weight": (inner, hidden),
        rf"{layer}feed_forward\.down_proj\.weight": (hidden, inner),
        rf"{layer}mamba\.(A_log|dt_bias|D)": (heads,),
        rf"{layer}mamba\.in_proj\.weight": (mixed + convolved + heads, hidden),
        rf"{layer}mamba\.conv1d\.weight": (convolved, 1, config["mamba_d_conv"]),
        rf"{layer}mamba\.conv1d\.bias": (convolved,),
        rf"{layer}mamba\.out_proj\.weight": (hidden, mixed),
    }


def _deepseek_v4(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, low, dim = config["hidden_size"], config["q_lora_rank"], config["head_dim"]
    heads, groups, rank = (config[f] for f in ("num_attention_heads", "o_groups", "o_lora_rank"))
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    vocabulary, topk = config["vocab_size"], config["num_experts_per_tok"]
    streams = config.get("hc_mult", 4)
    mixes, wide = streams * (2 + streams), streams * hidden
    hashed = "|".join(str(n) for n in range(config["num_hash_layers"])) or "none"
    layer = r"(model\.layers\.\d+|mtp\.0)\."
    top = r"(model|mtp\.0)\."
    tensors = {
        r"model\.embed_tokens\.weight|head\.weight": (vocabulary, hidden),
        rf"{top}norm\.weight|{layer}(attn|ffn)_norm\.weight": (hidden,),
        r"mtp\.0\.[eh]norm\.weight": (hidden,),
        r"mtp\.0\.[eh]_proj\.weight": (hidden, hidden),
        rf"{top}hc_head\.hc_fn": (streams, wide),
        rf"{top}hc_head\.hc_base": (streams,),
        rf"{top}hc_head\.hc_scale": (1,),
        rf"{layer}hc_(attn|ffn)_fn": (mixes, wide),
        rf"{layer}hc_(attn|ffn)_base": (mixes,),
        rf"{layer}hc_(attn|ffn)_scale": (3,),
        rf"{layer}attn\.wq_a\.weight": (low, hidden),
        rf"{layer}attn\.q_norm\.weight": (low,),
        rf"{layer}attn\.wq_b\.weight": (heads * dim, low),
        rf"{layer}attn\.wkv\.weight": (dim, hidden),
        rf"{layer}attn\.norm\.weight": (dim,),
        rf"{layer}attn\.attn_sink": (heads,),
        rf"{layer}attn\.wo_a\.weight": (groups * rank, heads // groups * dim),
        rf"{layer}attn\.wo_b\.weight": (hidden, groups * rank),
        rf"{layer}attn\.indexer\.wq_b\.weight": (index_heads * index_dim, low),
        rf"{layer}attn\.indexer\.weights_proj\.weight": (index_heads, hidden),
        rf"{layer}ffn\.gate\.weight": (experts, hidden),
        rf"model\.layers\.({hashed})\.ffn\.gate\.tid2eid": (vocabulary, topk, experts),
        rf"(model\.layers\.(?!({hashed})\.)\d+|mtp\.0)\.ffn\.gate\.bias": (experts,),
        rf"{layer}ffn\.(experts\.\d+|shared_experts)\.w[13]\.weight": (inner, hidden),
        rf"{layer}ffn\.(experts\.\d+|shared_experts)\.w2\.weight": (hidden, inner),
    }
    for number, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        if ratio:
            halves = 2 if ratio == 4 else 1
            under = rf"model\.layers\.{number}\.attn\."
            tensors |= _compressor(rf"{under}compressor\.", ratio, halves, dim, hidden)
            under = rf"{under}indexer\.compressor\."
            tensors |= _compressor(under, ratio, halves, index_dim, hidden)
    return tensors


def _deepseek_v32(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, low, rank = (config[f] for f in ("hidden_size", "q_lora_rank", "kv_lora_rank"))
    heads, plain, turned, value = (
        config[f]
        for f in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    layer = r"model\.layers\.\d+\."
    attention, indexer = rf"{layer}self_attn\.", rf"{layer}self_attn\.indexer\."
    expert = rf"{layer}mlp\.(experts\.\d+|shared_experts)\."
    return {
        r"model\.embed_tokens\.weight|lm_head\.weight": (config["vocab_size"], hidden),
        rf"model\.norm\.weight|{layer}\w+_layernorm\.weight": (hidden,),
        rf"{attention}q_a_proj\.weight": (low, hidden),
        rf"{attention}q_a_layernorm\.weight": (low,),
        rf"{attention}q_b_proj\.weight": (heads * (plain + turned), low),
        rf"{attention}kv_a_proj_with_mqa\.weight": (rank + turned, hidden),
        rf"{attention}kv_a_layernorm\.weight": (rank,),
        rf"{attention}kv_b_proj\.weight": (heads * (plain + value), rank),
        rf"{attention}o_proj\.weight": (hidden, heads * value),
        rf"{indexer}wq_b\.weight": (index_heads * index_dim, low),
        rf"{indexer}wk\.weight": (index_dim, hidden),
        rf"{indexer}k_norm\.(weight|bias)": (index_dim,),
        rf"{indexer}weights_proj\.weight": (index_heads, hidden),
        rf"{layer}mlp\.gate\.weight": (experts, hidden),
        rf"{layer}mlp\.gate\.e_score_correction_bias": (experts,),
        rf"{expert}(gate|up)_proj\.weight": (inner, hidden),
        rf"{expert}down_proj\.weight": (hidden, inner),
    }


def _compressor(
    under: str, ratio: int, halves: int, width: int, hidden: int
) -> dict[str, tuple[int, ...]]:
    return {
        rf"{under}w(kv|gate)\.weight": (halves * width, hidden),
        rf"{under}ape": (ratio, halves * width),
        rf"{under}norm\.weight": (width,),
    }


def qwen3_8b(layers: int = 36) -> Shape:
    config = {**catalog.config("qwen3-8b"), "num_hidden_layers": layers, "rope_theta": 1e6}
    return Shape("qwen3-8b", config, _qwen3, 64)


def falcon_h1(layers: int = 12) -> Shape:
    """The first layers of 34B: attention and recurrent states in each."""
    config = {**catalog.config("falcon-h1-34b"), "num_hidden_layers": layers, "rope_theta": 1e11}
    return Shape("falcon-h1-34b", config, _falcon_h1, 64)


def deepseek_v4_flash(layers: int = 12, experts: int = 32, **others: Any) -> Shape:
    """The first layers with some of the experts, which fit on one device."""
    ratios: Sequence[int] = catalog.config("deepseek-v4-flash")["compress_ratios"]
    config = {
        **catalog.config("deepseek-v4-flash"),
        "num_hidden_layers": layers,
        "compress_ratios": list(ratios[:layers]),
        "n_routed_experts": experts,
        "num_nextn_predict_layers": 0,
        "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "routed_scaling_factor": 1.5,
        **others,
    }
    return Shape("deepseek-v4-flash", config, _deepseek_v4, 256)


def deepseek_v32(layers: int = 4, experts: int = 32, **others: Any) -> Shape:
    """Some of the layers with experts, and of the experts, which fit on one device."""
    config = {
        **catalog.config("deepseek-v3.2"),
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "first_k_dense_replace": 0,
        "n_group": 8,
        "topk_group": 4,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        **others,
    }
    return Shape("deepseek-v3.2", config, _deepseek_v32, 64)


def tiny(shape: Shape) -> Shape:
    """The same architecture, small enough for tests on a CPU."""
    small = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
        "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16,
        "index_head_dim": 32, "index_topk": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 4,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32,
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "num_hash_layers": 1, "sliding_window": 16 if "sliding_window" in shape.config else None,
    }  # fmt: skip
    known = {name: value for name, value in small.items() if name in shape.config}
    config = {**shape.config, **known}
    if shape.config.get("sliding_window") is None:
        config["sliding_window"] = None
    if "compress_ratios" in config:
        config["compress_ratios"] = [0, 4, 128, 4]
    return Shape(f"tiny {shape.name}", config, shape.tensors, min(shape.page_tokens, 128))
