"""Write-behind: pages that landed on the host are written to storage.

Departures wait in a queue and pin their host pages. The queue is bounded: past its fraction of the
host, the oldest departures leave it unwritten and are counted. The store writes a few batches at a
time; nothing here waits for one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvtide.durations import DurationHistogram
from kvtide.index import Departure, Index
from kvtide.spec import Tier
from kvtide.transfer.storage_requests import StoredPage, Writing
from kvtide.transfer.store_link import StoreLink
from kvtide.transfer.transfers import Verdict

MAX_HOST_FRACTION = 0.5
"""Pages in the queue, of the host's slots of any anchor."""
MAX_AT_WORK = 2
BATCH_PAGES = 256


@dataclass(slots=True, eq=False)
class PendingStore:
    """Departures that the store writes as one batch."""

    departures: list[Departure]
    writing: Writing
    since: float


class WriteBehind:
    """`dropped` pages left the queue unwritten; the store wrote `stored` and refused `failed`.

    `seconds` are those of batches, from the call to the poll that sees its end.
    """

    def __init__(
        self,
        index: Index,
        link: StoreLink,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self.stored = 0
        self.failed = 0
        self.seconds = DurationHistogram()
        self._index = index
        self._link = link
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: deque[Departure] = deque()
        self._waiting: Counter[str] = Counter()
        self._at_work: list[PendingStore] = []
        self._max_pages = {
            anchor.name: max(1, int(MAX_HOST_FRACTION * index.capacity(Tier.HOST, anchor.name)))
            for anchor in index.memory.anchors
        }

    def __len__(self) -> int:
        """Pages in the queue or being written."""
        return sum(self._waiting.values())

    @property
    def queued(self) -> Iterator[Departure]:
        """The departures in the queue, oldest first."""
        return iter(self._queue)

    @property
    def at_work(self) -> Iterator[PendingStore]:
        """The batches that the store is writing."""
        return iter(self._at_work)

    def enqueue(self, departure: Departure) -> None:
        """Enter pages that landed on the host."""
        self._queue.append(departure)
        self._waiting.update(page.anchor for page in departure.pages)
        while len(self._queue) > 1 and self._too_long():
            oldest = self._queue.popleft()
            self.dropped += len(oldest.pages)
            self._leave(oldest)

    def tick(self) -> None:
        """Give the store the next batches, as far as it takes any."""
        while self._queue and len(self._at_work) < MAX_AT_WORK:
            departures: list[Departure] = []
            pages = 0
            while self._queue and (not pages or pages + len(self._queue[0].pages) <= BATCH_PAGES):
                departures.append(self._queue.popleft())
                pages += len(departures[-1].pages)
            outgoing = [StoredPage(*page) for one in departures for page in one.pages]
            writing = self._link.write(outgoing, self._timeout_s)
            self._at_work.append(PendingStore(departures, writing, self._clock()))

    def verdicts(self) -> list[int]:
        return [
            Verdict.LANDED if store.writing.quiet else Verdict.PENDING for store in self._at_work
        ]

    def settle(self, agreed: Sequence[int]) -> None:
        """Unpin the host pages of batches that have ended on every rank."""
        pairs = zip(list(self._at_work), agreed, strict=False)
        for store in [store for store, verdict in pairs if verdict != Verdict.PENDING]:
            self._at_work.remove(store)
            self.seconds.observe(self._clock() - store.since)
            self.stored += store.writing.count
            self.failed += len(store.writing.pages) - store.writing.count
            for departure in store.departures:
                self._leave(departure)

    def give_up(self) -> None:
        """Drop the queue and begin no further batch."""
        for store in self._at_work:
            store.writing.stop()
        while self._queue:
            departure = self._queue.popleft()
            self.dropped += len(departure.pages)
            self._leave(departure)

    def withhold(self, keys: Collection[bytes]) -> None:
        """Do not write these pages, which are in quarantine; `store_removals` removes the rest."""
        unwanted = frozenset(keys)
        for store in self._at_work:
            store.writing.withhold(unwanted)
        for departure in list(self._queue):
            kept = [page for page in departure.pages if page.key not in unwanted]
            self._waiting.subtract(page.anchor for page in departure.pages)
            self._waiting.update(page.anchor for page in kept)
            departure.pages = kept
            if not kept:
                self._queue.remove(departure)
                self._leave(departure)

    def _too_long(self) -> bool:
        return any(count > self._max_pages[anchor] for anchor, count in self._waiting.items())

    def _leave(self, departure: Departure) -> None:
        self._waiting.subtract(page.anchor for page in departure.pages)
        self._index.departed(departure)
