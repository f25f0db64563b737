"""Checkpoints where they pay: placement learned from where prompts diverged before.

The model is one table. A page boundary has an alignment (the power of two that divides its number)
and a zone: its distance from the end of the request that computes it or, if that is nearer, from
the beginning, by powers of two. For each pair of both the policy counts how many boundaries it has
seen and at how many of them a prompt diverged: a rate. Chat templates, block-wise traces and shared
documents show as high rates at certain places, alignments or both. Only the first prompt that
diverges at a place counts, since it leaves a checkpoint for all later ones.

Unknown rates come from similar boundaries: a kind from all that are at least as aligned, these from
slightly less aligned ones, and a whole zone from the assumption that prompts diverge in each zone
equally often. So the budget is spent from the first request on.

A checkpoint at c saves a prompt that diverges at m ≥ c the pages from the checkpoint before up to
c. Checkpoints are chosen greedily, most expected pages saved first, while one is worth its price.
The price follows the budget: it rises while more than `per_request` checkpoints are kept per
request and falls while fewer are, down to a minimum below which a checkpoint hardly helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.index.placement.placement import Placement

ALIGNMENTS = 8
ZONES = 16
"""On each side: distances from the end, then distances from the beginning."""

_ASSUMED_REQUESTS = 50.0
"""How many requests the assumption about a zone counts for."""

_ASSUMED_BRANCHES = 0.1
_ASSUMED_AT_END = 1.0
"""Prompts that are assumed to diverge in each zone of a request, and to resume at its end."""

_ASSUMED_ALIKE = 8.0
"""How many boundaries the rate of those that are alike counts for."""

_FIRST_PRICE = 1.0
_MIN_PRICE = 0.25
_PRICE_STEP = 0.02
_FORGET_AFTER = 4096
_FIT_DIVISOR = 8
_FIT_AFTER = 256

SHORT = 128
"""Up to so many pages, lists are faster than arrays, each of whose operations costs a microsecond.
Both give the same numbers: they add up in the same order."""

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.intp]


class CostBased(Placement):
    """See the module. `per_request`: how many checkpoints to spend on a request, on average."""

    def __init__(self, per_request: float = 2.0) -> None:
        self._per_request = per_request
        self._price = _FIRST_PRICE
        self._requests = 0
        self._next_fit = 0
        self._branched: Floats = np.zeros((2 * ZONES, ALIGNMENTS))
        self._seen: Floats = np.zeros((2 * ZONES, ALIGNMENTS))
        self._seen_since_fit = [0] * (2 * ZONES * ALIGNMENTS)
        self._rates: Floats = np.zeros(2 * ZONES * ALIGNMENTS)
        self._rate_list: list[float] = []
        self._fit()

    def note_branch(self, at: int, stop: int) -> None:
        if at:
            self._branched[divmod(kind(at, max(at, stop)), ALIGNMENTS)] += 1.0

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        taken = [stop for stop in branches if start < stop <= end]
        return taken + self._choose(start, end, taken)

    def note_placed(self, start: int, end: int, count: int) -> None:
        self._requests += 1
        if end - start <= SHORT:
            seen_since_fit = self._seen_since_fit
            for number in listed_kinds(start, end):
                seen_since_fit[number] += 1
        else:
            seen = np.bincount(kinds(start, end), minlength=self._rates.size)
            self._seen += seen.reshape(self._seen.shape)
        if self._requests >= self._next_fit:
            self._fit()
        change = math.exp(_PRICE_STEP * (count - self._per_request))
        self._price = max(_MIN_PRICE, self._price * change)

    # -- learning ---------------------------------------------------------------------------

    def _fit(self) -> None:
        """Turn counts into rates; often at first, then ever more rarely."""
        self._seen += np.reshape(self._seen_since_fit, self._seen.shape)
        self._seen_since_fit = [0] * self._rates.size
        self._next_fit = self._requests + min(self._requests // _FIT_DIVISOR + 1, _FIT_AFTER)
        if self._requests // _FORGET_AFTER < self._next_fit // _FORGET_AFTER:
            self._branched /= 2
            self._seen /= 2
        rates = np.empty_like(self._seen)
        branched, seen = _at_least_as_aligned(self._branched), _at_least_as_aligned(self._seen)
        rate = (branched[:, 0] + _BRANCHED_BEFORE) / (seen[:, 0] + _SEEN_BEFORE)
        for alignment in range(ALIGNMENTS):
            if alignment:
                rate = _blended(branched[:, alignment], seen[:, alignment], rate)
            own = self._branched[:, alignment], self._seen[:, alignment]
            rates[:, alignment] = _blended(*own, rate)
        self._rates = rates.reshape(-1)
        self._rate_list = self._rates.tolist()

    # -- placement --------------------------------------------------------------------------

    def _choose(self, start: int, end: int, taken: Sequence[int]) -> list[int]:
        """The boundaries that save most, each worth its price, between those that are taken.

        What one saves depends only on its neighbours, so each gap between two is seen to alone.
        """
        short = end - start <= SHORT
        beyond = self._listed_beyond(start, end) if short else self._beyond(start, end)
        best = _best_listed if short else _best
        chosen: list[int] = []
        gaps = list(pairwise([start, *sorted(set(taken)), end + 1]))
        while gaps:
            low, high = gaps.pop()
            first, last = low - start, high - start - 1
            if (beyond[first] - beyond[last]) * (last - first) <= self._price:
                continue  # Not even if all prompts diverged at the very end.
            place, saved = best(beyond, first, last)
            if saved > self._price:
                stop = low + 1 + place
                chosen.append(stop)
                gaps += [(low, stop), (stop, high)]
        return chosen

    def _beyond(self, start: int, end: int) -> Floats:
        """For every page in [start, end]: how many prompts are expected to diverge after it."""
        expected = self._rates[kinds(start, end)]
        beyond = np.zeros(end - start + 1)
        beyond[:-1] = expected[::-1].cumsum()[::-1]
        return beyond

    def _listed_beyond(self, start: int, end: int) -> list[float]:
        rates, total = self._rate_list, 0.0
        beyond = [total]
        for number in reversed(listed_kinds(start, end)):
            total += rates[number]
            beyond.append(total)
        beyond.reverse()
        return beyond


def _best(beyond: Any, first: int, last: int) -> tuple[int, float]:
    """Which boundary between these saves most pages, counted from `first`, and how many."""
    saved = (beyond[first:last] - beyond[last]) * np.arange(1, last - first + 1)
    place = int(saved.argmax())
    return place, saved[place]


def _best_listed(beyond: Any, first: int, last: int) -> tuple[int, float]:
    rest = beyond[last]
    saved = [(more - rest) * pages for pages, more in enumerate(beyond[first:last], 1)]
    most = max(saved)
    return saved.index(most), most


@lru_cache(maxsize=4)
def kinds(start: int, end: int) -> Kinds:
    """The kinds of the boundaries in (start, end] of a request that ends at page `end`.

    A request asks twice: when it chooses and when it has placed.
    """
    octaves, alignments = _tables(end.bit_length())
    from_end = octaves[: end - start][::-1]
    from_start = octaves[start + 1 : end + 1]
    zones = np.where(from_end <= from_start, from_end, from_start + ZONES)
    return zones * ALIGNMENTS + alignments[start + 1 : end + 1]


@lru_cache(maxsize=4)
def listed_kinds(start: int, end: int) -> list[int]:
    """The same as a list."""
    octaves, alignments = _listed_tables(end.bit_length())
    found = []
    for boundary in range(start + 1, end + 1):
        from_end, from_start = octaves[end - boundary], octaves[boundary]
        zone = from_end if from_end <= from_start else from_start + ZONES
        found.append(zone * ALIGNMENTS + alignments[boundary])
    return found


def kind(boundary: int, end: int) -> int:
    """The kind of one of them."""
    from_end, from_start = _octave(end - boundary), _octave(boundary)
    zone = from_end if from_end <= from_start else ZONES + from_start
    return zone * ALIGNMENTS + _alignment(boundary)


def _octave(pages: int) -> int:
    """0 for 0, 1 for 1, 2 for 2–3, 3 for 4–7, …"""
    return min(pages.bit_length(), ZONES - 1)


def _alignment(boundary: int) -> int:
    return min((boundary & -boundary).bit_length() - 1, ALIGNMENTS - 1)


@cache
def _listed_tables(bits: int) -> tuple[list[int], list[int]]:
    """Octave and alignment of every number of so many bits."""
    numbers = range(1 << bits)
    return [*map(_octave, numbers)], [0, *map(_alignment, numbers[1:])]


@cache
def _tables(bits: int) -> tuple[Kinds, Kinds]:
    octaves, alignments = _listed_tables(bits)
    return np.array(octaves, np.intp), np.array(alignments, np.intp)


def _at_least_as_aligned(counts: Floats) -> Floats:
    tails: Floats = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    return tails


def _blended(branched: Floats, seen: Floats, alike: Floats) -> Floats:
    return (branched + _ASSUMED_ALIKE * alike) / (seen + _ASSUMED_ALIKE)


_BRANCHED_BEFORE = np.full(2 * ZONES, _ASSUMED_REQUESTS * _ASSUMED_BRANCHES)
_BRANCHED_BEFORE[0] = _ASSUMED_REQUESTS * _ASSUMED_AT_END
_SEEN_BEFORE = _ASSUMED_REQUESTS * np.tile(np.maximum(1.0, 2.0 ** (np.arange(ZONES) - 1)), 2)
