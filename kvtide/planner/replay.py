"""A trace sent through the real index: what is found where, what moves, what it saves.

Requests come one after another, each as the cache would treat it: match, fetch and load what lies
below the device, reserve, compute, commit, and write what is new through to the tiers below. Every
transfer lands at once: the replay knows bytes, not time. Times are worked out afterwards, from the
bytes and the `Rates` that the caller assumes.

A prefix that cannot be brought up for want of room is matched again in fewer tiers. A prompt for
which the device has no room at all is counted and leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvtide.index import (
    DEFAULT_POLICY,
    Arrival,
    CostBased,
    Hit,
    Index,
    IndexLease,
    Placement,
    Prompt,
    Stop,
)
from kvtide.planner.traces import Trace, TraceRequest
from kvtide.spec import ModelMemory, Tier
from kvtide.spec.sizing import pages_for

LINKS: Mapping[str, tuple[Tier, Tier]] = {
    "load": (Tier.HOST, Tier.DEVICE),
    "backup": (Tier.DEVICE, Tier.HOST),
    "fetch": (Tier.STORAGE, Tier.HOST),
    "store": (Tier.HOST, Tier.STORAGE),
}
"""The four directions in which pages move, by their names."""

_PART_TOKENS = 512

_LINK_NAMES = {way: name for name, way in LINKS.items()}


@dataclass(frozen=True, slots=True)
class Setup:
    """What to replay on, once. `capacity_pages` names the tiers there are, the device always."""

    memory: ModelMemory
    capacity_pages: Mapping[Tier, Mapping[str, int]]
    eviction: str = DEFAULT_POLICY
    placement: Placement = field(default_factory=CostBased)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the replay cannot know: how fast bytes move and tokens are computed."""

    prefill_tokens_s: float
    link_bytes_s: float = 55e9
    storage_read_bytes_s: float = 3e9
    storage_write_bytes_s: float = 2e9

    def bytes_s(self, link: str) -> float:
        if link == "fetch":
            return self.storage_read_bytes_s
        return self.storage_write_bytes_s if link == "store" else self.link_bytes_s


