"""The language model inside a multimodal checkpoint, as if it had been published by itself.

Encoders of images and sound are never read: requests are text. The language model's weights have a
prefix of their own, an older or a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.models.renamed_weights import RenamedWeights

_PREFIXES = {
    "model.": ("language_model.model.", "model.language_model."),
    "lm_head.": ("language_model.lm_head.", "lm_head."),
    "mtp.": ("mtp.",),
}
"""Prefixes of names, and those that stand for them in a multimodal checkpoint."""


@dataclass(frozen=True, slots=True)
class LanguageModelWeights(RenamedWeights):
    """The weights of a multimodal checkpoint under the names they have in a language model's."""

    def stored_name(self, name: str) -> str:
        outer = name[: name.index(".") + 1]
        names = [prefix + name[len(outer) :] for prefix in _PREFIXES[outer]]
        return next((stored for stored in names if self.weights.has(stored)), names[0])
