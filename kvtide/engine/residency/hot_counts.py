"""How often selected entries were hot: counted on the device, read without stalling a step.

Forward passes count hits, misses and gathered entries on the device (`HotBuffers.counts`). A copy
of the counts is queued behind a step, at most one a second. It has long arrived when the next one
is queued, and is what reports say until then. An engine without requests has no step to stall, and
reads at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvtide.engine.staging import Staging
from kvtide.tiers import HotBuffers

SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class HotPoolCounts:
    """Of one hot pool, since the start: selected entries by layer.

    hits         found in a hot row
    misses       swapped in to one
    gathered     read from the host for a prefill chunk
    entry_bytes  what one copies from the host
    """

    hits: Mapping[int, int]
    misses: Mapping[int, int]
    gathered: Mapping[int, int]
    entry_bytes: int

    @property
    def swapped_bytes(self) -> int:
        return (sum(self.misses.values()) + sum(self.gathered.values())) * self.entry_bytes

    @property
    def hit_rate(self) -> float | None:
        """Of all selected entries; None before the first selection."""
        hits, *read = (sum(x.values()) for x in (self.hits, self.misses, self.gathered))
        total = hits + sum(read)
        return hits / total if total else None


class HotCounts:
    """The counts of all hot pools, by name."""

    def __init__(
        self,
        buffers: Mapping[str, HotBuffers],
        staging: Staging,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffers, self._staging, self._clock = buffers, staging, clock
        self._queued: Callable[[], list[Tensor]] | None = None
        self._queued_s = -SAMPLE_S
        self.last = {name: _counted(hot, hot.counts.new_zeros(0, 3)) for name, hot in self._hot()}

    def sample(self) -> None:
        """Queue a copy, unless one was queued within the last second; does not block."""
        if not self._buffers or self._clock() - self._queued_s < SAMPLE_S:
            return
        self._read()
        self._queue()

    def read_now(self) -> None:
        """Wait for all steps, and read what they counted."""
        if self._buffers:
            self._queue()
            self._read()

    def _hot(self) -> list[tuple[str, HotBuffers]]:
        return list(self._buffers.items())

    def _queue(self) -> None:
        counts = [hot.counts for hot in self._buffers.values()]
        self._queued, self._queued_s = self._staging.read_back(counts), self._clock()

    def _read(self) -> None:
        """What was queued last."""
        if self._queued is None:
            return
        found = zip(self._hot(), self._queued(), strict=True)
        self.last = {name: _counted(hot, counts) for (name, hot), counts in found}
        self._queued = None


def _counted(hot: HotBuffers, counts: Tensor) -> HotPoolCounts:
    """Zeros where there are no rows."""
    rows = counts.tolist() or [(0, 0, 0)] * len(hot.pool.layers)
    hits, misses, gathered = (
        {layer: int(row[column]) for layer, row in zip(hot.pool.layers, rows, strict=True)}
        for column in range(3)
    )
    return HotPoolCounts(hits, misses, gathered, hot.pool.entry.bytes)
