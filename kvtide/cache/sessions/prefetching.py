"""Prefetches: prefixes that are brought up from storage and host before a request needs them.

    FETCHING ──what storage has is on the host──▶ LOADING ──landed──▶ OVER
        │                                            └──failed───────▶ OVER
        └──no room on the device, or ended before────────────────────▶ OVER

A prefetch does for a prompt what a request's admission does, and computes nothing. Its load evicts
pages that nothing holds, as the load of a request would. It holds pages only while a copy is in
flight; then its session pins them, if it has one. No request waits for a prefetch, except for pages
that both fetch.

Fetches and loads end alike on all ranks, so that prefetches do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtide.cache.fetching import Fetch
from kvtide.cache.inflight import ArrivalTransfer, InFlightTransfers
from kvtide.cache.sessions.session_pins import Sessions
from kvtide.cache.storage_tier import Storage
from kvtide.index import Index, Prompt
from kvtide.index import IndexLease as IndexLease
from kvtide.index.keys import Hidden
from kvtide.spec import Tier
from kvtide.transfer.transfers import TransferState

MAX_PREFETCHES = 64


class PrefetchStage(Enum):
    FETCHING = "fetching"
    LOADING = "loading"
    OVER = "over"


class Prefetched(NamedTuple):
    """How far a prefetch came.

    tokens    of the prompt's prefix that are on the device or the host now
    by_tier   where they are; of storage, those that it has and that did not come
    fetched   tokens that came from storage
    outcome   loaded: all that was found is on the device; no_room: the device had no slots;
              failed: a copy failed; ended: it was ended before
    """

    tokens: int
    by_tier: Mapping[Tier, int]
    fetched: int
    outcome: str


class SessionTurn(NamedTuple):
    """The session that pins what a prefetch brings, with the priority and TTL of the pin."""

    name: str
    priority: int = 0
    ttl_s: float | None = None


@dataclass(slots=True, eq=False)
class Prefetch:
    """`result` is set when it is over. `turns` of its session had begun when it did."""

    prompt: Prompt
    turn: SessionTurn | None
    fetch: Fetch | None
    turns: int = 0
    stage: PrefetchStage = PrefetchStage.FETCHING
    lease: IndexLease | None = None
    transfers: list[ArrivalTransfer] = field(default_factory=list)
    result: Future[Prefetched] = field(default_factory=Future)

    @property
    def over(self) -> bool:
        return self.stage is PrefetchStage.OVER


class Prefetches:
    """`TieredCache.prefetches`: all that are not over, oldest first; `ended` counts by outcome.

    `make_room` is the write policy's: it frees device pages, now or when copies have landed.
    """

    def __init__(
        self,
        index: Index,
        in_flight: InFlightTransfers,
        storage: Storage,
        sessions: Sessions,
        make_room: Callable[[], bool],
    ) -> None:
        self._index, self._in_flight = index, in_flight
        self._storage, self._sessions = storage, sessions
        self._make_room = make_room
        self._open: list[Prefetch] = []
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self, prompt: Prompt, limit_s: float, turn: SessionTurn | None = None
    ) -> Prefetch | None:
        """Begin to bring a prompt's prefix up; None if `MAX_PREFETCHES` are open.

        Storage has `limit_s`. The next polls go on with it.
        """
        assert not isinstance(prompt.namespace, Hidden), "a scratch prompt has no prefix"
        if len(self._open) >= MAX_PREFETCHES:
            return None
        turns = 0 if turn is None else self._sessions.turns_of(turn.name)
        prefetch = Prefetch(prompt, turn, self._storage.fetch(prompt, limit_s=limit_s), turns)
        self._open.append(prefetch)
        return prefetch

    def end(self, prefetch: Prefetch) -> None:
        """End a prefetch where it is; a copy in flight lands by itself."""
        if not prefetch.over:
            self._finish(prefetch, "ended")

    def end_all(self) -> None:
        for prefetch in [*self._open]:
            self.end(prefetch)

    def advance(self) -> None:
        """Once per poll: load what has been fetched, end what has been loaded."""
        for prefetch in [*self._open]:
            fetched = prefetch.fetch is None or prefetch.fetch.over
            if prefetch.stage is PrefetchStage.FETCHING and fetched:
                self._load(prefetch)
            if prefetch.stage is PrefetchStage.LOADING and all(t.over for t in prefetch.transfers):
                failed = any(t.state is not TransferState.LANDED for t in prefetch.transfers)
                self._finish(prefetch, "failed" if failed else "loaded")

    def _load(self, prefetch: Prefetch) -> None:
        """Begin the load; without room wait for pages that are leaving, or end."""
        for _ in range(2):
            lease = self._index.pin(self._index.match(prefetch.prompt, Tier.HOST))
            transfers = self._in_flight.load(lease)
            if transfers is not None:
                prefetch.lease, prefetch.transfers = lease, transfers
                prefetch.stage = PrefetchStage.LOADING
                return
            self._index.release(lease)
            if not self._make_room():
                break
        leaving = any(self._in_flight.leaving(name) for name in self._index.anchor_names)
        if not leaving:
            self._finish(prefetch, "no_room")

    def _finish(self, prefetch: Prefetch, outcome: str) -> None:
        prompt, fetch, turn = prefetch.prompt, prefetch.fetch, prefetch.turn
        prefetch.stage = PrefetchStage.OVER
        self._open.remove(prefetch)
        self.ended[outcome] += 1
        if fetch is not None:
            fetch.stop()
        if turn is not None and self._sessions.turns_of(turn.name) == prefetch.turns:
            self._sessions.keep(turn.name, prompt, turn.priority, turn.ttl_s)
        if prefetch.lease is not None:
            self._index.release(prefetch.lease)
            prefetch.lease = None
        prefetch.transfers = []
        prefetch.result.set_result(self._reached(prefetch, outcome))

    def _reached(self, prefetch: Prefetch, outcome: str) -> Prefetched:
        prompt, fetch = prefetch.prompt, prefetch.fetch
        page = self._index.memory.page_tokens
        fetched, prompt.fetched = prompt.fetched, range(0)  # Where pages are, not where from.
        hit = self._index.match(prompt, Tier.HOST)
        by_tier = {tier: n * page for tier, n in self._index.pages_by_tier(hit).items()}
        prompt.fetched = fetched
        tokens = hit.boundary * page
        stored = max(0, fetch.found - tokens) if fetch is not None else 0
        by_tier[Tier.STORAGE] = stored
        return Prefetched(tokens, by_tier, len(fetched) * page, outcome)

    def violations(self) -> Iterator[str]:
        """What does not hold, in sentences."""
        for prefetch in self._open:
            loading = prefetch.stage is PrefetchStage.LOADING
            if prefetch.over or prefetch.result.done():
                yield "a prefetch is over, and still open"
            if loading != (prefetch.lease is not None):
                yield f"a prefetch is {prefetch.stage.value} and holds pages, or loads without"
