"""How fast a store is read, estimated from the batches that its readers read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

EWMA_DECAY = 0.7
"""The weight of the estimate before a batch, against that batch's own speed."""


class Lap(NamedTuple):
    """When a batch began, and the reader-seconds spent on all batches until then."""

    at: float
    reader_s: float


class ReadSpeed:
    """`bytes_s` is the speed of all readers together; None before anything was read.

    A batch alone shows the speed of one reader. Its speed is scaled by the average number of
    readers that were active while it was read: two that share a link see half of it each, and one
    that reads alone sees all of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_s: float | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._now = Lap(clock(), 0.0)

    def begin(self) -> Lap:
        """A reader begins a batch, and calls `end` whatever becomes of it."""
        with self._lock:
            self._tick()
            self._active += 1
            return self._now

    def end(self, began: Lap, size: int) -> None:
        """The batch is read: `size` bytes, or 0 if it failed."""
        with self._lock:
            self._tick()
            self._active -= 1
            seconds = self._now.at - began.at
            if not size or seconds <= 0:
                return
            readers = (self._now.reader_s - began.reader_s) / seconds
            speed, before = readers * size / seconds, self.bytes_s
            decay = 0.0 if before is None else EWMA_DECAY
            self.bytes_s = decay * (before or 0.0) + (1 - decay) * speed

    def raise_by(self, fraction: float) -> None:
        """Assume more than was measured: a speed that is never measured again cannot improve."""
        with self._lock:
            if self.bytes_s is not None:
                self.bytes_s *= 1 + fraction

    def _tick(self) -> None:
        now = self._clock()
        passed = (now - self._now.at) * self._active
        self._now = Lap(now, self._now.reader_s + passed)
