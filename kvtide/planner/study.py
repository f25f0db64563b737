"""The replays of a plan: the given tiers, and variants that show what would change.

  run         the tiers as given
  placements  the same tiers with other checkpoint placements; for models with windows or states
  writing     the same tiers with other write policies: what storage is spared
  sweep       one tier at several sizes

A replay walks the trace once. A caller that shows progress passes a `Walk` that wraps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvtide.index import DEFAULT_POLICY, Branches, CostBased, EveryPages, LastPage, Placement
from kvtide.planner.replay import Report, Setup, replay, size_tiers
from kvtide.planner.storage_admission import WRITE_POLICIES, WRITE_THROUGH, WritePolicy
from kvtide.planner.traces import Trace, TraceRequest
from kvtide.spec import ALL, ModelMemory, Tier
from kvtide.spec.residency import hot_bytes
from kvtide.spec.sizing import bytes_for

_REGULAR_TOKENS = (8192, 2048)

EQUAL_HIT_RATE = 0.0005
"""Hit rates that differ by less count as equal: they are printed in tenths of a percent."""

Walk = Callable[[Trace, str], Iterable[TraceRequest]]
"""Walks a trace's requests in order, with a label for progress."""


def quietly(trace: Trace, label: str) -> Iterable[TraceRequest]:
    """A walk that shows nothing."""
    return trace


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A checkpoint placement and its name on the command line.

    A placement may learn from the requests, so every replay makes its own.
    """

    name: str
    placement: Callable[[], Placement]


LAST = Checkpoints("last", LastPage)
BRANCH = Checkpoints("branch", Branches)
COST = Checkpoints("cost", CostBased)


def every(pages: int, page_tokens: int) -> Checkpoints:
    return Checkpoints(f"every:{pages * page_tokens}", partial(EveryPages, pages))


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """A model, its traffic and the tiers it is served from. A tier of 0 bytes is not there.

    running  requests that have a hot buffer, where the memory has hot pools. The replay itself
             serves one after another.
    """

    memory: ModelMemory
    trace: Trace
    tier_bytes: Mapping[Tier, int]
    eviction: str = DEFAULT_POLICY
    checkpoints: Checkpoints = COST
    running: int = 1
    write_policy: WritePolicy = WRITE_THROUGH

    def setup(self) -> Setup:
        page_bytes = {
            tier: size and size - self.hot_bytes(tier) for tier, size in self.tier_bytes.items()
        }
        pages = size_tiers(self.memory, page_bytes, self.trace)
        placement = self.checkpoints.placement()
        return Setup(self.memory, pages, self.eviction, placement, self.write_policy)

    def hot_bytes(self, tier: Tier) -> int:
        """Bytes of a tier that hot buffers take from its pages."""
        if tier is not Tier.DEVICE or not self.memory.hot_pools:
            return 0
        pages = -(-self.trace.longest_tokens // self.memory.page_tokens)
        return hot_bytes(self.memory, self.running, pages)

    def min_bytes(self, tier: Tier) -> int:
        """The smallest size of a tier with a page of every pool it has."""
        return self.hot_bytes(tier) + bytes_for(self.memory.kept_in(tier), 1)


def run(study: Study, walk: Walk = quietly) -> Report:
    return replay(study.setup(), walk(study.trace, "replay"))


# -- checkpoint placement -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """The report of one placement, and how many checkpoints a request leaves.

    The ideal, which resumes at every page, keeps none: `checkpoints_per_request` is None.
    """

    name: str
    report: Report
    checkpoints_per_request: float | None


def has_checkpoints(memory: ModelMemory) -> bool:
    """Whether the model has windows or states, which resume only at checkpoints."""
    return any(anchor.reuse.reach is not ALL for anchor in memory.anchors)


def placements(study: Study, base: Report, walk: Walk = quietly) -> list[PlacementCost]:
    """The placements, from the ideal without checkpoints to ever more of them.

    `base` is the report of the study's own placement, which is not replayed again.
    """
    costs = []
    if (ideal := _ideal(study)) is not None:
        name = "every page (ideal)"
        costs.append(PlacementCost(name, replay(ideal, walk(study.trace, name)), None))
    for way in _ways(study):
        report = base
        if way.name != study.checkpoints.name:
            label = f"checkpoints {way.name}"
            report = replay(replace(study, checkpoints=way).setup(), walk(study.trace, label))
        costs.append(PlacementCost(way.name, report, _checkpoints(study.memory, report)))
    return costs


def _ways(study: Study) -> list[Checkpoints]:
    page = study.memory.page_tokens
    ways = [LAST, BRANCH, COST, *(every(-(-tokens // page), page) for tokens in _REGULAR_TOKENS)]
    by_name = {way.name: way for way in [*ways, study.checkpoints]}
    return list(by_name.values())


def _ideal(study: Study) -> Setup | None:
    """The replay of a model that resumes at every page: the same history and no checkpoints."""
    setup = study.setup()
    history = {anchor.name for anchor in study.memory.anchors if anchor.reuse.reach is ALL}
    pools = tuple(p for p in study.memory.pools if (p.follows or p.name) in history)
    if not pools:
        return None
    pages = {
        tier: {anchor: count for anchor, count in anchors.items() if anchor in history}
        for tier, anchors in setup.capacity_pages.items()
    }
    return replace(setup, memory=replace(study.memory, pools=pools), capacity_pages=pages)


def _checkpoints(memory: ModelMemory, report: Report) -> float:
    """Checkpoints that a request leaves on the device, in the pool with the largest number."""
    kept = [
        report.committed_pages.get(anchor.name, 0) / reach
        for anchor in memory.anchors
        if (reach := anchor.reuse.reach_pages(memory.page_tokens)) is not None
    ]
    return max(kept, default=0.0) / max(report.requests, 1)


# -- write policies -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteCost:
    """The report of one write policy, and the bytes that `write_through` writes to storage."""

    policy: WritePolicy
    report: Report
    through_bytes: int

    @property
    def stored_bytes(self) -> int:
        return self.report.moved_bytes["store"]

    @property
    def saved(self) -> float:
        """The fraction of what `write_through` writes to storage that this policy does not."""
        return 1 - self.stored_bytes / self.through_bytes if self.through_bytes else 0.0


def writing(study: Study, base: Report, walk: Walk = quietly) -> list[WriteCost]:
    """What every write policy finds and writes to storage, `write_through` first.

    `base` is the report of the study's own policy, which is not replayed again.
    """
    reports = {}
    for policy in WRITE_POLICIES.values():
        reports[policy.name] = base
        if policy is not study.write_policy:
            setup = replace(study, write_policy=policy).setup()
            reports[policy.name] = replay(setup, walk(study.trace, policy.name))
    through = reports[WRITE_THROUGH.name].moved_bytes["store"]
    return [WriteCost(WRITE_POLICIES[name], found, through) for name, found in reports.items()]


def thriftiest(costs: Iterable[WriteCost]) -> WriteCost:
    """The least writes to storage at the hit rate of `write_through`, or a higher one."""
    listed = list(costs)
    needed = listed[0].report.hit_rate - EQUAL_HIT_RATE
    return min((c for c in listed if c.report.hit_rate >= needed), key=lambda c: c.stored_bytes)


# -- sweeps ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One size of the swept tier."""

    size_bytes: int
    report: Report


def sweep_sizes(min_bytes: int, around_bytes: int, points: int) -> list[int]:
    """Sizes from 1/64 to 4 times `around_bytes`, evenly spaced by ratio; none below the least."""
    low, high = math.log(around_bytes / 64), math.log(around_bytes * 4)
    step = (high - low) / max(points - 1, 1)
    return sorted({max(min_bytes, round(math.exp(low + i * step))) for i in range(points)})


def sweep(study: Study, tier: Tier, sizes: Iterable[int], walk: Walk = quietly) -> list[SweepPoint]:
    """Replay with one tier at each size, the others as given."""
    listed = list(sizes)
    found = []
    for number, size in enumerate(listed, 1):
        label = f"sweep of {tier.name.lower()}, {number} of {len(listed)}"
        at_size = replace(study, tier_bytes={**study.tier_bytes, tier: size})
        report = replay(at_size.setup(), walk(study.trace, label))
        found.append(SweepPoint(size, report))
    return found
