"""Memory between a store and the pages: for objects that do not lie there as the store has them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np

from kvtide.storage.objects import DIRECT_ALIGN


class BounceBuffers:
    """A thread's memory for objects on their way; it grows on demand."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory: memoryview | None = None
        self._lingering: list[tuple[float, memoryview]] = []
        self._clock = clock

    def linger(self, seconds: float) -> None:
        """A store's call may write to this memory for so long: replace it, and keep it alive."""
        now = self._clock()
        self._lingering = [(until, memory) for until, memory in self._lingering if until > now]
        if self._memory is not None:
            self._lingering.append((now + seconds, self._memory))
            self._memory = None

    def parts(self, sizes: list[int]) -> list[memoryview]:
        """A buffer for each of these sizes, aligned for disks."""
        ends = np.cumsum([-(-size // DIRECT_ALIGN) * DIRECT_ALIGN for size in sizes])
        total = int(ends[-1]) if len(ends) else 0
        if self._memory is None or len(self._memory) < total:
            self._memory = memoryview(mmap.mmap(-1, max(total, DIRECT_ALIGN)))
        memory = self._memory
        starts = [0, *(int(end) for end in ends[:-1])]
        return [memory[s : s + size] for s, size in zip(starts, sizes, strict=False)]
