"""How a request's tokens are sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

COLDEST = 1e-3
"""Lower temperatures are greedy: other probabilities underflow."""

MAX_BIAS = 100
"""Enough to force or to ban a token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The usual parameters. A temperature of 0 is greedy.

    logprobs    how many top tokens are reported beside the sampled one
    logit_bias  tokens, and what is added to their logits
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def problem(self) -> str | None:
        """What is out of range, in a sentence; None if nothing is."""
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "top_k": (0, math.inf),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "repetition_penalty": (0.01, 100.0),
            "logprobs": (0, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                return f"{name} is {value}; use a number from {low:g} to {high:g}"
        for token, bias in self.logit_bias:
            if not abs(bias) <= MAX_BIAS:
                return f"logit_bias of token {token} is {bias}; use a number from -100 to 100"
        return None

    @property
    def is_cold(self) -> bool:
        """The token is an argmax."""
        return self.temperature < COLDEST

    @property
    def is_greedy(self) -> bool:
        """The token is the argmax of the model's own logits: no penalties, no biases."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.is_cold and not changed and self.repetition_penalty == 1.0

    @property
    def is_limited(self) -> bool:
        """Some tokens are ruled out."""
        limited = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return limited and not self.is_cold

    @property
    def kind(self) -> Literal["greedy", "limited", "free"]:
        """An argmax, one of the tokens that limits leave over, or one of all."""
        if self.is_cold:
            return "greedy"
        return "limited" if self.is_limited else "free"


GREEDY = SamplingParams()
