"""From a published `config.json` to a model's memory: one short function per family.

This is the only place outside `models/` that knows models by name. `declare` looks the config's
`model_type` up in one table; the row names a function that reads the config and returns pools.

`pool_parts`          entries and pools, which families are made of
`layer_kinds`         which layer is of which kind
`attention_families`  by head, windows, latents, index keys
`recurrent_families`  Mamba2, gated delta, KDA, short convolutions
`deepseek_v4`         windows and compressed streams

Anchors have the same names in every family: `kv` keeps the whole history, `swa` the last window,
`state` a checkpoint of recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtide.spec.config import Config
from kvtide.spec.families import attention_families as att
from kvtide.spec.families import recurrent_families as rec
from kvtide.spec.families.deepseek_v4 import deepseek_v4, deepseek_v4_mtp
from kvtide.spec.families.layer_kinds import language_model, layer_count
from kvtide.spec.families.pool_parts import Choices, KVDType, attention_entry, by_head, history
from kvtide.spec.memory import ModelMemory
from kvtide.spec.pool import NOTHING, DType, PoolSpec, SpecError

__all__ = [
    "PAGE_TOKENS",
    "Family",
    "KVDType",
    "declare",
    "declare_eagle3",
    "declare_mtp",
    "draft_for",
    "language_model",
    "layer_count",
    "mtp_layers",
    "supported",
]

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: how to read a config, and the defaults of the caller's settings.

    `mtp` reads what the first of the model's layers for multi-token prediction keeps.
    """

    pools: Callable[[Config, Choices], list[PoolSpec]]
    page_tokens: int = PAGE_TOKENS
    kv: KVDType = KVDType.BF16
    mtp: Callable[[Config, Choices], list[PoolSpec]] | None = None


def declare(
    config: Mapping[str, object],
    *,
    model: str,
    page_tokens: int | None = None,
    kv_dtype: KVDType | None = None,
    checkpoint_tokens: int | None = None,
) -> ModelMemory:
    """The memory of the model that this `config.json` describes."""
    fields, family = _family(Config(model, config))
    page = family.page_tokens if page_tokens is None else page_tokens
    if page < 1:
        raise fields.refusal(f"a page of {page} tokens; use at least 1")
    grid = page if checkpoint_tokens is None else checkpoint_tokens
    choices = Choices(page, kv_dtype or family.kv, grid)
    pools = [pool for pool in family.pools(fields, choices) if pool.layers or pool.entry is NOTHING]
    return ModelMemory(model, page, tuple(pools), layer_count(fields))


def declare_mtp(
    config: Mapping[str, object], *, memory: ModelMemory, kv_dtype: KVDType | None = None
) -> ModelMemory:
    """What the first of this model's layers for multi-token prediction keeps, for `with_draft`.

    Other such layers are not used: the first one drafts every token.
    """
    fields, family = _family(Config(memory.model, config))
    if family.mtp is None:
        raise fields.refusal(
            f"model_type {fields.find('model_type')!r} has no layer for multi-token prediction "
            "that is known here; use --speculate ngram or eagle3"
        )
    if not mtp_layers(config):
        names = " or ".join(f"`{name}`" for name in _MTP_LAYERS)
        raise fields.refusal(
            f"config.json gives it no layer for multi-token prediction ({names} of at least 1); "
            "use --speculate ngram or eagle3"
        )
    choices = Choices(memory.page_tokens, kv_dtype or family.kv, memory.page_tokens)
    return ModelMemory("MTP", memory.page_tokens, tuple(family.mtp(fields, choices)), 1)


