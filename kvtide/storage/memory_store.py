"""`memory:` a dictionary for tests and for trying things out. Forgotten with the process.

Stores of the same name share their objects (`memory:shared`); without a name each has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtide.storage.store import MISSING, Removed, StoreStatus
from kvtide.storage.url import StoreURL

_SHARED: dict[tuple[str, bytes], dict[bytes, bytes]] = {}


class MemoryStore:
    def __init__(self, url: StoreURL, space: bytes) -> None:
        url.only()
        self.name = str(url)
        shared = url.path
        self.forgets = not shared
        self._objects = _SHARED.setdefault((shared, space), {}) if shared else {}
        self._lock = threading.Lock()

    def lend(self, block: memoryview) -> None:
        """Nothing to register."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._objects for key in keys]

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        return [self._read(key, target) for key, target in zip(keys, targets, strict=True)]

    def _read(self, key: bytes, target: memoryview) -> int:
        found = self._objects.get(key)
        if found is None or len(found) > len(target):
            return MISSING
        target[: len(found)] = found
        return len(found)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        for key, source in zip(keys, sources, strict=True):
            self._objects.setdefault(key, bytes(source))
        return [True] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self._objects.pop(key, None) is not None for key in keys)

    def clear(self) -> Removed:
        with self._lock:
            kept = list(self._objects.values())
            self._objects.clear()
        return Removed(len(kept), sum(map(len, kept)))

    def status(self) -> StoreStatus:
        sizes = [len(found) for found in self.contents()]
        return StoreStatus(len(sizes), sum(sizes))

    def contents(self) -> list[bytes]:
        """All objects of this space."""
        return list(self._objects.values())

    def close(self) -> None:
        """Nothing to let go of: what others share stays."""
