"""Which layer of a model is of which kind, as its config lists it.

A family adds its own rule for configs that list nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvtide.spec.config import Config


class LayerKind(Enum):
    """What a layer keeps between tokens."""

    FULL = auto()
    WINDOW = auto()
    LINEAR = auto()
    CONV = auto()
    NOTHING = auto()


_KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.LINEAR,
    "mamba": LayerKind.LINEAR,
    "conv": LayerKind.CONV,
    "mlp": LayerKind.NOTHING,
    "moe": LayerKind.NOTHING,
}


def language_model(config: Config) -> Config:
    """The language model's part of a multimodal config; its type is its own, or the wrapper's."""
    text = config.nested("text_config")
    if text is None:
        return config
    return text.beneath({"model_type": config.find("model_type")})


def layer_count(config: Config) -> int:
    if config.find("num_hidden_layers") is not None:
        return config.count("num_hidden_layers")
    kinds = config.find("layers_block_type", "hybrid_override_pattern")
    if isinstance(kinds, list | str) and kinds:
        return len(kinds)
    return config.count("num_hidden_layers")


def listed_kinds(config: Config, *allowed: LayerKind) -> list[LayerKind] | None:
    """Layer kinds as the config lists them, or None where it leaves them to the family's rule.

    A kind that the family does not have is refused: leaving its state out would be a lie.
    """
    types = config.per_layer(layer_count(config), "layer_types", "layers_block_type")
    if types is None:
        return None
    known = {name: kind for name, kind in _KINDS.items() if kind in allowed}
    if odd := [name for name in types if str(name) not in known]:
        raise config.refusal(
            f"layer type {odd[0]!r} is not one this family has; use {', '.join(known)}"
        )
    return [known[str(name)] for name in types]


def every(config: Config, period: int, kind: LayerKind, others: LayerKind) -> list[LayerKind]:
    """Every period-th layer is of `kind`, counted so that the last of each period is it."""
    return [others if (i + 1) % period else kind for i in range(layer_count(config))]


def of_kind(kinds: Sequence[LayerKind], wanted: LayerKind) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kind == wanted]