_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""As DeepSeek and GLM name their number, and as Qwen does."""


def mtp_layers(config: Mapping[str, object]) -> int:
    """How many layers for multi-token prediction the model has, of those known here."""
    fields, family = _family(Config(str(config.get("model_type")), config))
    return 0 if family.mtp is None else fields.count(*_MTP_LAYERS, default=0, minimum=0)


def declare_eagle3(
    config: Config, *, memory: ModelMemory, kv_dtype: KVDType | None = None
) -> ModelMemory:
    """What an EAGLE3 draft with this config keeps beside its target, for `with_draft`."""
    layers, entry = layer_count(config), attention_entry(config, kv_dtype or KVDType.BF16)
    pool = history(range(layers), entry)
    return ModelMemory("EAGLE3", memory.page_tokens, (pool,), layers)


def _family(config: Config) -> tuple[Config, Family]:
    """The language model's fields, completed, and its row of the table."""
    fields = language_model(config)
    model_type = fields.find("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.refusal(
            f"model_type {model_type!r} is not a family known here; use one of "
            f"{', '.join(supported())}, or declare it (docs/ADDING_A_MODEL.md)"
        )
    return fields.beneath(_LEFT_OUT.get(str(model_type), {})), family


def supported() -> list[str]:
    """Every `model_type` that `declare` reads."""
    return sorted(_FAMILIES)


def draft_for(memory: ModelMemory, layers: int) -> ModelMemory:
    """An EAGLE3-style draft of so many layers, for `with_draft`, when no draft config is at hand.

    Its heads are the target's where the target keeps K and V by head; beside latents it has 8 KV
    heads of 128 in bf16. `declare_eagle3` reads a real draft's config.
    """
    if layers < 1:
        raise SpecError(f"draft: {layers} layers; use at least 1, or no draft")
    entries = [p.entry for p in memory.pools if [f.name for f in p.entry.fields] == ["k", "v"]]
    entry = entries[0] if entries else by_head(8, 128, DType.BF16)
    pool = PoolSpec("kv", tuple(range(layers)), entry)
    return ModelMemory(f"{layers}-layer draft", memory.page_tokens, (pool,), layers)


# -- the table -------------------------------------------------------------------------------

_GATED_DELTA = Family(rec.gated_delta, mtp=rec.gated_delta_mtp)
_FULL_ATTENTION = Family(att.attention(att.all_full))
_GEMMA3 = Family(att.attention(att.by_window_pattern))
_ALTERNATING = Family(att.attention(att.alternating))

_FAMILIES: dict[str, Family] = {
    "bamba": Family(rec.bamba),
    "deepseek_v2": Family(att.mla),
    "deepseek_v3": Family(att.mla, mtp=att.mla_mtp),
    "deepseek_v32": Family(att.dsa, mtp=att.dsa_mtp),
    "deepseek_v4": Family(deepseek_v4, 256, KVDType.FP8, deepseek_v4_mtp),
    "falcon_h1": Family(rec.falcon_h1),
    "gemma2": _ALTERNATING,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm4_moe_lite": Family(att.mla, mtp=att.mla_mtp),
    "glm_moe_dsa": Family(att.dsa, mtp=att.dsa_mtp),
    "gpt_oss": _ALTERNATING,
    "granitemoehybrid": Family(rec.granite_hybrid),
    "kimi_linear": Family(rec.kimi_linear),
    "lfm2": Family(rec.lfm2),
    "llama": _FULL_ATTENTION,
    "mistral": Family(att.attention(att.all_windowed_if_set)),
    "mixtral": Family(att.attention(att.all_windowed_if_set)),
    "nemotron_h": Family(rec.nemotron_h),
    "qwen2": Family(att.attention(att.windowed_above)),
    "qwen3": Family(att.attention(att.windowed_above)),
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_moe": Family(att.attention(att.all_windowed_if_used)),
    "qwen3_next": _GATED_DELTA,
    "smollm3": Family(att.attention(att.full_unless_used)),
}

# Published configs of these families leave fields to the family's defaults.
_GEMMA_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_QWEN_MTP = {"mtp_num_hidden_layers": 1}
_LEFT_OUT: dict[str, Mapping[str, object]] = {
    "gemma2": _GEMMA_HEADS,
    "gemma3": _GEMMA_HEADS,
    "gemma3_text": _GEMMA_HEADS,
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "qwen3_5": _QWEN_MTP,
    "qwen3_5_moe": _QWEN_MTP,
    "qwen3_5_moe_text": _QWEN_MTP,
    "qwen3_5_text": _QWEN_MTP,
    "qwen3_next": _QWEN_MTP,
}
