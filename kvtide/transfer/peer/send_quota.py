"""A limit on bytes per second: a token bucket that may go into debt by one part."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 0.1
"""After a pause, so much of a second's bytes may go at once."""


class SendQuota:
    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._left = bytes_per_s * BURST_S
        self._at = clock()

    def take(self, count: int) -> bool:
        """Whether so many bytes may go now; then they count."""
        now = self._clock()
        gained = (now - self._at) * self.bytes_per_s
        self._left = min(self._left + gained, self.bytes_per_s * BURST_S)
        self._at = now
        if self._left <= 0:
            return False
        self._left -= count
        return True
