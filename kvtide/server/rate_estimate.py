"""The rates of the engine, as moving averages over its steps: for estimates that clients see."""

from __future__ import annotations

import math

EWMA_DECAY = 0.9
"""The weight that an average keeps from one step to the next."""

MIN_PREFILL_TOKENS = 32
"""Steps of fewer tokens take as long as a step of one: they do not measure prefill."""

MAX_RETRY_S = 60


class RateEstimate:
    """`prefill_token_s`: seconds per prefilled token; 0 before the first prefill."""

    def __init__(self) -> None:
        self.prefill_token_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_finish_s = 0.0
        self._between_finishes_s = 0.0

    def stepped(self, computed: int, seconds: float, generated: int) -> None:
        """A step took so long for its tokens, of which so many were decoded.

        Only steps that are mostly prefill count towards the prefill rate.
        """
        self._since_finish_s += seconds
        if computed >= max(MIN_PREFILL_TOKENS, 4 * generated):
            self._tokens = EWMA_DECAY * self._tokens + computed
            self._seconds = EWMA_DECAY * self._seconds + seconds
            self.prefill_token_s = self._seconds / self._tokens

    def saved_s(self, cached_tokens: int) -> float:
        """The time to prefill these tokens."""
        return cached_tokens * self.prefill_token_s

    def finished(self) -> None:
        """A request has finished. Time without steps does not count."""
        busy_s, self._since_finish_s = self._since_finish_s, 0.0
        self._between_finishes_s += (1 - EWMA_DECAY) * (busy_s - self._between_finishes_s)

    def retry_s(self, waiting: int) -> int:
        """The time until so many waiting requests have run, in whole seconds up to a minute."""
        return min(MAX_RETRY_S, max(1, math.ceil(waiting * self._between_finishes_s)))
