"""DeepSeek-V4's weights under one set of names, whichever of two a checkpoint was written with.

`save_pretrained` writes `model.layers.0.attn.norm.weight`, and these are the names asked for. The
lab publishes the same without `model.`, with a few words changed. A layer for multi-token
prediction is published by the lab alone, under `mtp.0.`, and asked for there; inside it the words
change as in any other layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.models.renamed_weights import RenamedWeights

_LAB_WORDS = {
    "embed_tokens.": "embed.",
    "hc_head.hc_": "hc_head_",
    "attn.norm.": "attn.kv_norm.",
}
"""Where a name or a part of it begins so, and how the lab writes it."""


@dataclass(frozen=True, slots=True)
class DeepSeekV4Weights(RenamedWeights):
    """The weights of a checkpoint in either naming."""

    def stored_name(self, name: str) -> str:
        """Where it is; where there is none, where it would be."""
        if self.weights.has(name):
            return name
        lab = lab_name(name)
        return lab if self.weights.has(lab) or self.weights.has(_LABS_OWN) else name


_LABS_OWN = "embed.weight"
"""What only the lab's checkpoints have: in them, what is missing is named as the lab would."""


def lab_name(name: str) -> str:
    """A name of `save_pretrained` as the lab writes it."""
    name = f".{name.removeprefix('model.')}"
    for ours, theirs in _LAB_WORDS.items():
        name = name.replace(f".{ours}", f".{theirs}")
    return name[1:]
