"""Models known by name, and models on disk: both come down to a `config.json`.

A built-in name is a file in `configs/`: the public config's fields that decide memory and size,
and under `kvtide` what the planner wants to know besides. Only configs that are
known exactly are here; any other model is a folder with its `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvtide.spec.families import KVDType, declare
from kvtide.spec.memory import ModelMemory
from kvtide.spec.pool import SpecError


def names() -> list[str]:
    """The built-in names."""
    return sorted(_builtin())


def resolve(
    name_or_path: str, page_tokens: int | None = None, kv_dtype: KVDType | str | None = None
) -> ModelMemory:
    """The memory of a built-in model, of a folder with a config.json, or of that file itself."""
    kind = KVDType.parse(kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
    source = _find(name_or_path)
    label = name_or_path if name_or_path in _builtin() else _label(Path(name_or_path))
    return declare(_read(source), model=label, page_tokens=page_tokens, kv_dtype=kind)


def config(name_or_path: str) -> dict[str, Any]:
    """What is known of a model's config."""
    return {name: value for name, value in _read(_find(name_or_path)).items() if name != "kvtide"}


def active_params(name_or_path: str) -> int | None:
    """Parameters that one token passes through, where they are known: 2 FLOPs each to prefill."""
    notes = _read(_find(name_or_path)).get("kvtide")
    count = notes.get("active_params") if isinstance(notes, Mapping) else None
    return count if isinstance(count, int) else None


def _builtin() -> dict[str, Traversable]:
    files = resources.files("kvtide.spec").joinpath("configs").iterdir()
    return {f.name.removesuffix(".json"): f for f in files if f.name.endswith(".json")}


def _find(name_or_path: str) -> Traversable:
    builtin = _builtin().get(name_or_path)
    if builtin is not None:
        return builtin
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise SpecError(f"{name_or_path}: the folder has no config.json; put the model's there")
    if not path.is_file():
        raise SpecError(
            f"'{name_or_path}' is neither a built-in model nor a folder with a config.json; "
            f"the built-in models are {', '.join(names())}"
        )
    return path


def _label(path: Path) -> str:
    """A model on disk goes by its folder's name."""
    resolved = path.resolve()
    return resolved.name if resolved.is_dir() else resolved.parent.name


def _read(source: Traversable) -> Mapping[str, object]:
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as flaw:
        raise SpecError(f"{source}: not readable as JSON ({flaw}); write it out again") from None
    if not isinstance(values, dict):
        raise SpecError(f"{source}: holds a {type(values).__name__}; a config is a JSON object")
    return values
