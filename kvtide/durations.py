"""Histograms of durations with fixed buckets: an observation costs a bisection and two additions.

Counts are of each bucket alone; Prometheus wants them cumulated, which `cumulated` does.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of all buckets but the last, which has none."""


@dataclass(frozen=True, slots=True)
class Durations:
    """What a histogram has counted: per bucket, and the sum of all seconds."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    total_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulated(self) -> list[tuple[str, int]]:
        """Per upper bound, as Prometheus writes it, how many durations are not longer."""
        bounds = (*(str(bound) for bound in BUCKETS_S), "+Inf")
        reached, found = 0, list[tuple[str, int]]()
        for bound, count in zip(bounds, self.counts, strict=True):
            reached += count
            found.append((bound, reached))
        return found


class DurationHistogram:
    """Counts durations; one thread writes."""

    __slots__ = ("_counts", "_total_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._total_s += seconds

    def seen(self) -> Durations:
        return Durations(tuple(self._counts), self._total_s)
