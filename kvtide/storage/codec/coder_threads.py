"""Threads that encode and decode while the calling thread reads and writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

MAX_THREADS = 8


def default_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


class CoderThreads:
    """`jobs` is for one call of a store. The library and numpy release the interpreter."""

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._pool = ThreadPoolExecutor(threads, "kvtide-coder")

    @contextmanager
    def jobs(self) -> Iterator[Jobs]:
        """All jobs have ended when the block ends, however it ends: they use the caller's memory.
        Those that have not begun are dropped if it ends with an exception."""
        begun = Jobs(self._pool)
        try:
            yield begun
        except BaseException:
            begun.cancel()
            raise
        finally:
            begun.wait()

    def close(self) -> None:
        self._pool.shutdown()


class Jobs:
    """What one call has its coders do."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._futures: list[Future[Any]] = []

    def begin(self, functions: Sequence[Callable[[], T]]) -> Future[list[T]]:
        """Call these one after another on one thread."""

        def call_all() -> list[T]:
            return [function() for function in functions]

        future = self._pool.submit(call_all)
        self._futures.append(future)
        return future

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def wait(self) -> None:
        wait(self._futures)
