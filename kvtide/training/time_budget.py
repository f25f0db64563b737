"""When each part of a training has to be done, as a fraction of the minutes for all of it.

Answers, hidden states and training end with what they have by then: an answer that is cut short is
an answer. The rest of the time is for the measurement on held-out prompts.
"""

from __future__ import annotations

import math
import time

ANSWERS = 0.40
HELD_OUT = 0.45
STATES = 0.55
TRAINING = 0.92
ALL = 1.0


class TimeBudget:
    """Begins now. Times are those of `time.monotonic`. Without `minutes` there is no end."""

    def __init__(self, minutes: float | None = None) -> None:
        self.began = time.monotonic()
        self._seconds = math.inf if minutes is None else 60 * minutes

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def end_of(self, part: float) -> float:
        return self.began + part * self._seconds
