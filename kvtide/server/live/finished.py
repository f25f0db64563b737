"""What finished requests leave for viewers: TTFT by origin, misses, and what the cache saved.

The event loop notes each request as it ends, which costs microseconds. Nothing else is kept up
without a viewer.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvtide.engine import Request
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.server.live.request_rows import MAX_MISSES, miss_row
from kvtide.server.rate_estimate import RateEstimate
from kvtide.server.service import ResponseStream

MAX_SAMPLES = 240
"""Times to first token that are kept: the points of a chart."""
MAX_TICKS = 1024


class FirstToken(NamedTuple):
    """`at`: when the request ended, in seconds of `time.time`."""

    at: float
    origin: str
    seconds: float


class SavedTime:
    """Tokens that were not computed, and the seconds that prefill would have taken for them.

    Each token counts at the prefill rate of its time; those that come before the first prefill
    count at the first rate that is measured.
    """

    def __init__(self, rate: RateEstimate) -> None:
        self.tokens = 0
        self._rate = rate
        self._seconds = 0.0
        self._unpriced = 0

    @property
    def seconds(self) -> float:
        self._price()
        return self._seconds

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._unpriced += tokens
        self._price()

    def _price(self) -> None:
        if self._rate.prefill_token_s:
            self._seconds += self._rate.saved_s(self._unpriced)
            self._unpriced = 0


class TickTimes:
    """When the index's clock showed a tick, to about 1/512 of the time since the start."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ticks: list[int] = []
        self._times: list[float] = []
        self._gap_s = 0.0

    def note(self, tick: int) -> None:
        """It is this tick now."""
        if self._ticks and tick <= self._ticks[-1]:
            return
        now = self._clock()
        if len(self._times) > 1 and now - self._times[-2] < self._gap_s:
            self._ticks[-1], self._times[-1] = tick, now
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > MAX_TICKS:
            del self._ticks[1::2], self._times[1::2]
            self._gap_s = (now - self._times[0]) / len(self._times)

    def time_of(self, tick: int) -> float | None:
        """When the tick had come at the latest; None if no request has ended since."""
        at = bisect_left(self._ticks, tick)
        return self._times[at] if at < len(self._ticks) else None


class FinishedRequests:
    """A listener of the service. `tick` reads the index's clock, from any thread."""

    def __init__(self, rate: RateEstimate, tick: Callable[[], int]) -> None:
        self.saved = SavedTime(rate)
        self.ticks = TickTimes()
        self.count = 0
        self.misses: deque[dict[str, Any]] = deque(maxlen=MAX_MISSES)
        self._tick = tick
        self._samples: deque[FirstToken] = deque(maxlen=MAX_SAMPLES)

    def ended(self, stream: ResponseStream) -> None:
        request = stream.request
        self.count += 1
        self.ticks.note(self._tick())
        if _reads_cache(request):
            self.saved.add(sum(request.by_tier.values()))
        if (miss := miss_row(request)) is not None:
            self.misses.append(miss)
        if stream.first is not None:
            taken = stream.first - stream.began
            self._samples.append(FirstToken(time.time(), PrefixOrigin.of(request).value, taken))

    def first_tokens(self) -> dict[str, Any]:
        """Of each origin the median and 95th percentile of the last samples, and all of them."""
        origins = {}
        for origin in PrefixOrigin:
            taken = sorted(one.seconds for one in self._samples if one.origin == origin.value)
            origins[origin.value] = {
                "samples": len(taken),
                "p50_s": _quantile(taken, 0.5),
                "p95_s": _quantile(taken, 0.95),
            }
        points = [[round(s.at, 3), s.origin, round(s.seconds, 5)] for s in self._samples]
        return {"origins": origins, "points": points}


def _reads_cache(request: Request) -> bool:
    return not request.params.alone


def _quantile(ordered: list[float], fraction: float) -> float | None:
    """The smallest value that so many do not exceed; None without any."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
