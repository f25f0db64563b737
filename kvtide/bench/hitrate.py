"""How much reuse an eviction policy keeps, beside the offline optimum.

The optimum (Belady) knows every prompt that will come and always gives up what is needed again
last. In a prefix tree a page is never needed before its parent, so evicting the farthest next use,
deepest first among equals, keeps prefixes whole and is optimal among policies that keep the
running prompt cached.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.bench.contestants import Full, Timings
from kvtide.bench.progress import ShowProgress
from kvtide.index import POLICIES
from kvtide.planner.traces import Trace, footprint_tokens, prefix_keys

Ids = npt.NDArray[np.int64]

_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class HitRateRow:
    """Token hit rates at one capacity."""

    fraction: float
    capacity_tokens: int
    hit_rates: dict[str, float]
    optimum: float

    def gap_closed(self, policy: str, base: str = "lru") -> float:
        """How much of the way from `base` to the optimum a policy goes."""
        gap = self.optimum - self.hit_rates[base]
        return (self.hit_rates[policy] - self.hit_rates[base]) / gap if gap > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: str
    requests: int
    footprint_tokens: int
    unlimited: float
    rows: tuple[HitRateRow, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    trace: Trace,
    policies: Sequence[str],
    fractions: Sequence[float],
    page: int,
    progress: ShowProgress,
) -> Comparison:
    """Every policy at every capacity (a fraction of the footprint), through the real index."""
    for name in policies:
        if name not in POLICIES:
            raise ValueError(f"no eviction policy named {name}; use {', '.join(POLICIES)}")
    footprint = footprint_tokens(trace, page)
    longest = max(len(request.prompt) for request in trace)
    uses, limits = _page_uses(trace, page)
    rows = []
    for fraction in fractions:
        capacity = max(int(fraction * footprint), longest + 1024) // 256 * 256
        rates = {
            name: _replayed(trace, name, capacity, page, f"{name} at {fraction:.1%}", progress)
            for name in policies
        }
        best = optimum(uses, limits, capacity // page) * page / trace.prompt_tokens
        rows.append(HitRateRow(fraction, capacity, rates, best))
    unlimited = optimum(uses, limits, _NEVER) * page / trace.prompt_tokens
    return Comparison(trace.name, trace.requests, footprint, unlimited, tuple(rows))


def _replayed(
    trace: Trace, policy: str, capacity: int, page: int, label: str, progress: ShowProgress
) -> float:
    contestant = Full(capacity, page, eviction=policy)
    timings: Timings = defaultdict(list)
    matched = 0
    for number, request in enumerate(progress(trace, trace.requests, f"{trace.name}, {label}")):
        handle = contestant.start(contestant.prepare(number, request.prompt), timings)
        matched += handle.matched
        contestant.finish(handle, timings)
        timings.clear()
    return matched / trace.prompt_tokens


def _page_uses(trace: Trace, page: int) -> tuple[list[Ids], list[int]]:
    """Per request, its pages as small numbers, and how many of them a hit may cover."""
    keys = [prefix_keys(request.prompt, page) for request in trace]
    limits = [(len(request.prompt) - 1) // page for request in trace]
    numbers = np.unique(np.concatenate(keys), return_inverse=True)[1].reshape(-1)
    ends = np.cumsum([len(request_keys) for request_keys in keys])[:-1]
    return [part.astype(np.int64) for part in np.split(numbers, ends)], limits


def optimum(uses: Sequence[Ids], limits: Sequence[int], capacity_pages: int) -> int:
    """Pages that the best possible policy finds in the cache.

    Pages of one request that are needed again by the same later request form a group. A group
    stays together until then, so evicting shortens groups from their end and never looks at pages.
    """
    following = _next_uses(uses)
    pages = 1 + max((int(ids.max()) for ids in uses if len(ids)), default=0)
    group_of, place_in = np.zeros(pages, np.int64), np.zeros(pages, np.int64)
    kept = np.zeros(1 + sum(len(ids) for ids in uses), np.int64)
    groups = 1
    farthest: list[tuple[int, int, int]] = []
    held = hits = 0
    for now, ids in enumerate(uses):
        resident = kept[group_of[ids]] > place_in[ids]
        gaps = np.flatnonzero(~resident)
        hits += min(int(gaps[0]) if len(gaps) else len(ids), limits[now])
        held += len(gaps)
        starts = np.flatnonzero(np.diff(following[now], prepend=-1))
        sizes = np.diff(starts, append=len(ids))
        made = np.arange(groups, groups + len(starts))
        groups += len(starts)
        group_of[ids] = np.repeat(made, sizes)
        place_in[ids] = np.arange(len(ids)) - np.repeat(starts, sizes)
        kept[made] = sizes
        held = _shrink(farthest, kept, held, capacity_pages, now)
        for entry in zip(-following[now][starts], -starts, made, strict=True):
            heapq.heappush(farthest, (int(entry[0]), int(entry[1]), int(entry[2])))
    return hits


def _shrink(
    farthest: list[tuple[int, int, int]], kept: Ids, held: int, capacity: int, now: int
) -> int:
    """Give up pages, farthest next use first, until no more than `capacity` are held."""
    while held > capacity and farthest:
        use, start, group = heapq.heappop(farthest)
        if -use <= now:
            continue
        given = min(held - capacity, int(kept[group]))
        kept[group] -= given
        held -= given
        if kept[group]:
            heapq.heappush(farthest, (use, start, group))
    return held


def _next_uses(uses: Sequence[Ids]) -> list[Ids]:
    """For every request and page, which later request needs the page next."""
    pages = 1 + max((int(ids.max()) for ids in uses if len(ids)), default=0)
    upcoming = np.full(pages, _NEVER, np.int64)
    following: list[Ids] = []
    for number in range(len(uses) - 1, -1, -1):
        following.append(upcoming[uses[number]])
        upcoming[uses[number]] = number
    following.reverse()
    return following
