"""Caches with a store behind the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from kvtide.cache import FetchPatience
from kvtide.cache.fetching import Fetch
from kvtide.cache.hardware import formats
from kvtide.spec import ModelMemory
from kvtide.storage import Store, open_store
from kvtide.testing.faulty_store import FaultyStore
from tests.cache.building import Rig
from tests.cache.memories import FULL

_NUMBERS = itertools.count()
MARKS = 1
"""Objects of a store beside pages: the mark of their shape."""
WAIT = FetchPatience("wait_complete", min_tokens=1)


def new_url() -> str:
    """Of a store that is unused yet."""
    return f"memory:test-{next(_NUMBERS)}"


def opened(rigs: list[Rig], url: str, memory: ModelMemory = FULL, **options: Any) -> Rig:
    """A rig with a store attached, whose calls go wrong as `faulty` says."""
    rig = Rig(memory, **{"host": 64, "device": 32, "patience": WAIT, **options})
    attach(rig, url)
    rigs.append(rig)
    return rig


def attach(rig: Rig, url: str) -> FaultyStore:
    store = FaultyStore(open_store(url, rig.cache.storage.space))
    rig.cache.storage.attach(store)
    return store


def faulty(rig: Rig) -> FaultyStore:
    """The store that was attached last."""
    store = rig.cache.storage.stores[-1].link.store
    assert isinstance(store, FaultyStore)
    return store


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.0005)


def settle(rig: Rig, timeout_s: float = 60.0) -> None:
    """Let all copies and all storage requests end."""
    deadline = time.monotonic() + timeout_s
    rig.settle()
    while rig.cache.storage.at_work:
        assert time.monotonic() < deadline, "a store that never ends"
        time.sleep(0.0005)
        rig.settle()


def begun(rig: Rig, tokens: list[int], **options: Any) -> Fetch:
    fetch = rig.cache.storage.fetch(rig.cache.prompt(tokens, **options))
    assert fetch is not None
    return fetch


def fetched(rig: Rig, tokens: list[int], **options: Any) -> Fetch:
    fetch = begun(rig, tokens, **options)
    settle(rig)
    assert fetch.over
    return fetch


def stored(rig: Rig, tokens: list[int], **options: Any) -> None:
    rig.remember(tokens, **options)
    settle(rig)


def readable(rig: Rig, tokens: list[int]) -> int:
    """How many tokens a request finds, having read every byte of them."""
    lease = rig.started(tokens)
    rig.settle()
    assert not lease.failed and rig.misread(lease) == []
    rig.cache.release(lease)
    return lease.cached_tokens


def keys_of(rig: Rig, tokens: list[int], anchor: str = "kv") -> list[bytes]:
    """The keys under which a store has the whole pages of a prompt; `anchor` may be a sidecar."""
    one = formats(rig.memory, rig.cache.config)[anchor]
    return [one.key(*page) for page in rig.cache.index.page_keys(rig.cache.prompt(tokens))]


def in_store(rig: Rig, url: str, tokens: list[int], anchor: str = "kv") -> list[bool]:
    store: Store = open_store(url, rig.cache.storage.space)
    return store.exists(keys_of(rig, tokens, anchor))
