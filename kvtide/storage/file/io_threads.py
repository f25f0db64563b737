"""Threads that do the parts of a batch side by side, together with the thread that asks.

A part that raises is the asker's to hear of; the thread lives on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

PARTS_PER_THREAD = 2
"""Threads are woken for so many parts each: waking one costs as much as reading 256 KiB."""


class _Batch:
    """Parts 0 … count - 1, taken one by one by whoever is free."""

    def __init__(self, run: Callable[[int], None], threads: int, count: int) -> None:
        self._run, self._count = run, count
        self.to_wake = threads - 1
        self._next = itertools.count()
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.failures: list[BaseException] = []

    def work(self) -> None:
        begun = 0
        try:
            while (part := next(self._next)) < self._count:
                begun += 1
                try:
                    self._run(part)
                except Exception as error:
                    self.failures.append(error)
        except BaseException as error:  # Ctrl-C: nobody begins what is left, nor waits for it.
            self.failures.append(error)
            while next(self._next) < self._count:
                begun += 1
            raise
        finally:
            with self._lock:
                self._left -= begun
                if not self._left:
                    self._done.set()

    def wait(self) -> None:
        self._done.wait()


class IoThreads:
    def __init__(self, threads: int, name: str) -> None:
        """`threads` counts the asking thread."""
        self.count = threads
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name} {n}", daemon=True)
            for n in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()

    def each(self, run: Callable[[int], None], count: int) -> None:
        """Call `run` with 0 … count - 1, in any order; raise the first exception at the end."""
        if not count:
            return
        threads = min(-(-count // PARTS_PER_THREAD), len(self._threads) + 1)
        batch = _Batch(run, threads, count)
        self._wake(batch)
        try:
            batch.work()
            batch.wait()
        except BaseException:
            batch.wait()  # Interrupted; but the parts use memory that is not ours.
            raise
        if batch.failures:
            raise batch.failures[0]

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _wake(self, batch: _Batch) -> None:
        """Have one more thread join in, which then wakes the next: the asker has its own to do."""
        if batch.to_wake and self._threads:
            batch.to_wake -= 1
            self._queue.put(batch)

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._wake(batch)
            batch.work()
