"""Pages of another engine as objects of a store: keys, labels, checksums, counters.

An engine hands over the memory of pages, each as one or more runs of bytes, under keys of its own.
A page becomes one object: its runs one after the other, then the label of `storage.objects`, with a
checksum over all. It goes through staging memory of the calling thread. So a page of several runs
is one object, which is there whole or not at all; a corrupt one never touches the engine's
memory; and memory that a failed call may still write to is never the engine's.

| what differs | where it stands | what a reader finds |
|---|---|---|
| engine, model, slice of the ranks | the store's space | nothing |
| pool, dtype, page size, layout, lengths | the pool's table, in key and label | nothing |
| bytes | the checksum | a miss, a counter; the object is removed |

A store that fails costs misses; after three failures in a row it is left alone for five seconds.
The cap on its size is the store's own (`file://…?cap=200GB`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.integrations.engine_metrics import BYTES, PAGES, SECONDS
from kvtide.storage import CorruptObjectError, LabelledFormat, Removed, Store, open_store
from kvtide.storage.bounce_buffers import BounceBuffers
from kvtide.storage.codec.opening import is_lossy
from kvtide.storage.objects import object_key
from kvtide.storage.store import CORRUPT, MISSING, LingeringError, StoreError
from kvtide.storage.url import StoreURL
from kvtide.transfer.breaker import Breaker

T = TypeVar("T")
MemoryRuns = Sequence[memoryview]
"""The memory of one page, as bytes."""

BATCH_BYTES = 32 << 20
"""Of staging memory per thread; a longer batch goes in several calls."""

log = logging.getLogger("kvtide")


def space_of(engine: str, model: str, part: Mapping[str, object]) -> bytes:
    """The space of a model's objects. `part` says which slice of it this rank has."""
    described = json.dumps([engine, model, dict(part)], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).digest()


class PagePool:
    """The pages of one pool, all equally long. `described` is dtype, page size, layout."""

    def __init__(
        self, name: str, page_bytes: int, described: Mapping[str, object], space: bytes
    ) -> None:
        table = json.dumps([name, page_bytes, dict(described)], sort_keys=True, default=str)
        self.name = name
        self.format = LabelledFormat(page_bytes, table.encode(), space)
        self._table = hashlib.sha256(table.encode()).digest()

    def key(self, page: bytes) -> bytes:
        return object_key(page, self.name.encode() + self._table)


