"""What the settings of every plug-in have in common: a store, a fingerprint, nothing unknown.

An engine knows a model by name, and other weights may come to lie under it. So pages are known by
the weights, too: by a fingerprint that the user gives, or by a digest of the model's files. Where
there is neither, the plug-in refuses to start.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from kvtide.models.weight_digest import digest_files
from kvtide.storage import StoreError

KVTIDES = frozenset({"url", "fingerprint"})
"""Settings of all plug-ins."""


def require_store(settings: Mapping[str, Any], where: str) -> str:
    """The URL of the store. `where` the settings stand, as their user calls it."""
    url = settings.get("url")
    if not isinstance(url, str) or not url:
        raise StoreError(
            f'{where} names no store; add "url", such as "file:///var/cache/kvtide?cap=200GB"'
        )
    return url


def refuse_unknown(
    settings: Mapping[str, Any], where: str, engines: Set[str] = frozenset()
) -> None:
    """Raise if there are others than kvtide's and the engine's."""
    if unknown := settings.keys() - KVTIDES - engines:
        raise StoreError(
            f"{where} has {', '.join(sorted(unknown))}; kvtide knows url and fingerprint, "
            "and the store's settings belong in its URL"
        )


def weights_of(
    settings: Mapping[str, Any], where: str, model: str, revision: str | None = None
) -> str:
    """What stands for the weights of a model: its fingerprint, or a digest of its files."""
    if fingerprint := str(settings.get("fingerprint", "")):
        return fingerprint
    place = _weights_place(model, revision)
    digest = digest_files(place) if place is not None else None
    if digest is None:
        raise StoreError(
            f"{where}: the weights of {model or 'the models'} are not known on this machine, and "
            'other ones may come under this name; add "fingerprint", such as a revision'
        )
    return digest.hex()


def _weights_place(model: str, revision: str | None) -> Path | None:
    """The folder or file that the name is, or its snapshot in the cache of the Hub."""
    if not model:
        return None
    if Path(model).exists():
        return Path(model)
    try:  # Every engine that takes names of the Hub brings its library along.
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # The name of something else.
        return None
    return Path(config).parent if isinstance(config, str) else None
