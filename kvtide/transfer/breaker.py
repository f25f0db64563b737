"""When to stop asking a store that does not answer, and when to try again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3
REST_S = 5.0


class Breaker:
    """Calls go through until MAX_FAILURES in a row failed; then one every REST_S, as a probe.

    closed ──three failures in a row──▶ open ──rest is over──▶ one probe ──ok──▶ closed
                                         ▲                        │
                                         └─────────failed─────────┘
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.trips = 0
        self._clock = clock
        self._failures = 0
        self._resting_until = 0.0
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether calls would be refused now. Asking uses up no probe."""
        return self._failures >= MAX_FAILURES and self._clock() < self._resting_until

    def allows(self) -> bool:
        """Whether a call may go through; a probe keeps others out until it is known."""
        with self._lock:
            if self._failures < MAX_FAILURES:
                return True
            if self._clock() < self._resting_until:
                return False
            self._resting_until = self._clock() + REST_S
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self.trips += self._failures == MAX_FAILURES
                self._resting_until = self._clock() + REST_S
