"""One rank of a server: what engine commands are applied to."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtide.cache import Prefetch
from kvtide.engine import Engine, RankTopology
from kvtide.server.handoff.rank_handoff import RankHandoff
from kvtide.server.ranks.step_watch import StepClock
from kvtide.transfer.store_link import StoreLink


@dataclass(slots=True)
class EngineRank:
    """Its engine, its topology, its handoffs; by number, the stores that it is opening and the
    prefixes that it brings up.

    `clock` runs during steps.
    """

    engine: Engine
    topology: RankTopology = field(default_factory=RankTopology)
    openings: dict[int, Future[StoreLink]] = field(default_factory=dict)
    prefetches: dict[int, Prefetch] = field(default_factory=dict)
    handoff: RankHandoff | None = None
    clock: StepClock = field(default_factory=StepClock)
