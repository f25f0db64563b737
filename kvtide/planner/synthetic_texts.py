"""What synthetic prompts are made of: texts of random tokens, and the requests that show them.

A `SyntheticText` is a prefix of a fixed run of random tokens: texts are equal as far as both go, or
share nothing. A workload plans its requests with them (`RequestPlan`), and tokens are made while
the trace is walked. An `Author` writes the texts of one workload and draws its random numbers, so
the same seed gives the same trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.planner.traces import BLOCK_TOKENS, TokenArray, TraceRequest, block_tokens

Number = TypeVar("Number", int, float)

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def option(default: Number, minimum: Number, help: str, maximum: int = 1 << 20) -> Number:
    """A field of a workload's options, with its bounds."""
    bounds = {"minimum": minimum, "maximum": maximum, "help": help}
    made: Number = field(default=default, metadata=bounds)
    return made


@dataclass(frozen=True, slots=True)
class SyntheticText:
    """The first `tokens` tokens of the text that begins at a block number."""

    first_block: int
    tokens: int

    def shown(self, tokens: int) -> SyntheticText:
        return SyntheticText(self.first_block, tokens)

    def token_ids(self) -> TokenArray:
        blocks = np.arange(math.ceil(self.tokens / BLOCK_TOKENS), dtype=np.int64)
        return block_tokens(self.first_block + blocks, self.tokens)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request before its tokens are made."""

    arrival_s: float
    texts: tuple[SyntheticText, ...]
    output_tokens: int
    session: str

    @property
    def prompt_tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def request(self) -> TraceRequest:
        prompt = np.concatenate([text.token_ids() for text in self.texts])
        return TraceRequest(self.arrival_s, prompt, self.output_tokens, self.session)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution: fractions from 0 to 1, and the quantiles there as factors of the median.

    Between two points the logarithm of the value is linear in the fraction.
    """

    points: tuple[tuple[float, float], ...]

    def values(self, median: float, fractions: Floats) -> Floats:
        at, values = zip(*self.points, strict=True)
        factors: Floats = np.exp(np.interp(fractions, at, np.log(values)))
        return median * factors


class Author:
    """Hands out texts that share no block, and draws every random number of a workload."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._next_block = 0

    def write(self, tokens: int) -> SyntheticText:
        text = SyntheticText(self._next_block, tokens)
        self._next_block += math.ceil(tokens / BLOCK_TOKENS)
        return text

    def lengths(self, median: int, count: int, sigma: float = 0.8) -> Counts:
        """Log-normal lengths of at least 1, the far tail cut at twenty medians."""
        samples: Floats = np.exp(sigma * self.rng.standard_normal(count))
        return np.clip(np.rint(median * samples), 1, 20 * median).astype(np.int64)

    def pauses_s(self, median_s: float, count: int) -> Floats:
        samples: Floats = np.exp(self.rng.standard_normal(count))
        return median_s * samples

    def fractions(self, count: int) -> Floats:
        """One from each of `count` equal parts of [0, 1), in random order.

        Few values of `Quantiles` at such fractions are distributed as many.
        """
        return (self.rng.permutation(count) + self.rng.random(count)) / max(1, count)

    def poisson_s(self, per_minute: float, count: int) -> Floats:
        """Arrival times of a Poisson process that begins at 0."""
        return np.cumsum(self.rng.exponential(60 / per_minute, count))
