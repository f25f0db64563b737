"""What llama.cpp's converter did to a model, undone: from a GGUF file to HF's names and config.

One row per architecture says which config its metadata amounts to, what its tensors are called
outside, and how they were changed on the way in. A tensor or a setting that the row does not
know is refused: leaving it out would give a model that runs and talks nonsense.

Two changes are undone. Llama's q and k rows were put in pairs, for a rotation of neighbours,
where HF's rotation pairs the first half of a head with the second. Gemma's norms were stored
as 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvtide.models.gguf.gguf_file import GGUF
from kvtide.models.gguf.metadata import Metadata

if TYPE_CHECKING:  # A config is read without torch; only the weights need it.
    from torch import Tensor

Rearrange: TypeAlias = "Callable[[Tensor], Tensor]"

LLAMA3_FACTORS = "rope_freqs.weight"
GEMMA3_WINDOW_PERIOD = 6
GEMMA3_LOCAL_ROPE_THETA = 10_000.0
GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose queries are scaled by hidden size per head; only its depth tells it."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of HF's name comes from."""

    name: str
    change: Rearrange | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table. `parts` are the names within a layer: GGUF's → HF's."""

    config: Callable[[GGUF], dict[str, object]]
    parts: Mapping[str, str]
    changes: Callable[[Metadata], Mapping[str, Rearrange]]
    """Changes to undo, by the last name before `.weight` or `.bias`."""


def config(file: GGUF) -> dict[str, object]:
    """The fields of the config.json that this model would have."""
    return _row(file).config(file)


def sources(file: GGUF) -> dict[str, Source]:
    """Every tensor of the model by HF's name."""
    row = _row(file)
    changes = row.changes(file.metadata)
    found: dict[str, Source] = {}
    for name in file.tensors.keys() - {LLAMA3_FACTORS}:  # It is in the config.
        outer = _outside(name, row.parts)
        if outer is None:
            raise file.metadata.refusal(
                f"tensor {name} has no place in {_name(file)} as it is read here; use the "
                "model's safetensors folder"
            )
        found[outer] = Source(name, changes.get(name.split(".")[-2]))
    return found


def _name(file: GGUF) -> str:
    return file.metadata.text("general.architecture")


def _row(file: GGUF) -> Architecture:
    if _name(file) not in ARCHITECTURES:
        raise file.metadata.refusal(
            f"architecture {_name(file)} is not read from GGUF here, only "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors folder"
        )
    return ARCHITECTURES[_name(file)]


