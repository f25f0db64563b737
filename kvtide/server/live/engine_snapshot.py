"""Engine and cache at one instant, as plain data: what the engine's thread does for viewers.

A snapshot costs a pass over the present requests and a few counters. The tree is surveyed in slices
of half a millisecond, so that a step is never late for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from kvtide.cache import Stats, StorageStats
from kvtide.engine import Engine, Request
from kvtide.engine.speculation.accept_length_stats import PrefixOrigin
from kvtide.index import IndexLease, TreeBranch, TreeSurvey
from kvtide.server.live.request_rows import MAX_MISSES, miss_row, request_rows
from kvtide.server.live.stored_branches import StoredBranches
from kvtide.spec import RankShape, Tier
from kvtide.storage import Store, StoreStatus

Json = dict[str, Any]

ONE_RANK = RankShape()
SLICE_S = 0.0005
SURVEY_EVERY_S = 3.0
"""How long an outline of the tree is good for."""
SLICE_NODES = 32
"""The clock is read after so many nodes."""
MAX_BRANCHES = 240
"""The widest ones are shown."""
STATUS_EVERY_S = 10.0
"""How often a store is asked what it holds: that may cost it a round trip."""


class TreeOutline(NamedTuple):
    """The tree as the last whole survey found it at `found`, in seconds of `time.time`.

    An outline does not change, but for what its branches say of a store: then it is another one.
    """

    top: TreeBranch
    nodes: int
    found: float


class EngineSnapshots:
    """Takes snapshots of one engine, on its thread.

    tokens          whether snapshots have tokens of prompts, which may become text
    shape           the ranks that store pages
    engine_s        CPU seconds of the engine's thread that went into it since the start
    survey_every_s  how long an outline of the tree is good for
    """

    def __init__(
        self,
        *,
        tokens: bool,
        shape: RankShape = ONE_RANK,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.engine_s = 0.0
        self._tokens = tokens
        self._clock = clock
        self._survey: TreeSurvey | None = None
        self.survey_every_s = SURVEY_EVERY_S
        self._surveyed, self._due = False, 0.0
        self._outline = TreeOutline(TreeBranch(), 0, 0.0)
        self._store = StoreStatusPoll()
        self._stored = StoredBranches(shape)
        self._has_store = False

    def take(self, engine: Engine) -> Json:
        """The whole snapshot, and a slice of the survey."""
        began = self._clock()
        cache, scheduler = engine.cache, engine.scheduler
        stats = cache.stats(session_pages=False)
        present = [*scheduler.running, *scheduler.queued]
        found = {
            "tick": cache.index.tick,
            "occupancy": _occupancy(engine, stats),
            "hot": _hot(engine),
            "tokens": _tokens(stats),
            "flows": _flows(stats),
            "loading_s": stats.busy_s["load"] + (stats.storage.reading_s if stats.storage else 0),
            "requests": request_rows(present, tokens=self._tokens)
            | {"running": len(scheduler.running), "waiting": scheduler.waiting},
            "misses": {"counts": _miss_counts(stats), "last": _misses(scheduler.running)},
            "storage": _storage(stats.storage),
            "store": self._store.latest(engine, time.monotonic()) if stats.storage else {},
            "checks": _checks(engine),
            "speculation": _speculation(engine),
            "sessions": {"pinned": stats.sessions.pinned, "known": stats.sessions.known},
            "refused": stats.refused,
            "skipped_backups": stats.skipped_backups,
            "overdue": stats.overdue,
        }
        self._has_store = stats.storage is not None
        if time.monotonic() >= self._due:
            self._surveyed = False
        self._advance(engine, self._clock() + SLICE_S)
        found["tree"] = self._outline
        self.engine_s += self._clock() - began
        return found

    def survey(self, engine: Engine) -> bool:
        """A slice of the survey, if one is going on; whether another slice is needed."""
        began = self._clock()
        self._advance(engine, began + SLICE_S)
        self.engine_s += self._clock() - began
        return not self._surveyed

    def forget(self) -> None:
        """The last viewer has gone: let go of the tree."""
        self._survey = None

    def _advance(self, engine: Engine, until: float) -> None:
        survey = self._survey  # `forget` may come at any moment, from the event loop.
        if survey is None:
            sessions = engine.cache.sessions
            survey = engine.cache.index.survey(lambda: _standing(sessions.pinned()))
            self._survey = survey
        while not self._surveyed and self._clock() < until:
            if survey.advance(SLICE_NODES):
                assert survey.found is not None, "an outline is complete"
                self._surveyed, self._due = True, time.monotonic() + self.survey_every_s
                self._outline = TreeOutline(survey.found, survey.nodes, time.time())
                shown = survey.found.widest(MAX_BRANCHES) if self._has_store else ()
                self._stored.begin([branch for _, branch in shown])
        now = time.monotonic()
        if self._surveyed and self._stored.advance(engine, now, lambda: self._clock() < until):
            self._outline = TreeOutline(*self._outline)  # Another one: its branches say more.


class StoreStatusPoll:
    """The store's latest report of what it holds, asked for now and then, and not waited for."""

    def __init__(self) -> None:
        self._last: Json = {}
        self._pending: Future[StoreStatus] | None = None
        self._asked = -STATUS_EVERY_S

    def latest(self, engine: Engine, now: float) -> Json:
        if self._pending is not None and self._pending.done():
            if not self._pending.cancelled() and self._pending.exception() is None:
                self._last = asdict(self._pending.result())
            self._pending = None
        if self._pending is None and now - self._asked >= STATUS_EVERY_S:
            self._pending, self._asked = engine.cache.storage.ask(_status_of), now
        return self._last