class PageObjects:
    """An engine's pages in one store. Calls may come from several threads.

    counts  by event: read, written, missing, corrupt, refused, failed (pages of calls that failed
            or were not made); `last_error` is the last failure's sentence
    """

    def __init__(
        self,
        engine: str,
        url: str,
        space: bytes,
        *,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if is_lossy(url):
            raise StoreError(
                f"storage {StoreURL.parse(url)}: codec=fp8 rounds keys and values, and {engine} "
                "does not say which bytes those are; use codec=lossless"
            )
        self.store: Store = open_store(url, space)
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._news: Counter[str] = Counter()
        self._engine = engine
        self._space = space
        self._batch_bytes = batch_bytes
        self._breaker = Breaker(clock)
        self._local = threading.local()
        self._lock = threading.Lock()

    def pool(self, name: str, page_bytes: int, described: Mapping[str, object]) -> PagePool:
        return PagePool(name, page_bytes, described, self._space)

    def pages_at_once(self, pool: PagePool) -> int:
        """How many go in one call: as many as staging memory holds."""
        return max(1, self._batch_bytes // pool.format.bytes)

    def exists(self, pool: PagePool, pages: Sequence[bytes]) -> list[bool]:
        """For every page: is there an object? Nothing, if the store does not answer."""
        keys = [pool.key(page) for page in pages]
        found = self._call("exists", lambda: self.store.exists(keys), 0) if keys else []
        return [False] * len(keys) if found is None else found

    def read(
        self, pool: PagePool, pages: Sequence[bytes], memory: Sequence[MemoryRuns]
    ) -> list[bool]:
        """Fill the memory of pages; for each, whether it is filled. Others stay as they were."""
        done: list[bool] = []
        for batch in self._batches(pool, len(pages)):
            keys = [pool.key(page) for page in pages[batch]]
            done += self._read(pool, keys, memory[batch])
        return done

    def write(
        self, pool: PagePool, pages: Sequence[bytes], memory: Sequence[MemoryRuns]
    ) -> list[bool]:
        """Store pages; for each, whether it is there."""
        done: list[bool] = []
        for batch in self._batches(pool, len(pages)):
            keys = [pool.key(page) for page in pages[batch]]
            done += self._write(pool, keys, memory[batch])
        return done

    def add(
        self, pool: PagePool, pages: Sequence[bytes], memory: Sequence[MemoryRuns]
    ) -> tuple[list[bool], list[bool]]:
        """Store those pages that are not there. For each: was it there before, is it now?"""
        before = self.exists(pool, pages)
        new = [number for number, found in enumerate(before) if not found]
        done = self.write(pool, [pages[n] for n in new], [memory[n] for n in new])
        now = before.copy()
        for number, ok in zip(new, done, strict=True):
            now[number] = ok
        return before, now

    def remove(self, pool: PagePool, pages: Sequence[bytes]) -> None:
        """Remove pages. Those that a store keeps, because it fails, will be found."""
        keys = [pool.key(page) for page in pages]
        self._call("remove", lambda: self.store.remove(keys), 0)

    def take_news(self) -> dict[str, int]:
        """What was counted since the last call: pages by event, and `read_bytes`, `written_bytes`.

        For engines whose metrics are another process's.
        """
        with self._lock:
            news, self._news = self._news, Counter()
        return {name: count for name, count in news.items() if count}

    def give_up(self, pages: int, error: Exception) -> None:
        """Count pages of which a plug-in neither read nor wrote any, because of an error."""
        self.last_error = str(error)
        log.warning("%d pages are given up: %s", pages, error, exc_info=error)
        self._count("failed", pages)

    def clear(self) -> Removed:
        """Remove all pages of this model and slice."""
        return self.store.clear()

    def close(self) -> None:
        self.store.close()

    # -- the steps --------------------------------------------------------------------------

    def _batches(self, pool: PagePool, pages: int) -> Iterator[slice]:
        count = self.pages_at_once(pool)
        return (slice(at, at + count) for at in range(0, pages, count))

    def _read(self, pool: PagePool, keys: list[bytes], memory: Sequence[MemoryRuns]) -> list[bool]:
        staged = self._staging.parts([pool.format.bytes] * len(keys))
        lengths = self._call("read", lambda: self.store.read(keys, staged), len(keys))
        if lengths is None:
            return [False] * len(keys)
        done = [
            length != MISSING and self._is_whole(pool, one, key, length)
            for key, one, length in zip(keys, staged, lengths, strict=True)
        ]
        for runs, one, good in zip(memory, staged, done, strict=True):
            if good:
                _scatter(one, runs)
        self._count("missing", lengths.count(MISSING))
        self._count("read", sum(done), pool.format.payload_bytes)
        return done

    def _is_whole(self, pool: PagePool, staged: memoryview, key: bytes, length: int) -> bool:
        try:
            if length == CORRUPT:
                raise CorruptObjectError("the store's warning names the reason")
            if length != pool.format.bytes:
                raise CorruptObjectError(f"{length} bytes, not {pool.format.bytes}")
            pool.format.check(staged, key)
        except CorruptObjectError as error:
            self.last_error = f"{self.store.name}: a page of {pool.name} is dropped: {error}"
            log.warning("%s", self.last_error)
            self._count("corrupt", 1)
            self._call("remove", lambda: self.store.remove([key]), 0)
            return False
        return True

    def _write(self, pool: PagePool, keys: list[bytes], memory: Sequence[MemoryRuns]) -> list[bool]:
        staged = self._staging.parts([pool.format.bytes] * len(keys))
        for runs, one, key in zip(memory, staged, keys, strict=True):
            _gather(runs, one)
            pool.format.seal(one, key)
        done = self._call("write", lambda: self.store.write(keys, staged), len(keys))
        if done is None:
            return [False] * len(keys)
        self._count("refused", len(done) - sum(done))
        self._count("written", sum(done), pool.format.payload_bytes)
        return done

    def _call(self, name: str, call: Callable[[], T], pages: int) -> T | None:
        """A call of the store; None if it failed, or was not made."""
        if not self._breaker.allows():
            self._count("failed", pages)
            return None
        try:
            with self._timed(name):
                result = call()
        except StoreError as error:
            if isinstance(error, LingeringError):
                self._staging.linger(error.lingers_s)
            self._breaker.failed()
            self.last_error = str(error)
            log.warning("%s", error)
            self._count("failed", pages)
            return None
        self._breaker.succeeded()
        return result

    @property
    def _staging(self) -> BounceBuffers:
        if not hasattr(self._local, "staging"):
            self._local.staging = BounceBuffers()
        staging: BounceBuffers = self._local.staging
        return staging

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            SECONDS.labels(self._engine, call).inc(time.monotonic() - began)

    def _count(self, event: str, pages: int, page_bytes: int = 0) -> None:
        with self._lock:
            self.counts[event] += pages
            self._news[event] += pages
            if page_bytes:
                self._news[f"{event}_bytes"] += pages * page_bytes
        PAGES.labels(self._engine, event).inc(pages)
        if page_bytes:
            BYTES.labels(self._engine, event).inc(pages * page_bytes)


def leading(found: Sequence[bool]) -> int:
    """How many there are before the first that is missing."""
    return [*found, False].index(False)


def _gather(runs: MemoryRuns, staged: memoryview) -> None:
    """The runs of a page, one after the other, to the beginning of an object."""
    for part, run in zip(_parts(staged, runs), runs, strict=True):
        part[:] = np.frombuffer(run, np.uint8)  # Releases the interpreter, unlike a memoryview.


def _scatter(staged: memoryview, runs: MemoryRuns) -> None:
    """An object's payload to the runs of its page."""
    for part, run in zip(_parts(staged, runs), runs, strict=True):
        np.frombuffer(run, np.uint8)[:] = part


def _parts(staged: memoryview, runs: MemoryRuns) -> Iterator[npt.NDArray[np.uint8]]:
    payload, at = np.frombuffer(staged, np.uint8), 0
    for run in runs:
        yield payload[at : at + len(run)]
        at += len(run)
