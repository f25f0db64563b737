"""A store that keeps calls until its gate is opened."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence

import pytest

from kvtide.storage import Removed, Store, StoreStatus
from kvtide.transfer.store_link import StoreLink

LONGEST_S = 60.0
"""A test that forgot the gate ends all the same."""


class Gated:
    """`calls` ("exists", "read", "write") wait at the gate, if they are for any of `keys`.

    keys   None for all
    asked  how many calls of each kind have come
    """

    def __init__(
        self, inner: Store, calls: Collection[str], keys: Collection[bytes] | None = None
    ) -> None:
        self.name = inner.name
        self.gate = threading.Event()
        self.asked: Counter[str] = Counter()
        self._inner = inner
        self._calls = calls
        self._keys = keys

    def _pass(self, call: str, keys: Sequence[bytes]) -> None:
        self.asked[call] += 1
        concerned = self._keys is None or any(key in self._keys for key in keys)
        if call in self._calls and concerned:
            assert self.gate.wait(LONGEST_S), "the gate stays shut"

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._pass("exists", keys)
        return self._inner.exists(keys)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        self._pass("read", keys)
        return self._inner.read(keys, targets)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        self._pass("write", keys)
        return self._inner.write(keys, sources)

    def lend(self, block: memoryview) -> None:
        self._inner.lend(block)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._inner.remove(keys)

    def clear(self) -> Removed:
        return self._inner.clear()

    def status(self) -> StoreStatus:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def one_page_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that are made from now on ask for every page by itself."""
    monkeypatch.setitem(StoreLink.__init__.__kwdefaults__, "batch_bytes", 1)
