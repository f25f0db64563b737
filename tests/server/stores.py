"""Stores that do not do as stores should: named in URLs as `tests.server.stores:Class`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtide.storage import Removed, Store, StoreStatus, open_store
from kvtide.storage.memory_store import MemoryStore
from kvtide.storage.url import StoreURL


class Refusing:
    def __init__(self, url: StoreURL, space: bytes) -> None:
        raise ValueError("not today")


class Telling:
    """Says more than it should."""

    def __init__(self, url: StoreURL, space: bytes) -> None:
        raise ValueError(f"no way in with {url.password}")


class _Before(MemoryStore):
    """A dictionary that does something before every call."""

    def __init__(self, url: StoreURL, space: bytes) -> None:
        super().__init__(StoreURL("memory", path=url.settings.get("name", "")), space)

    def before(self, call: str) -> None:
        raise NotImplementedError

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.before("exists")
        return super().exists(keys)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        self.before("read")
        return super().read(keys, targets)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        self.before("write")
        return super().write(keys, sources)

    def clear(self) -> Removed:
        self.before("clear")
        return super().clear()

    def status(self) -> StoreStatus:
        self.before("status")
        return super().status()


class Frozen(_Before):
    """`?calls=write,read`: these never return, until `thaw`; on threads that hold the process."""

    ice = threading.Event()

    def __init__(self, url: StoreURL, space: bytes) -> None:
        super().__init__(url, space)
        self.name = "frozen"
        self._calls = url.settings.get("calls", "").split(",")
        self._pool = ThreadPoolExecutor()
        if "open" in self._calls:
            self.before("open")

    def before(self, call: str) -> None:
        if call in self._calls:
            self._pool.submit(self.ice.wait).result()

    def close(self) -> None:
        closed.append(self.name)


closed: list[str] = []
"""Stores that were closed in this process."""


class Failing(_Before):
    """`?calls=clear`: these raise."""

    def __init__(self, url: StoreURL, space: bytes) -> None:
        super().__init__(url, space)
        self._calls = url.settings.get("calls", "").split(",")

    def before(self, call: str) -> None:
        if call in self._calls:
            raise ArithmeticError(f"{call} does not add up")


def slow(url: StoreURL, space: bytes) -> Store:
    """`?path=…`: a file store that takes its time to write."""
    store: Any = open_store(f"file://{url.settings['path']}?cap=1GB", space)
    write = store.write

    def written(keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        time.sleep(1.0)
        done: list[bool] = write(keys, sources)
        return done

    store.write = written
    found: Store = store
    return found
