"""How soon pages are used again, learned from the traffic.

Pages are of a class: how often they were used again before, up to four times. A *cohort* is all
pages that were last used within the same stretch of ticks. Per cohort and class, the counts say how
many pages there were, and how many of them were used again, by their age then. From these follows
a class's rate at every age: of the pages that got so old, how many were used again at that age.

What a page is *worth* is the most hits per tick that keeping it any longer can bring: over the best
time to give it up, the chance of a use until then, divided by the time until the use or the end
(the index of Gittins, 1979). So a page that is seldom used soon, but often later, counts for later.

The cohorts are as long as the lives of pages demand: eight times the age at which pages are evicted
is looked back on. Counts are whole numbers, and sums run in a fixed order: every rank finds the
same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CLASSES = 5
COHORTS = 64

_FIRST_COHORT_BITS = 6
"""A cohort is 64 ticks long at first: some fifteen requests."""
_UNIT_BITS = 10
"""Ages are counted in units, of which a cohort has no more than 1,024."""
_LIVES = 8
"""How many lives of an evicted page the cohorts reach back."""
_PRIOR_REQUESTS = 12
"""For the pages of how many requests the rate of all classes together counts in each."""
_FIRST_FIT = 64
_FIT_DIVISOR = 4
_FIT_AFTER = 256
_NEVER_BEFORE = 1e-9

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def _bucket(units: int) -> int:
    """Two buckets per power of two: 1, 2, 3, 4–5, 6–7, 8–11, 12–15, …"""
    bits = units.bit_length()
    return 2 * bits + (units >> bits - 2 & 1) if bits > 1 else 2 * bits


BUCKETS = _bucket(COHORTS << _UNIT_BITS) + 2


def _starts() -> npt.NDArray[np.int64]:
    """The first age of every bucket, and the end of the last. Buckets 1 and 3 are empty."""
    later = [(2 + half) << bits - 2 for bits in range(2, BUCKETS // 2 + 1) for half in (0, 1)]
    return np.array([0, 1, 1, 2, *later][: BUCKETS + 1], np.int64)


_STARTS = _starts()
_START_LIST: list[int] = _STARTS.tolist()
_OLDEST_UNITS = _START_LIST[-1] - 1
_WIDTHS = np.diff(_STARTS)


class ReuseRates:
    """See the module. `worths`: by class and bucket, and 0 at the end; empty before the first fit.

    now  the tick of the latest request
    """

    def __init__(self) -> None:
        self.now = 0
        self.worths: list[list[float]] = []
        self._bits = _FIRST_COHORT_BITS
        self._unit_bits = 0
        self._latest = 0  # The number of the latest cohort: cohort n is row n % COHORTS.
        self._oldest = 0
        self._life = 0
        self._requests = 0
        self._next_fit = _FIRST_FIT
        self._pages_in_all = 0
        self._counts: Floats = np.zeros((COHORTS, CLASSES))
        self._reused: Floats = np.zeros((COHORTS, CLASSES, BUCKETS))
        self._new_counts: list[int] = []  # Hits, last, pages; and so on.
        self._new_reuse: list[int] = []  # Hits, last, now, pages; and so on.

    # -- counting ---------------------------------------------------------------------------

    def begin_request(self, tick: int) -> None:
        self.now = tick
        self._requests += 1
        if self._requests >= self._next_fit:
            self._fit()

    def count(self, hits: int, last: int, pages: int) -> None:
        """So many pages of this class were last used at tick `last`; fewer, if below 0."""
        self._new_counts += (hits, last, pages)

    def count_reuse(self, hits: int, last: int, pages: int) -> None:
        """So many of them are used again now: they count as pages of the next class."""
        self._new_reuse += (hits, last, self.now, pages)

    def note_life(self, age: int) -> None:
        """Pages that are worth much go at this age."""
        self._life = max(age, self._life - (self._life >> 5))

    def same_cohort(self, one: int, other: int) -> bool:
        """Whether pages used at these ticks count for the same cohort."""
        return one >> self._bits == other >> self._bits

    # -- what pages are worth ---------------------------------------------------------------

    def worth(self, hits: int, last: int) -> float:
        """Expected hits per tick, between those of the ages where two buckets begin."""
        row = self.worths[hits if hits < CLASSES else CLASSES - 1]
        units = self.now - last >> self._unit_bits
        if units > _OLDEST_UNITS:
            return row[-1]
        bucket = _bucket(units)
        start, worth = _START_LIST[bucket], row[bucket]
        part = (units - start) / (_START_LIST[bucket + 1] - start)
        return worth + (row[bucket + 1] - worth) * part

    def even_ages(self, age: int, part: float) -> list[int]:
        """By class, the latest age up to `age` at which it is worth `part` of the most at `age`.

        All are `age` before the first fit.
        """
        if not self.worths:
            return [age] * CLASSES
        last = self.now - age
        least = part * max(self.worth(hits, last) for hits in range(CLASSES))
        return [self._age_worth(hits, age, least) for hits in range(CLASSES)]

    def _age_worth(self, hits: int, age: int, least: float) -> int:
        """The latest age up to `age` at which pages of a class are worth that; 0 without one."""
        worth, latest = self.worth(hits, self.now - age), age
        row = self.worths[hits]
        bucket = _bucket(min(age >> self._unit_bits, _OLDEST_UNITS))
        while worth < least:
            if bucket < 0:
                return 0
            before, begin = row[bucket], _START_LIST[bucket] << self._unit_bits
            if before >= least:
                return int(begin + (latest - begin) * (before - least) / (before - worth))
            worth, latest, bucket = before, begin, bucket - 1
        return latest

    # -- cohorts ----------------------------------------------------------------------------

    def _begin_cohorts(self) -> None:
        """Begin all cohorts up to now."""
        while (self.now >> self._bits) - self._oldest >= COHORTS and self._too_short():
            self._double()
        number = self.now >> self._bits
        begun = np.arange(max(self._latest + 1, number - COHORTS + 1), number + 1) % COHORTS
        self._counts[begun] = 0
        self._reused[begun] = 0
        self._latest = number
        self._oldest = max(self._oldest, number - COHORTS + 1)

    def _too_short(self) -> bool:
        """Whether the cohorts do not reach back far enough; always while nothing was evicted."""
        return not self._life or COHORTS << self._bits < _LIVES * self._life

    def _double(self) -> None:
        """Join every two cohorts, and from then on every four units."""
        numbers = np.arange(self._oldest, self._latest + 1)
        counts, reused = np.zeros_like(self._counts), np.zeros_like(self._reused)
        np.add.at(counts, (numbers >> 1) % COHORTS, self._counts[numbers % COHORTS])
        np.add.at(reused, (numbers >> 1) % COHORTS, self._reused[numbers % COHORTS])
        self._counts, self._reused = counts, reused
        self._bits += 1
        self._latest >>= 1
        self._oldest >>= 1
        if self._bits - self._unit_bits > _UNIT_BITS:
            self._unit_bits += 1
            self._reused = _in_longer_units(reused)

    def _settle(self) -> None:
        """Add up what was counted since the last time."""
        hits, last, pages = np.reshape(np.array(self._new_counts, np.int64), (-1, 3)).T
        rows, known = self._rows(hits, last)
        self._pages_in_all += int(pages.sum())
        self._counts += _summed(rows[known], pages[known], self._counts.shape)
        hits, last, now, pages = np.reshape(np.array(self._new_reuse, np.int64), (-1, 4)).T
        rows, known = self._rows(hits, last)
        units = np.maximum(now - last, 0) >> self._unit_bits
        buckets = np.searchsorted(_STARTS, units, side="right") - 1
        where = rows * BUCKETS + buckets
        self._reused += _summed(where[known], pages[known], self._reused.shape)
        rows, known = self._rows(hits + 1, now)
        self._pages_in_all += int(pages.sum())
        self._counts += _summed(rows[known], pages[known], self._counts.shape)
        self._new_counts.clear()
        self._new_reuse.clear()

    def _rows(self, hits: Ints, last: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The row of each cohort and class, and which of the cohorts are still counted."""
        numbers = last >> self._bits
        rows = numbers % COHORTS * CLASSES + np.minimum(hits, CLASSES - 1)
        return rows, numbers >= self._oldest

    # -- learning ---------------------------------------------------------------------------

    def _fit(self) -> None:
        """Turn counts into worths; often at first, then ever more rarely."""
        self._begin_cohorts()
        self._settle()
        self._next_fit = self._requests + min(self._requests // _FIT_DIVISOR, _FIT_AFTER)
        if not self._pages_in_all:
            return
        exposed, reused = self._exposed()
        exposed = np.maximum(exposed, reused)  # Joined nodes changed their class.
        prior = _PRIOR_REQUESTS * self._pages_in_all / self._requests
        of_all = reused.sum(0) / np.maximum(exposed.sum(0), 1.0)
        rates = (reused + prior * of_all) / (exposed + prior)
        left = np.cumprod(1.0 - rates, axis=1)
        found, waited = np.zeros((2, CLASSES, BUCKETS + 1))
        np.subtract(1.0, left, out=found[:, 1:])
        alive = np.concatenate((np.ones((CLASSES, 1)), left[:, :-1]), axis=1)
        np.cumsum(alive * (1.0 - rates / 2) * (_WIDTHS << self._unit_bits), 1, out=waited[:, 1:])
        hits = found[:, None, 1:] - found[:, :-1, None]
        ticks = waited[:, None, 1:] - waited[:, :-1, None]
        worths = np.max(np.where(ticks > 0, hits, 0.0) / np.maximum(ticks, _NEVER_BEFORE), axis=2)
        self.worths = [[*row, 0.0] for row in worths.tolist()]

    def _exposed(self) -> tuple[Floats, Floats]:
        """By class and bucket: pages that reached the bucket, and those used again in it.

        A cohort counts in the buckets that its youngest page has left.
        """
        numbers = np.arange(self._oldest, self._latest + 1)
        counts, reused = self._counts[numbers % COHORTS], self._reused[numbers % COHORTS]
        youngest = self.now - (numbers + 1 << self._bits) + 1
        past = youngest[:, None] >= (_STARTS[1:] << self._unit_bits)[None, :]
        reached = counts[:, :, None] - (reused.cumsum(axis=2) - reused)
        return (reached * past[:, None]).sum(0), (reused * past[:, None]).sum(0)


def _summed(where: Ints, pages: Ints, shape: tuple[int, ...]) -> Floats:
    sums = np.bincount(where, pages, int(np.prod(shape)))
    return np.asarray(sums, np.float64).reshape(shape)


def _in_longer_units(reused: Floats) -> Floats:
    """The same counts in units twice as long."""
    longer = np.zeros_like(reused)
    longer[..., :-2] = reused[..., 2:]
    longer[..., 0] = reused[..., :3].sum(-1)
    longer[..., 2] += reused[..., 5]
    longer[..., 3] = 0.0
    return longer
