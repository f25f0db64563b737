"""The model that a command is given: a built-in name, a folder with a config.json, a GGUF file.

And its residency, where the command does not serve it.
"""

from __future__ import annotations

from pathlib import Path

from kvtide.cli.console import CommandError
from kvtide.models.gguf import GGUF, architectures, is_gguf
from kvtide.spec import ModelMemory, catalog
from kvtide.spec.families import KVDType, declare
from kvtide.spec.residency import Residency

HELP = "a built-in name, a folder with a config.json, or a .gguf file"
RESIDENT_HELP = (
    "all: every pool is in device pages; hot:B: pools that attention selects from are on the host, "
    "and a running request has B entries of each on the device"
)


def model_memory(model: str, page_tokens: int | None, kv_dtype: str | None) -> ModelMemory:
    """The memory that the model declares; a GGUF file's is that of `kvtide serve`."""
    path = Path(model)
    if not is_gguf(path):
        return catalog.resolve(model, page_tokens, kv_dtype)
    return declare(
        architectures.config(GGUF(path)),
        model=path.resolve().stem,
        page_tokens=page_tokens,
        kv_dtype=None if kv_dtype is None else KVDType.parse(kv_dtype),
    )


def active_params(model: str) -> int | None:
    """Parameters that one token passes through, where they are known."""
    return None if is_gguf(Path(model)) else catalog.active_params(model)


def residency(text: str) -> Residency:
    """`all` or `hot:B`; `auto` needs the machine that serves."""
    found = Residency.parse(text)
    if found.auto:
        raise CommandError(
            "--resident auto: a server chooses by the memory that it finds; use all or hot:4096"
        )
    return found
