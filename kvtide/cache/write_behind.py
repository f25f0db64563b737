"""Writing what lands on the host to storage, behind the backups.

Pages wait in line on the host, where they stay meanwhile. The line is bounded: when it holds more
than its share of the host, the oldest pages leave it unwritten, and are counted. A few batches are
with the store at a time; nothing here ever waits for one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvtide.index import Departure, Index
from kvtide.spec import Tier
from kvtide.transfer.storage_requests import StoredPage, Writing
from kvtide.transfer.store_link import StoreLink
from kvtide.transfer.transfers import Verdict

MAX_HOST_FRACTION = 0.5
"""Pages in line, of the host's slots of any anchor."""
MAX_AT_WORK = 2
BATCH_PAGES = 256


@dataclass(slots=True, eq=False)
class PendingStore:
    """Departures that are with the store together."""

    departures: list[Departure]
    writing: Writing


class Storing:
    """`dropped` pages left the line unwritten; `stored` and `failed` pages came to its end."""

    def __init__(self, index: Index, link: StoreLink, timeout_s: float) -> None:
        self.dropped = 0
        self.stored = 0
        self.failed = 0
        self._index = index
        self._link = link
        self._timeout_s = timeout_s
        self._line: deque[Departure] = deque()
        self._waiting: Counter[str] = Counter()
        self._at_work: list[PendingStore] = []
        self._max_pages = {
            anchor.name: max(1, int(MAX_HOST_FRACTION * index.capacity(Tier.HOST, anchor.name)))
            for anchor in index.memory.anchors
        }

    def __len__(self) -> int:
        """Pages in line or with the store."""
        return sum(self._waiting.values())

    @property
    def line(self) -> Iterator[Departure]:
        """Those that wait for their turn, oldest first."""
        return iter(self._line)

    @property
    def at_work(self) -> Iterator[PendingStore]:
        """Those that the store has in its hands."""
        return iter(self._at_work)

    def queue(self, departure: Departure) -> None:
        """Pages landed on the host: put them in line."""
        self._line.append(departure)
        self._waiting.update(page.anchor for page in departure.pages)
        while len(self._line) > 1 and self._too_long():
            oldest = self._line.popleft()
            self.dropped += len(oldest.pages)
            self._leave(oldest)

    def tick(self) -> None:
        """Hand the next pages in line to the store."""
        while self._line and len(self._at_work) < MAX_AT_WORK:
            departures: list[Departure] = []
            pages = 0
            while self._line and (not pages or pages + len(self._line[0].pages) <= BATCH_PAGES):
                departures.append(self._line.popleft())
                pages += len(departures[-1].pages)
            outgoing = [StoredPage(*page) for one in departures for page in one.pages]
            writing = self._link.write(outgoing, self._timeout_s)
            self._at_work.append(PendingStore(departures, writing))

    def verdicts(self) -> list[int]:
        return [
            Verdict.LANDED if store.writing.quiet else Verdict.PENDING for store in self._at_work
        ]

    def settle(self, agreed: Sequence[int]) -> None:
        """What was written, or not, on every rank: the host may drop it."""
        pairs = zip(list(self._at_work), agreed, strict=False)
        for store in [store for store, verdict in pairs if verdict != Verdict.PENDING]:
            self._at_work.remove(store)
            self.stored += store.writing.count
            self.failed += len(store.writing.pages) - store.writing.count
            for departure in store.departures:
                self._leave(departure)

    def give_up(self) -> None:
        """Nothing else goes to the store: what is in line leaves it, and no batch is begun."""
        for store in self._at_work:
            store.writing.stop()
        while self._line:
            departure = self._line.popleft()
            self.dropped += len(departure.pages)
            self._leave(departure)

    def withhold(self, keys: Collection[bytes]) -> None:
        """Pages that nobody may find again are not written; what was written is removed."""
        unwanted = frozenset(keys)
        for store in self._at_work:
            store.writing.withhold(unwanted)
        for departure in list(self._line):
            kept = [page for page in departure.pages if page.key not in unwanted]
            self._waiting.subtract(page.anchor for page in departure.pages)
            self._waiting.update(page.anchor for page in kept)
            departure.pages = kept
            if not kept:
                self._line.remove(departure)
                self._leave(departure)

    def _too_long(self) -> bool:
        return any(count > self._max_pages[anchor] for anchor, count in self._waiting.items())

    def _leave(self, departure: Departure) -> None:
        self._waiting.subtract(page.anchor for page in departure.pages)
        self._index.departed(departure)
