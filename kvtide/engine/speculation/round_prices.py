"""What a round of speculation costs on this device, in decode steps, as the engine's steps show.

A round is a verify step and the drafts for the next one. Its time lies between two moments at which
the host has a step's tokens; so does the time of a decode step. A price is the median of `SAMPLES`
such times. Only a step behind one of its own kind counts, so that neither prefill nor the change
from one kind to the other is in it.

Prices are kept by batch size, in powers of two. A batch size begins without any: the first steps
decode plainly, then the drafts that seem to pay are timed. After `EPOCH` steps its prices are
measured anew, as contexts have grown. Where prefill is in all steps drafting goes on at assumed
costs.

All ranks run the same steps, and agree on every price: they decide the same.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.cache import Agreement

SAMPLES = 16
"""Times of a price."""
PLAIN_STEPS = 64
"""A batch size without the price of a decode step waits so many steps for one."""
EPOCH = 2048
"""Steps after which a batch size is measured anew. Decode steps and rounds are then timed again,
also those that do not pay: in less than 2% of the steps, or 3% where prefill is in most of them."""


class StepRows(NamedTuple):
    """rows    of every request in a step
    drafts  of all requests together
    """

    rows: Sequence[int]
    drafts: int


class _Kind(NamedTuple):
    """`drafts` of a request, a rounded mean; 0 for a decode step."""

    batch: int
    drafts: int


@dataclass(slots=True)
class _BatchPrices:
    """By number of drafts: seconds, and the times since the last price. `age` in steps."""

    seconds: dict[int, float] = field(default_factory=dict)
    times: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    age: int = 0


class RoundPrices:
    """`verify_rows`: of a request in a verify step, at the most; more are prefill."""

    def __init__(
        self,
        agreement: Agreement,
        verify_rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._agreement, self._verify_rows, self._clock = agreement, verify_rows, clock
        self._batches: defaultdict[int, _BatchPrices] = defaultdict(_BatchPrices)
        self._last: _Kind | None = None
        self._at = clock()

    def ran(self, step: StepRows, running: int) -> bool:
        """The host has the tokens of a step, while so many requests run; whether prices changed.
        To be called at the same moment of every step."""
        now = self._clock()
        took, self._at = now - self._at, now
        size = _size(running)
        self._batches[size].age += 1
        if expired := self._batches[size].age == EPOCH:
            del self._batches[size]
        kind = self._kind(step, size) if len(step.rows) == running else None
        last, self._last = self._last, kind
        if kind is None or last is None or not _alike(kind, last):
            return expired
        return self._add(self._batches[size], kind.drafts, took) or expired

    def _kind(self, step: StepRows, size: int) -> _Kind | None:
        """None for a step that does something else, or has drafts for few of its requests."""
        drafts = int(step.drafts / len(step.rows) + 0.5)
        longest = max(step.rows)
        if step.drafts == 0:
            return _Kind(size, 0) if longest == 1 else None
        return _Kind(size, drafts) if drafts and longest <= self._verify_rows else None

    def _add(self, batch: _BatchPrices, drafts: int, took: float) -> bool:
        """Whether this makes a price."""
        times = batch.times[drafts]
        times.append(took)
        if len(times) < SAMPLES:
            return False
        (agreed_ns,) = self._agreement.all_min([round(statistics.median(times) * 1e9)])
        batch.seconds[drafts] = agreed_ns / 1e9
        times.clear()
        return True

    def wants_plain(self, running: int) -> bool:
        """The next step is to have no drafts: a decode step has no price yet."""
        batch = self._batches[_size(running)]
        return 0 not in batch.seconds and batch.age < PLAIN_STEPS

    def cost(self, running: int, drafts: float, assumed: Callable[[float], float]) -> float:
        """A round of so many drafts for each request, in decode steps. Of a number that was not
        measured: that of the nearest one, in the proportion of the assumed costs."""
        seconds = self._batches[_size(running)].seconds
        measured = [count for count in seconds if count]
        if 0 not in seconds or not measured:
            return assumed(drafts)
        nearest = min(measured, key=lambda count: (abs(count - drafts), count))
        more = max(seconds[nearest] / seconds[0] - 1, 0.0)
        return 1 + more * (assumed(drafts) - 1) / (assumed(nearest) - 1)


def _size(running: int) -> int:
    """The exponent of the next power of two."""
    return (running - 1).bit_length()


def _alike(one: _Kind, other: _Kind) -> bool:
    return one.batch == other.batch and (one.drafts > 0) == (other.drafts > 0)
