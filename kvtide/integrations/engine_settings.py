"""What the settings of every plug-in have in common: a store, a fingerprint, nothing unknown."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

from kvtide.storage import StoreError

log = logging.getLogger("kvtide")


def require_store(settings: Mapping[str, Any], where: str) -> str:
    """The URL of the store. `where` the settings stand, as their user calls it."""
    url = settings.get("url")
    if not isinstance(url, str) or not url:
        raise StoreError(
            f'{where} names no store; add "url", such as "file:///var/cache/kvtide?cap=200GB"'
        )
    return url


def refuse_unknown(settings: Mapping[str, Any], known: Set[str], where: str) -> None:
    """`known` to the engine or to kvtide."""
    if unknown := settings.keys() - known:
        raise StoreError(
            f"{where} has {', '.join(sorted(unknown))}; kvtide knows url and fingerprint, "
            "and the store's settings belong in its URL"
        )


def fingerprint_of(settings: Mapping[str, Any], where: str, known_by: str) -> str:
    """What stands for the weights. Without it a warning says that `known_by` does."""
    if "fingerprint" not in settings:
        log.warning(
            'pages are known by %s alone; give "fingerprint" in %s, such as a revision, if the '
            "model's weights may change",
            known_by,
            where,
        )
    return str(settings.get("fingerprint", ""))
