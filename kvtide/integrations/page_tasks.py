"""Tasks over pages that an engine submits and asks about later, on threads.

A task has a number and pages of one pool or more. It is cut into parts: those of one pool, no more
at once than staging memory holds. Behind its last part it has a result, and the engine's notifier
wakes those who wait. A task always ends: what a part failed to do is not there, and is counted.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvtide.integrations.page_objects import MemoryRuns, PageObjects, PagePool
from kvtide.storage import StoreError

MAX_WAIT_S = 60.0
"""How long a page waits for a thread."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Page:
    """The engine's key, the name under which the page is stored, and its memory, if it moves."""

    key: Any
    name: bytes
    pool: PagePool
    runs: MemoryRuns = ()


Work = Callable[[PagePool, list[Page]], list[bool]]
"""Of one pool's pages: for each, whether it is there."""


class Notifier(Protocol):
    def fileno(self) -> int: ...
    def notify(self) -> None: ...
    def close(self) -> None: ...


class Wakening:
    """A notifier for an engine that polls, and now and then waits."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def fileno(self) -> int:
        return -1

    def notify(self) -> None:
        self._event.set()

    def wait(self) -> None:
        """Until something was notified since the last wait."""
        self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """It holds nothing open."""


class PageTasks(Generic[R]):
    """Tasks of one kind. Calls may come from several threads.

    submitted ──last part ends──▶ done ──taken──▶ forgotten

    result  of a task, from whether each of its pages is there
    """

    def __init__(
        self,
        name: str,
        threads: int,
        objects: PageObjects,
        notifier: Notifier,
        *,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.notifier = notifier
        self._objects = objects
        self._max_wait_s = max_wait_s
        self._threads = ThreadPoolExecutor(threads, f"kvtide-{name}")
        self._numbers = itertools.count()
        self._done: dict[int, R] = {}
        self._lock = threading.Lock()

    def submit(self, pages: Sequence[Page], work: Work, result: Callable[[list[bool]], R]) -> int:
        """The task's number. `result` does not raise."""
        there, until = [False] * len(pages), time.monotonic() + self._max_wait_s
        parts = self._parts(pages)
        task, left = next(self._numbers), itertools.count(len(parts) - 1, -1)
        for part in parts:
            run = partial(self._run, part, [pages[number] for number in part], work, there, until)
            self._threads.submit(self._end, run, left, task, partial(result, there))
        if not parts:
            self._finish(task, partial(result, there))
        return task

    def take(self, task: int) -> R | None:
        """A task's result, once; None while there is none."""
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, R]:
        """The results that there are, by task."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Wait for parts that run, and drop the others: memory of pages is then the engine's."""
        self._threads.shutdown(cancel_futures=True)
        self.notifier.close()

    # -- parts ------------------------------------------------------------------------------

    def _parts(self, pages: Sequence[Page]) -> list[list[int]]:
        """Numbers of pages."""
        numbers: dict[PagePool, list[int]] = {}
        for number, page in enumerate(pages):
            numbers.setdefault(page.pool, []).append(number)
        parts = []
        for pool, some in numbers.items():
            count = self._objects.pages_at_once(pool) if pages[some[0]].runs else len(some)
            parts += [some[at : at + count] for at in range(0, len(some), count)]
        return parts

    def _run(
        self, numbers: list[int], pages: list[Page], work: Work, there: list[bool], until: float
    ) -> None:
        try:
            if time.monotonic() > until:
                raise StoreError(f"no thread had time within {self._max_wait_s:g} s")
            done = work(pages[0].pool, pages)
            assert len(done) == len(numbers)
            for number, found in zip(numbers, done, strict=True):
                there[number] = found
        except Exception as error:  # The top of a worker: an engine waits for every task's end.
            self._objects.give_up(len(pages), error)

    def _end(
        self, run: Callable[[], None], left: Iterator[int], task: int, result: Callable[[], R]
    ) -> None:
        run()
        if next(left) == 0:  # The interpreter counts down for one thread at a time.
            self._finish(task, result)

    def _finish(self, task: int, result: Callable[[], R]) -> None:
        finished = result()
        with self._lock:
            self._done[task] = finished
        self.notifier.notify()
