"""Families of attention layers: by head, in windows, over latents, or sparse by an indexer.

Where a config does not list which layers are windowed, the family has a rule for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtide.spec.config import Config
from kvtide.spec.families.layer_kinds import LayerKind, every, layer_count, listed_kinds, of_kind
from kvtide.spec.families.pool_parts import (
    Choices,
    attention_entry,
    history,
    latent_entry,
    scaled,
    top_k,
    windowed,
)
from kvtide.spec.pool import PoolSpec

Pools = Callable[[Config, Choices], list[PoolSpec]]
Rule = Callable[[Config], list[LayerKind]]


def attention(rule: Rule) -> Pools:
    """Full and windowed layers by head. `rule` says which is which where the config does not."""

    def pools(config: Config, choices: Choices) -> list[PoolSpec]:
        kinds = listed_kinds(config, LayerKind.FULL, LayerKind.WINDOW) or rule(config)
        entry = attention_entry(config, choices.kv)
        full, window = of_kind(kinds, LayerKind.FULL), of_kind(kinds, LayerKind.WINDOW)
        return [history(full, entry), *windowed(config, window, entry)]

    return pools


def all_full(config: Config) -> list[LayerKind]:
    return [LayerKind.FULL] * layer_count(config)


def all_windowed_if_set(config: Config) -> list[LayerKind]:
    kind = LayerKind.FULL if config.find("sliding_window") is None else LayerKind.WINDOW
    return [kind] * layer_count(config)


def all_windowed_if_used(config: Config) -> list[LayerKind]:
    return all_windowed_if_set(config) if config.flag("use_sliding_window") else all_full(config)


def windowed_above(config: Config) -> list[LayerKind]:
    """qwen2, qwen3: layers from `max_window_layers` on, and only with `use_sliding_window`."""
    if not config.flag("use_sliding_window") or config.find("sliding_window") is None:
        return all_full(config)
    first = config.count("max_window_layers", minimum=0)
    return [
        LayerKind.WINDOW if layer >= first else LayerKind.FULL
        for layer in range(layer_count(config))
    ]


def full_unless_used(config: Config) -> list[LayerKind]:
    if config.flag("use_sliding_window") and config.find("sliding_window") is not None:
        raise config.refusal("`use_sliding_window` without `layer_types`; list the layer types")
    return all_full(config)


def alternating(config: Config) -> list[LayerKind]:
    return every(config, 2, LayerKind.FULL, others=LayerKind.WINDOW)


def by_window_pattern(config: Config) -> list[LayerKind]:
    period = config.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return every(config, period, LayerKind.FULL, others=LayerKind.WINDOW)


# -- latent and sparse attention --------------------------------------------------------------


def mla(config: Config, choices: Choices) -> list[PoolSpec]:
    return [history(range(layer_count(config)), latent_entry(config, choices.kv))]


def dsa(config: Config, choices: Choices) -> list[PoolSpec]:
    """MLA with an index key per token, on the layers with an indexer of their own."""
    keys = scaled("index_key", config.count("index_head_dim"), choices.kv)
    (latents,) = mla(config, choices)
    return [
        replace(latents, selected=top_k(config)),
        PoolSpec("index", _indexed(config), keys, follows="kv"),
    ]


def mla_mtp(config: Config, choices: Choices) -> list[PoolSpec]:
    return [history([0], latent_entry(config, choices.kv))]


def dsa_mtp(config: Config, choices: Choices) -> list[PoolSpec]:
    """With an indexer of its own, whatever the layers before it have."""
    keys = scaled("index_key", config.count("index_head_dim"), choices.kv)
    return [*mla_mtp(config, choices), PoolSpec("index", (0,), keys, follows="kv")]


def _indexed(config: Config) -> tuple[int, ...]:
    """The layers with an indexer of their own; the others reuse an earlier selection."""
    layers = layer_count(config)
    if isinstance(pattern := config.values.get("index_topk_pattern"), str):
        config = Config(config.model, {**config.values, "index_topk_pattern": list(pattern)})
    modes = config.per_layer(layers, "indexer_types", "index_topk_pattern")
    if modes is None:
        period = config.count("index_topk_freq", default=1)
        skipped = config.count("index_skip_topk_offset", default=2, minimum=0)
        return tuple(i for i in range(layers) if max(i - skipped + 1, 0) % period == 0)
    known = {"F": True, "full": True, "S": False, "shared": False}
    if odd := [mode for mode in modes if str(mode) not in known]:
        raise config.refusal(f"indexer type {odd[0]!r} is not known here; use full or shared")
    return tuple(layer for layer, mode in enumerate(modes) if known[str(mode)])