# -- names -------------------------------------------------------------------------------------

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_PARTS = {
    **_LLAMA_PARTS,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA3_PARTS = {
    **_QWEN3_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _outside(name: str, parts: Mapping[str, str]) -> str | None:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case [top, ("weight" | "bias") as kind] if top in _TOP:
            return f"{_TOP[top]}.{kind}"
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
    return None


# -- changes -----------------------------------------------------------------------------------


def _halves_from_pairs(heads: int) -> Rearrange:
    """Rows of each head from the order 0, h, 1, h+1, … back to 0, 1, …, h, h+1, …"""

    def change(rows: Tensor) -> Tensor:
        pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    return change


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


def _llama_changes(metadata: Metadata) -> Mapping[str, Rearrange]:
    heads = metadata.count("llama.attention.head_count")
    kv_heads = metadata.count("llama.attention.head_count_kv", heads)
    return {"attn_q": _halves_from_pairs(heads), "attn_k": _halves_from_pairs(kv_heads)}


def _no_changes(metadata: Metadata) -> Mapping[str, Rearrange]:
    return {}


def _gemma3_changes(metadata: Metadata) -> Mapping[str, Rearrange]:
    norms = [part for part in [*_GEMMA3_PARTS, "output_norm"] if part.endswith("_norm")]
    return dict.fromkeys(norms, _minus_one)


# -- configs -----------------------------------------------------------------------------------


def _common(file: GGUF, prefix: str) -> dict[str, object]:
    """What every architecture's metadata says alike."""
    metadata = file.metadata
    hidden = metadata.count(f"{prefix}.embedding_length")
    heads = metadata.count(f"{prefix}.attention.head_count")
    head_dim = metadata.count(f"{prefix}.attention.key_length", hidden // max(1, heads))
    theta = metadata.number(f"{prefix}.rope.freq_base", 10_000.0)
    fields: dict[str, object] = {
        "vocab_size": _embedding_rows(file),
        "hidden_size": hidden,
        "intermediate_size": metadata.count(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": metadata.count(f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{prefix}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count(f"{prefix}.context_length"),
        "rms_norm_eps": _decimal(metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, prefix, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    return fields | _token_ids(metadata)


def _embedding_rows(file: GGUF) -> int:
    """The vocabulary is what the embedding has rows for; metadata may leave it out."""
    if "token_embd.weight" not in file.tensors:
        raise file.metadata.refusal("there is no tensor token_embd.weight; use a whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _decimal(single: float) -> float:
    """1e-05, not the 9.999999747378752e-06 that a float32 makes of it."""
    return float(f"{single:.6g}")


def _token_ids(metadata: Metadata) -> dict[str, object]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {field: f"tokenizer.ggml.{name}_token_id" for field, name in keys.items()}
    return {field: metadata.count(key) for field, key in found.items() if metadata.has(key)}


def _rope_scaling(file: GGUF, prefix: str, theta: float, head_dim: int) -> dict[str, object] | None:
    metadata = file.metadata
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number(f"{prefix}.rope.scaling.factor")}
    if kind != "none":
        raise metadata.refusal(
            f"RoPE is scaled by {kind}, which is not read from GGUF here; use the model's "
            "safetensors folder"
        )
    if LLAMA3_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_dim)
    return None


def _llama3_scaling(file: GGUF, theta: float, head_dim: int) -> dict[str, object]:
    """Llama 3.1's scaling, of which the file keeps only what each frequency is divided by.

    Its settings are the published ones with the largest divisor as the factor, if and only if they
    give the divisors that stand in the file.
    """
    found = file.floats(LLAMA3_FACTORS).astype(np.float64)
    factor, low, high, original = float(found.max()), 1.0, 4.0, 8192
    turns = original * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
        raise file.metadata.refusal(
            f"RoPE is scaled by {LLAMA3_FACTORS} in a way that is not Llama 3.1's; use the model's "
            "safetensors folder"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _plain(file: GGUF) -> dict[str, object]:
    """Llama and those that differ from it in what their files hold, not in their settings."""
    name = _name(file)
    fields = _common(file, name) | {
        "model_type": name,
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    head_dim = fields["head_dim"]
    rotated = file.metadata.values.get(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise file.metadata.refusal(
            f"RoPE turns {rotated} of the {head_dim} dimensions of a head, which is not read from "
            "GGUF here; use the model's safetensors folder"
        )
    return fields


def _gemma3(file: GGUF) -> dict[str, object]:
    metadata = file.metadata
    layers, hidden = metadata.count("gemma3.block_count"), metadata.count("gemma3.embedding_length")
    fields = _common(file, "gemma3")
    scaled_by_width = layers == GEMMA3_27B_LAYERS
    query_scale = hidden // metadata.count("gemma3.attention.head_count")
    period = metadata.count("gemma3.attention.sliding_window_pattern", GEMMA3_WINDOW_PERIOD)
    return fields | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scale if scaled_by_width else fields["head_dim"],
        "sliding_window": metadata.count("gemma3.attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(layers)
        ],
        "rope_local_base_freq": metadata.number(
            "gemma3.rope.freq_base_swa", GEMMA3_LOCAL_ROPE_THETA
        ),
    }


# -- the table ---------------------------------------------------------------------------------

ARCHITECTURES = {
    "llama": Architecture(_plain, _LLAMA_PARTS, _llama_changes),
    "qwen2": Architecture(_plain, _LLAMA_PARTS, _no_changes),
    "qwen3": Architecture(_plain, _QWEN3_PARTS, _no_changes),
    "gemma3": Architecture(_gemma3, _GEMMA3_PARTS, _gemma3_changes),
}