def _status_of(store: Store) -> StoreStatus:
    return store.status()


# -- the parts of a snapshot ------------------------------------------------------------------


def _occupancy(engine: Engine, stats: Stats) -> list[Json]:
    """Pages of every anchor on the device and on the host. Sidecars use their anchor's slots."""
    memory = engine.cache.memory
    sidecars = {
        anchor.name: [pool.name for pool in memory.pools if pool.follows == anchor.name]
        for anchor in memory.anchors
    }
    return [
        {
            "tier": tier.name.lower(),
            "pool": anchor,
            "sidecars": sidecars[anchor],
            "capacity": count.capacity,
            "resident": count.resident,
            "free": count.free,
            "page_bytes": memory.kept_in(tier).slot_bytes(anchor),
        }
        for (tier, anchor), count in stats.pages.items()
        if count.capacity
    ]


def _hot(engine: Engine) -> Json | None:
    """Buffers of requests whose pages are on the host; None where all pools are resident."""
    memory, (in_use, rows) = engine.cache.memory, engine.cache.index.hot_rows
    if not memory.hot_pools:
        return None
    pools = [pool.name for pool in memory.hot_pools]
    return {"pools": pools, "in_use": in_use, "rows": rows}


def _tokens(stats: Stats) -> dict[str, int]:
    """Prompt tokens since the start, by where they came from."""
    found = {tier.name.lower(): stats.cached_tokens.get(tier, 0) for tier in Tier}
    return {**found, "computed": stats.prompt_tokens - sum(found.values())}


def _flows(stats: Stats) -> dict[str, Json]:
    """By way: bytes since the start, or since the store was attached; what waits or moves now."""
    storage = stats.storage
    copies = {
        way: {
            "bytes": stats.moved_bytes[way],
            "queue": stats.queues[way].in_flight,
            "unit": "in flight",
            "reserved": stats.queues[way].reserved,
        }
        for way in ("load", "backup")
    }
    if storage is None:
        return copies
    fetch = {"queue": storage.fetching, "unit": "fetches open"}
    store = {"queue": storage.waiting_pages, "unit": "pages queued"}
    moved = storage.moved_bytes
    return {
        **copies,
        "fetch": {"bytes": moved["fetch"], **fetch},
        "store": {"bytes": moved["store"], **store},
    }


def _miss_counts(stats: Stats) -> list[Json]:
    """Most frequent first."""
    counted = sorted(stats.misses.items(), key=lambda item: -item[1])
    return [{"pool": pool, "reason": reason, "leases": n} for (pool, reason), n in counted]


def _misses(running: Sequence[Request]) -> list[Json]:
    """Of the requests that were admitted last."""
    rows = (miss_row(request) for request in reversed(running) if not request.params.alone)
    return [*islice((row for row in rows if row is not None), MAX_MISSES)]


def _storage(stats: StorageStats | None) -> Json | None:
    return None if stats is None else asdict(stats)


def _checks(engine: Engine) -> Json | None:
    """Restored prefixes that were recomputed; None where none is."""
    return None if engine.oracle is None else asdict(engine.oracle.counts)


def _speculation(engine: Engine) -> Json | None:
    """Tokens per verify step, by the origin of the prefix; None without speculation."""
    lengths, guard = engine.accept_length_stats, engine.accept_length_guard
    if lengths is None:
        return None
    return {
        "mean": lengths.mean(),
        "origins": {o.value: lengths.mean(o) for o in PrefixOrigin if lengths.steps[o]},
        "accepted": lengths.accepted,
        "rejected": lengths.rejected,
        "alarms": 0 if guard is None else sum(guard.alarms.values()),
    }


def _standing(pinned: Iterator[tuple[str, IndexLease]]) -> Mapping[int, Sequence[str]]:
    """The ids of sessions, by the node where the prefix of one of their lines ends."""
    standing: dict[int, list[str]] = {}
    for name, lease in pinned:
        names = standing.setdefault(id(lease.node), [])
        if name not in names:
            names.append(name)
    return standing
