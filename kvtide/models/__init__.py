"""One file per family: the forward pass over the pools that `spec.families` declares for it.

`registry`    a config's `model_type` → its family; `build` makes the model
`model`       what the engine needs of a model
`checkpoint`  config, weights and tokenizer on disk: a folder, or a GGUF file (`gguf`)

`docs/ADDING_A_MODEL.md` says how to add a family.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.models.registry import FAMILIES, Model, build

__all__ = ["FAMILIES", "Model", "build"]


def __getattr__(name: str) -> Any:
    """The registry imports every family, and with them torch, which `models.gguf` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module("kvtide.models.registry"), name)
