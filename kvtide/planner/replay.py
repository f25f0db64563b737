"""Replays a trace through the real index: hits by tier, bytes moved, time saved.

The replay serves one request after another as the cache does: match, fetch and load pages below
the device, reserve, commit, and copy pages down as the write policy says. Every transfer lands
at once: the replay counts bytes, and times follow from the bytes and the assumed `Rates`.

A prefix that does not fit into a faster tier is matched again in fewer tiers. A prompt that does
not fit where running requests have their pages (`PoolSpec.home`) is counted and leaves nothing
behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
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
from kvtide.planner.storage_admission import WRITE_THROUGH, RequestedPages, WritePolicy
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

_CHUNK_TOKENS = 512

_LINK_NAMES = {way: name for name, way in LINKS.items()}


@dataclass(frozen=True, slots=True)
class Setup:
    """The cache of one replay. `capacity_pages` has an entry per tier, the device's always."""

    memory: ModelMemory
    capacity_pages: Mapping[Tier, Mapping[str, int]]
    eviction: str = DEFAULT_POLICY
    placement: Placement = field(default_factory=CostBased)
    write_policy: WritePolicy = WRITE_THROUGH


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumed rates of links, storage and prefill."""

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
    """Tokens that a pool kept requests from finding, for one reason."""

    pool: str
    reason: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """The counts of a replay.

    hit_tokens       prompt tokens found, by the tier each came from
    moved_bytes      by link: load, backup, fetch, store
    resident_pages   at the end, by tier and anchor; `evicted_pages` all along
    committed_pages  pages that requests computed and left in their home tier, by anchor
    unfit_requests   prompts that do not fit in the home tiers; nothing of them is a hit
    skipped_copies   by link: copies for which the target had no free slots
    misses           why prefixes were not longer, by tokens, largest first
    found_tokens     of every request, in their order
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
    found_tokens: tuple[int, ...] = ()

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were found instead of computed."""
        return sum(self.hit_tokens.values())

    @property
    def hit_rate(self) -> float:
        return self._fraction(self.saved_tokens)

    def tier_hit_rate(self, tier: Tier) -> float:
        """The fraction of all prompt tokens that came from this tier."""
        return self._fraction(self.hit_tokens.get(tier, 0))

    def link_s(self, link: str, rates: Rates) -> float:
        """Seconds that the link is busy."""
        return self.moved_bytes.get(link, 0) / rates.bytes_s(link)

    def prefill_saved_s(self, rates: Rates) -> float:
        """Seconds to prefill the tokens that were found."""
        return self.saved_tokens / rates.prefill_tokens_s

    def waited_s(self, rates: Rates) -> float:
        """Seconds to fetch and load the found pages, without overlap."""
        return self.link_s("load", rates) + self.link_s("fetch", rates)

    def saved_s(self, rates: Rates) -> float:
        return self.prefill_saved_s(rates) - self.waited_s(rates)

    def _fraction(self, tokens: int) -> float:
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
    max_pages = trace.prompt_tokens // memory.page_tokens + trace.requests
    return {
        tier: {
            anchor: min(pages, max_pages)
            for anchor, pages in pages_for(memory.kept_in(tier), total).items()
        }
        for tier, total in sorted(tier_bytes.items())
        if total
    }


class _Replay:
    """The index under replay, and the counts so far."""

    def __init__(self, setup: Setup) -> None:
        memory = setup.memory
        assert Tier.DEVICE in setup.capacity_pages, "a replay needs a device"
        self._index = Index(
            memory,
            setup.capacity_pages,
            eviction=setup.eviction,
            placement=setup.placement,
            hot_rows=1 if memory.hot_pools else 0,
        )
        self._writing = setup.write_policy
        self._requested = (
            RequestedPages(memory.page_tokens) if self._writing.requested_again else None
        )
        self._tiers = sorted(setup.capacity_pages)
        self._page = memory.page_tokens
        self._memory = memory
        self._homes = {anchor.name: anchor.home for anchor in memory.anchors}
        self._slot_bytes = {name: memory.at_rest.slot_bytes(name) for name in self._homes}
        self._requests = self._prompt_tokens = self._unfit = 0
        self._hit_pages: Counter[Tier] = Counter()
        self._moved_bytes: Counter[str] = Counter(dict.fromkeys(self._links(), 0))
        self._arrived: Counter[tuple[Tier, str]] = Counter()
        self._committed: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._missed: Counter[tuple[str, str]] = Counter()
        self._missed_tokens: Counter[tuple[str, str]] = Counter()
        self._found_tokens: list[int] = []

    # -- one request ------------------------------------------------------------------------

    def serve(self, request: TraceRequest) -> None:
        index, tokens = self._index, len(request.prompt)
        self._requests += 1
        self._prompt_tokens += tokens
        hit, found, stops, lease = self._bring_up(index.prompt(request.prompt))
        self._write(lease, self._writing.found)
        known = self._requested.add(request.prompt) if self._requested is not None else 0
        if self._compute(lease, tokens, known * self._page):
            self._hit_pages.update(found)
            self._count_misses(hit, stops)
            self._write(lease, self._writing.computed)
        else:
            self._unfit += 1
            found = {}
        self._found_tokens.append(sum(found.values()) * self._page)
        index.release(lease)

    def _bring_up(self, prompt: Prompt) -> tuple[Hit, dict[Tier, int], list[Stop], IndexLease]:
        """Lease the longest prefix that fits on the device, and bring it there."""
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
        """Copy the lease's pages up tier by tier; False where a tier has no free slots."""
        slowest = self._index.slowest(lease)
        below = [tier for tier in reversed(self._tiers) if tier <= slowest]
        return all(self._copy(lease, source, target) for source, target in pairwise(below))

    def _compute(self, lease: IndexLease, tokens: int, known: int) -> bool:
        """Commit the prompt; False where its history does not fit in its home tiers.

        Where not all checkpoints fit at once, the prompt is committed in prefill chunks, as an
        engine does: a chunk's checkpoints may evict those of an earlier one. An earlier prompt had
        the first `known` tokens as well.
        """
        index = self._index
        if index.reserve(lease, tokens):
            self._commit(lease, tokens, known)
            return True
        if not index.reserve_with(lease, tokens, ()):
            return False
        start = lease.boundary * self._page
        index.shrink(lease, start)
        for upto in (*range(start + _CHUNK_TOKENS, tokens, _CHUNK_TOKENS), tokens):
            if not (index.advance(lease, upto) or index.advance_without_checkpoints(lease, upto)):
                return False
            self._commit(lease, upto, known)
        return True

    def _commit(self, lease: IndexLease, tokens: int, known: int) -> None:
        resident = self._index.resident_pages
        before = {anchor: resident(home, anchor) for anchor, home in self._homes.items()}
        for upto in (known, tokens) if 0 < known < tokens else (tokens,):
            self._index.commit(lease, upto)
            if upto <= known:
                self._write(lease, self._writing.requested_again)
        for anchor, home in self._homes.items():
            self._committed[anchor] += resident(home, anchor) - before[anchor]

    def _write(self, lease: IndexLease, targets: Collection[Tier]) -> None:
        """Copy what the lease covers down to these tiers."""
        for source, target in pairwise(self._tiers):
            if target in targets:
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
            (tier, anchor.name): self._index.resident_pages(tier, anchor.name)
            for tier in self._tiers
            for anchor in self._memory.kept_in(tier).anchors
        }
        entered = self._arrived.copy()
        for anchor, pages in self._committed.items():
            entered[self._homes[anchor], anchor] += pages
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
            found_tokens=tuple(self._found_tokens),
        )

    def _misses(self) -> tuple[Miss, ...]:
        tokens = self._missed_tokens
        misses = [Miss(*why, count, tokens[why]) for why, count in self._missed.items()]
        return tuple(sorted(misses, key=lambda miss: (-miss.tokens, miss.pool, miss.reason)))
