"""How fast the engine goes, from what its last steps took: for estimates that clients see."""

from __future__ import annotations

import math

MEMORY = 0.9
"""What a step keeps of the figure before it."""

TELLING_TOKENS = 32
"""Fewer tokens than these take as long as one does, and say nothing about a prompt's."""


class RateEstimate:
    """`prefill_token_s`: seconds that computing a prompt's token takes; 0 before any was."""

    def __init__(self) -> None:
        self.prefill_token_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_end_s = 0.0
        self._between_ends_s = 0.0

    def stepped(self, computed: int, seconds: float, generated: int) -> None:
        """A step computed so many tokens, of which so many led to a generated one.

        Only steps that mostly compute prompts tell what a prompt's token costs.
        """
        self._since_end_s += seconds
        if computed >= max(TELLING_TOKENS, 4 * generated):
            self._tokens = MEMORY * self._tokens + computed
            self._seconds = MEMORY * self._seconds + seconds
            self.prefill_token_s = self._seconds / self._tokens

    def saved_s(self, cached_tokens: int) -> float:
        """What it would have taken to compute these."""
        return cached_tokens * self.prefill_token_s

    def ended(self) -> None:
        """A request came to its end. Time without steps does not count."""
        busy_s, self._since_end_s = self._since_end_s, 0.0
        self._between_ends_s += (1 - MEMORY) * (busy_s - self._between_ends_s)

    def retry_s(self, waiting: int) -> int:
        """When so many that wait will have had their turn, in whole seconds up to a minute."""
        return min(60, max(1, math.ceil(waiting * self._between_ends_s)))