@dataclass(frozen=True, slots=True)
class Miss:
    """What a pool kept requests from finding, for one reason."""

    pool: str
    reason: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay counted.

    hit_tokens       prompt tokens found, by the tier each came from
    moved_bytes      by link: load, backup, fetch, store
    resident_pages   at the end, by tier and anchor; `evicted_pages` all along
    committed_pages  pages that requests computed and left on the device, by anchor
    unfit_requests   prompts longer than the device has room for; nothing of them is a hit
    skipped_copies   by link: copies not made because the target had no room
    misses           why no more was found, the most tokens first
    """

    requests: int
    prompt_tokens: int
    hit_tokens: Mapping[Tier, int]
    moved_bytes: Mapping[str, int]
    resident_pages: Mapping[tuple[Tier, str], int]
    evicted_pages: Mapping[tuple[Tier, str], int]
    committed_pages: Mapping[str, int]
    unfit_requests: int
    skipped_copies: Mapping[str, int]
    misses: tuple[Miss, ...]

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(self.hit_tokens.values())

    @property
    def hit_rate(self) -> float:
        return self._share(self.saved_tokens)

    def tier_hit_rate(self, tier: Tier) -> float:
        """Share of all prompt tokens that came from this tier."""
        return self._share(self.hit_tokens.get(tier, 0))

    def link_s(self, link: str, rates: Rates) -> float:
        """Seconds the link is busy with this."""
        return self.moved_bytes.get(link, 0) / rates.bytes_s(link)

    def prefill_saved_s(self, rates: Rates) -> float:
        """Seconds it would take to compute the tokens that were found."""
        return self.saved_tokens / rates.prefill_tokens_s

    def waited_s(self, rates: Rates) -> float:
        """Seconds to bring the found pages up, if nothing else is done meanwhile."""
        return self.link_s("load", rates) + self.link_s("fetch", rates)

    def saved_s(self, rates: Rates) -> float:
        return self.prefill_saved_s(rates) - self.waited_s(rates)

    def _share(self, tokens: int) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(setup: Setup, requests: Iterable[TraceRequest]) -> Report:
    """Serve the requests in order from an empty cache."""
    run = _Replay(setup)
    for request in requests:
        run.serve(request)
    return run.report()


def size_tiers(
    memory: ModelMemory, tier_bytes: Mapping[Tier, int], trace: Trace
) -> dict[Tier, dict[str, int]]:
    """Pages per tier and anchor; a tier of 0 bytes is left out.

    No tier gets more slots than the trace has pages, so that a tier of petabytes costs nothing.
    """
    most = trace.prompt_tokens // memory.page_tokens + trace.requests
    return {
        tier: {
            anchor: min(pages, most)
            for anchor, pages in pages_for(memory.kept_in(tier), total).items()
        }
        for tier, total in sorted(tier_bytes.items())
        if total
    }


class _Replay:
    """The index under replay, and what was counted so far."""

    def __init__(self, setup: Setup) -> None:
        memory = setup.memory
        assert Tier.DEVICE in setup.capacity_pages, "a replay needs a device"
        self._index = Index(
            memory,
            setup.capacity_pages,
            eviction=setup.eviction,
            placement=setup.placement,
        )
        self._tiers = sorted(setup.capacity_pages)
        self._page = memory.page_tokens
        self._anchors = [anchor.name for anchor in memory.anchors]
        self._slot_bytes = {name: memory.at_rest.slot_bytes(name) for name in self._anchors}
        self._requests = self._prompt_tokens = self._unfit = 0
        self._hit_pages: Counter[Tier] = Counter()
        self._moved_bytes: Counter[str] = Counter(dict.fromkeys(self._links(), 0))
        self._arrived: Counter[tuple[Tier, str]] = Counter()
        self._committed: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._missed: Counter[tuple[str, str]] = Counter()
        self._missed_tokens: Counter[tuple[str, str]] = Counter()

    # -- one request ------------------------------------------------------------------------

    def serve(self, request: TraceRequest) -> None:
        index, tokens = self._index, len(request.prompt)
        self._requests += 1
        self._prompt_tokens += tokens
        hit, found, stops, lease = self._bring_up(index.prompt(request.prompt))
        if self._compute(lease, tokens):
            self._hit_pages.update(found)
            self._count_misses(hit, stops)
            self._write_through(lease)
        else:
            self._unfit += 1
        index.release(lease)

    def _bring_up(self, prompt: Prompt) -> tuple[Hit, dict[Tier, int], list[Stop], IndexLease]:
        """Lease the deepest prefix that can be had on the device, and have it there."""
        index = self._index
        for slowest in reversed(self._tiers):
            hit = index.match(prompt, slowest)
            found, stops = index.pages_by_tier(hit), index.why(hit)
            lease = index.pin(hit)
            if self._load(lease):
                return hit, found, stops, lease
            index.release(lease)
        raise AssertionError("what lies on the device needs no copy")

    def _load(self, lease: IndexLease) -> bool:
        """Bring the lease's pages up tier by tier; False where one has no room for them."""
        slowest = self._index.slowest(lease)
        below = [tier for tier in reversed(self._tiers) if tier <= slowest]
        return all(self._copy(lease, source, target) for source, target in pairwise(below))

    def _compute(self, lease: IndexLease, tokens: int) -> bool:
        """Commit the prompt; False where its history does not fit.

        Where not all checkpoints fit at once, it is computed part by part as an engine does: each
        part may take the place of an earlier one's.
        """
        index = self._index
        if index.reserve(lease, tokens):
            self._commit(lease, tokens)
            return True
        if not index.reserve_with(lease, tokens, ()):
            return False
        start = lease.boundary * self._page
        index.shrink(lease, start)
        for upto in (*range(start + _PART_TOKENS, tokens, _PART_TOKENS), tokens):
            if not (index.advance(lease, upto) or index.advance_without_checkpoints(lease, upto)):
                return False
            self._commit(lease, upto)
        return True

    def _commit(self, lease: IndexLease, tokens: int) -> None:
        resident = self._index.resident_pages
        before = [resident(Tier.DEVICE, anchor) for anchor in self._anchors]
        self._index.commit(lease, tokens)
        for anchor, pages in zip(self._anchors, before, strict=True):
            self._committed[anchor] += resident(Tier.DEVICE, anchor) - pages

    def _write_through(self, lease: IndexLease) -> None:
        for source, target in pairwise(self._tiers):
            self._copy(lease, source, target)

    def _copy(self, lease: IndexLease, source: Tier, target: Tier) -> bool:
        link = _LINK_NAMES[source, target]
        arrival = self._index.copy(lease, source, target)
        if arrival is None:
            self._skipped[link] += 1
            return False
        self._count_arrival(link, arrival)
        self._index.land(arrival)
        return True

    # -- counting ---------------------------------------------------------------------------

    def _links(self) -> list[str]:
        return [name for name, way in LINKS.items() if set(way) <= set(self._tiers)]

    def _count_arrival(self, link: str, arrival: Arrival) -> None:
        for move in arrival.moves:
            pages = len(move.target_slots)
            self._arrived[move.target, move.anchor] += pages
            self._moved_bytes[link] += pages * self._slot_bytes[move.anchor]

    def _count_misses(self, hit: Hit, stops: list[Stop]) -> None:
        """A pool missed what the index knew beyond its reach, or else what is new to it."""
        reached = hit.matched if hit.boundary < hit.matched else hit.limit
        for stop in stops:
            self._missed[stop.pool, stop.reason] += 1
            self._missed_tokens[stop.pool, stop.reason] += reached * self._page - stop.at

    def report(self) -> Report:
        resident = {
            (tier, anchor): self._index.resident_pages(tier, anchor)
            for tier in self._tiers
            for anchor in self._anchors
        }
        entered = self._arrived.copy()
        for anchor, pages in self._committed.items():
            entered[Tier.DEVICE, anchor] += pages
        return Report(
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            hit_tokens={tier: self._hit_pages[tier] * self._page for tier in self._tiers},
            moved_bytes=dict(self._moved_bytes),
            resident_pages=resident,
            evicted_pages={cell: entered[cell] - pages for cell, pages in resident.items()},
            committed_pages=dict(self._committed),
            unfit_requests=self._unfit,
            skipped_copies=dict(self._skipped),
            misses=self._misses(),
        )

    def _misses(self) -> tuple[Miss, ...]:
        tokens = self._missed_tokens
        misses = [Miss(*why, count, tokens[why]) for why, count in self._missed.items()]
        return tuple(sorted(misses, key=lambda miss: (-miss.tokens, miss.pool, miss.reason)))
