"""Storage requests: look-ups, reads and writes, made by `StoreLink` and done by its workers.

A request is *over* when it gives no further result, and *quiet* when it no longer touches host
memory: only then are its slots free. A stopped or late request may be neither until the store's
call returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtide.spec import RankShape


class SoughtPage(NamedTuple):
    """One page of one anchor that a store is asked for.

    sidecar  this optional sidecar alone is asked for
    after    the packed tokens of the holdback behind the page: part of its sidecars' keys
    """

    anchor: str
    key: bytes
    sidecar: str | None = None
    after: bytes = b""

    @property
    def pool(self) -> str:
        """The pool whose object is asked for."""
        return self.sidecar or self.anchor


class StoredPage(NamedTuple):
    """One page of one anchor: its key, and its slot on the host.

    without  pools whose objects are neither read nor written: optional sidecars, or all others
    after    the packed tokens of the holdback behind the page: part of its sidecars' keys
    shape    the shape whose ranks stored it, if not this one
    """

    anchor: str
    key: bytes
    slot: int
    without: tuple[str, ...] = ()
    after: bytes = b""
    shape: RankShape | None = None


class StorageRequest:
    """`error` is the reason of a failure."""

    def __init__(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.deadline = deadline
        self.error: BaseException | None = None
        self.stopped = False
        self._clock = clock
        self._lock = threading.Lock()
        self._at_work = 0
        self._lingers_until = 0.0

    @property
    def late(self) -> bool:
        return self._clock() > self.deadline

    @property
    def quiet(self) -> bool:
        """Whether no worker uses its memory, now or later."""
        with self._lock:
            return not self._at_work and self._no_more() and self._clock() >= self._lingers_until

    def stop(self) -> None:
        """Begin no further batch; those being done end."""
        self.stopped = True

    def linger(self, seconds: float) -> None:
        self._lingers_until = max(self._lingers_until, self._clock() + seconds)

    def _no_more(self) -> bool:
        raise NotImplementedError


class Lookup(StorageRequest):
    """For every page, whether the store has it; `found` is None until the store has answered.

    shapes  those of the found pages that ranks of another shape stored, by their number
    """

    def __init__(
        self,
        pages: Callable[[], Sequence[SoughtPage]],
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(deadline, clock)
        self.pages = pages
        self.found: list[bool] | None = None
        self.shapes: dict[int, RankShape] = {}

    @property
    def over(self) -> bool:
        return self.found is not None or self.error is not None

    def _no_more(self) -> bool:
        return self.over or self.stopped


class PageBatch(NamedTuple):
    """Pages [start, end) of a request."""

    start: int
    end: int


class Paging(StorageRequest):
    """Pages to read or to write, in batches that several workers take.

    sizes   the bytes of each page's objects together
    ready   how many pages, from the first on, are done and whole
    absent  of every page that was read, the optional sidecars it came without
    """

    def __init__(
        self,
        pages: Sequence[StoredPage],
        sizes: Sequence[int],
        batch_bytes: int,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(deadline, clock)
        self.pages = pages
        self.ready = 0
        self.absent: list[tuple[str, ...]] = [()] * len(pages)
        self.batches = _batches(sizes, batch_bytes)
        self._next = 0
        self._done: list[bool | None] = [None] * len(pages)

    @property
    def over(self) -> bool:
        with self._lock:
            return self._no_more() and not self._at_work

    def claim(self) -> PageBatch | None:
        """The next batch, which the worker has to `finish`; None if there is none."""
        with self._lock:
            if self._no_more():
                return None
            batch = self.batches[self._next]
            self._next += 1
            self._at_work += 1
            return batch

    def finish(self, batch: PageBatch, whole: Sequence[bool]) -> None:
        with self._lock:
            self._at_work -= 1
            self._done[batch.start : batch.end] = whole
            while self.ready < len(self.pages) and self._done[self.ready]:
                self.ready += 1

    def fail(self, batch: PageBatch, error: BaseException) -> None:
        self.error = error
        self.finish(batch, [False] * (batch.end - batch.start))

    @property
    def count(self) -> int:
        """How many pages are done and whole, wherever they stand."""
        return sum(map(self.whole, range(len(self.pages))))

    def whole(self, number: int) -> bool:
        """Whether the page of this number is done and whole."""
        return self._done[number] is True

    def _no_more(self) -> bool:
        """A read ends at the first page that failed: later pages are useless without it."""
        done = self._next == len(self.batches)
        return done or self.stopped or self.late or self._gave_up()

    def _gave_up(self) -> bool:
        return False


class Reading(Paging):
    """`may_begin`: whether its host slots may be written; once they may, it is asked no more."""

    may_begin: Callable[[], bool] | None = None

    @property
    def waits(self) -> bool:
        """Whether it may not begin yet. A read that is stopped or late waits no longer."""
        may_begin = self.may_begin
        if may_begin is not None and not self._no_more() and not may_begin():
            return True
        self.may_begin = None
        return False

    def _gave_up(self) -> bool:
        return self.ready < len(self.pages) and self._done[self.ready] is False


class Writing(Paging):
    """Every page counts for itself. `unwanted` pages, by key, are not written."""

    unwanted: frozenset[bytes] = frozenset()

    def withhold(self, keys: frozenset[bytes]) -> None:
        """No batch that is begun from now on has these pages."""
        self.unwanted |= keys


def _batches(sizes: Sequence[int], max_bytes: int) -> list[PageBatch]:
    batches: list[PageBatch] = []
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > max_bytes:
            batches.append(PageBatch(start, number))
            start, total = number, 0
        total += size
    return [*batches, PageBatch(start, len(sizes))] if sizes else []
