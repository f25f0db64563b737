"""The hit rate at every capacity at once: LRU stack distances in one pass over a trace.

A page is found again under LRU iff fewer pages than the capacity were used since its last use.
So one pass that records this distance for every reused page gives the hits of every capacity
(Mattson et al., 1970). A prompt uses all its pages at the same moment and a prefix outlives what
follows it, so the pages last used by one request are a run of its path of which the upper pages
are kept longest: a run found again has consecutive distances and costs one step of O(log n).

The curve is of one tier that keeps the whole history at page granularity. A lower tier that gets
everything written through it is such a tier for the tokens of all tiers above it.

The knee is where the curve, over the logarithm of the capacity, rises furthest above the straight
line from its first to its last point (Kneedle: Satopää et al., 2011). It begins at the longest
prompt, since less cannot serve the trace, and ends where more capacity gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtide.planner.traces import TraceRequest, prefix_keys

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """Hits of an LRU cache by its capacity in pages.

    hits[c]          pages found again with a capacity of c pages; never falls
    footprint_pages  distinct pages of the trace: with so many nothing is evicted
    longest_pages    pages of the longest prompt, the one it is still computing included
    """

    page_tokens: int
    prompt_tokens: int
    footprint_pages: int
    longest_pages: int
    hits: Counts

    def hit_rate(self, pages: int) -> float:
        """The fraction of all prompt tokens that a cache of so many pages finds."""
        found = int(self.hits[min(pages, len(self.hits) - 1)]) * self.page_tokens
        return found / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def best_hit_rate(self) -> float:
        """The hit rate of a cache that evicts nothing."""
        return self.hit_rate(self.footprint_pages)

    def pages_for_fraction(self, fraction: float) -> int:
        """The fewest pages that reach this fraction of the best hit rate."""
        return int(np.searchsorted(self.hits, fraction * int(self.hits[-1])))

    def knee_pages(self) -> int:
        """The knee (see the module); the end of a curve without a bend."""
        last = self.pages_for_fraction(1.0)
        first = max(1, min(self.longest_pages, last))
        if last <= first:
            return last
        pages = np.arange(first, last + 1)
        hits = self.hits[first : last + 1]
        rise = (hits - hits[0]) / max(int(hits[-1] - hits[0]), 1)
        along = np.log(pages / first) / np.log(last / first)
        return first + int(np.argmax(rise - along))


def hit_curve(requests: Iterable[TraceRequest], page_tokens: int) -> HitCurve:
    """The curve of a trace, from one walk."""
    keys, prompts = [], []
    for request in requests:
        keys.append(prefix_keys(request.prompt, page_tokens))
        prompts.append(len(request.prompt))
    distinct, pages = np.unique(
        np.concatenate([np.empty(0, np.uint64), *keys]), return_inverse=True
    )
    paths = np.split(pages, np.cumsum([len(path) for path in keys]))[:-1]
    # The last token is always computed, so a page that would end the prompt is no hit.
    limits = [(tokens - 1) // page_tokens for tokens in prompts]
    return HitCurve(
        page_tokens,
        prompt_tokens=sum(prompts),
        footprint_pages=len(distinct),
        longest_pages=max((-(-tokens // page_tokens) for tokens in prompts), default=0),
        hits=_hits(paths, limits, len(distinct)),
    )


def _hits(paths: list[Counts], limits: list[int], distinct: int) -> Counts:
    """Hits by capacity, from the page numbers of each prompt in order."""
    last_used = np.full(distinct, -1, np.int64)
    live = _Tally(len(paths))
    steps = np.zeros(distinct + 2, np.int64)
    for now, (path, limit) in enumerate(zip(paths, limits, strict=True)):
        runs = _runs(last_used[path])
        for start, end, before in runs:
            found = min(end, limit) - start
            if found > 0:
                nearest = live.after(before) + 1
                steps[nearest] += 1
                steps[nearest + found] -= 1
        for start, end, before in runs:
            live.add(before, start - end)
        last_used[path] = now
        live.add(now, len(path))
    return np.cumsum(np.cumsum(steps))[:-1]


def _runs(used: Counts) -> list[tuple[int, int, int]]:
    """Start, end and last use of the runs of pages that were used before, by one request each.

    What is new follows what is known, so the known pages are the first ones.
    """
    known = used[used >= 0]
    edges = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist(), len(known)]
    return [(start, end, int(known[start])) for start, end in pairwise(edges) if start < end]


class _Tally:
    """A Fenwick tree: how many pages were last used by each request, and by all after one."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0

    def add(self, request: int, pages: int) -> None:
        self._total += pages
        place = request + 1
        while place < len(self._sums):
            self._sums[place] += pages
            place += place & -place

    def after(self, request: int) -> int:
        """Pages last used by a later request than this one."""
        upto = 0
        place = request + 1
        while place:
            upto += self._sums[place]
            place &= place - 1
        return self._total - upto
