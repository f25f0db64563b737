"""Fetching a prompt's pages from storage to the host, from the moment the request arrives.

    LOOKING ──found──▶ READING ──all there, or as far as it goes──▶ OVER
       │  │               └──a page was lost or corrupt──▶ LOOKING
       │  └──another fetch brings them──▶ BEHIND ──that is over──▶ LOOKING
       └──nothing, too little, too slow, no room──────────────────▶ OVER

A store answers which pages it has. The index computes how deep a prompt could resume with them,
and in which order to read them (`index.match`). However a fetch ends, the pages that were read are
adopted, and the prompt resumes at the deepest boundary that is valid then.

The host slots of hot pools are written by forward passes, too: a read into them begins when all
work is done that was queued on the device by the time the slots were taken.

Ranks agree on which pages their stores have, on whether the fetch pays, and on how many pages were
read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from kvtide.cache.cache_config import FetchPatience
from kvtide.cache.rank_agreement import Agreement
from kvtide.durations import DurationHistogram
from kvtide.index import Import, Index, Outline, Prompt, WantedPages
from kvtide.index.keys import PageKey
from kvtide.index.match.match import Bits, Pages, deepest_boundary, read_order
from kvtide.spec import ALL, ModelMemory, RankShape, Tier
from kvtide.transfer.storage_requests import Lookup, Reading, SoughtPage, StoredPage
from kvtide.transfer.store_link import StoreLink
from kvtide.transfer.transfers import BusyTime, Verdict

MAX_OPEN, MAX_LEAVING = 16, 8
"""Fetches, and reads left by ended fetches, per exchange between ranks; older ones come first."""
MAX_LOOKS = 4
"""How often a fetch looks up its pages, when some turn out to be lost or corrupt."""
MAX_HOST_FRACTION = 0.5
"""The most of the host's slots that all fetches together take."""


class Stage(Enum):
    LOOKING = "looking"
    BEHIND = "behind"
    READING = "reading"
    OVER = "over"


class Order(NamedTuple):
    """The pages to read, in order, and the page boundary at which they allow a resume."""

    boundary: int
    pages: list[WantedPages]


@dataclass(slots=True, eq=False)
class Fetch:
    """The fetch of one prompt's pages. `outcome` names its end in a word.

    tokens  tokens of the history that were fetched so far
    found   tokens after which the prompt could resume with what storage has
    looks   how many look-ups were made, the first included
    shapes  of pages that ranks of another shape stored, that shape; ranks may differ in it
    reading_since  when the last read began
    """

    prompt: Prompt
    deadline: float
    token_s: float
    stage: Stage = Stage.LOOKING
    outcome: str = ""
    stopped: bool = False
    tokens: int = 0
    found: int = 0
    looks: int = 1
    keys: list[PageKey] = field(default_factory=list)
    asked: Mapping[str, Pages] = field(default_factory=dict)
    lookup: Lookup | None = None
    shapes: Mapping[WantedPages, RankShape] = field(default_factory=dict)
    leader: Fetch | None = None
    order: Order | None = None
    arriving: Import | None = None
    reading: Reading | None = None
    reading_since: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the fetch has ended: the request need not wait for it."""
        return self.stage is Stage.OVER

    def stop(self) -> None:
        """End the fetch with the next poll; the pages read by then are adopted."""
        self.stopped = True


@dataclass(frozen=True, slots=True, eq=False)
class AbandonedRead:
    """Host slots of a fetch that has ended, kept until the store's call no longer writes there."""

    arriving: Import
    reading: Reading


class Fetches:
    """All fetches of a cache, oldest first. `ended` counts them by outcome; `reading` is the time
    during which any reads pages.

    `seconds` are those of reads, until their pages are adopted.
    `queued` notes the work that is queued on the device, and tells later whether that is done.
    """

    def __init__(
        self,
        index: Index,
        link: StoreLink,
        agreement: Agreement,
        patience: FetchPatience,
        queued: Callable[[], Callable[[], bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ended: Counter[str] = Counter()
        self.fetched_pages = 0
        self.seconds = DurationHistogram()
        self.reading = BusyTime(clock)
        self._index = index
        self._memory = index.memory
        self._link = link
        self._agreement = agreement
        self._patience = patience
        self._queued = queued
        self._hot = frozenset(pool.name for pool in index.memory.hot_pools)
        self._clock = clock
        self._open: list[Fetch] = []
        self._leaving: list[AbandonedRead] = []
        self._coming: dict[bytes, Fetch] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._leaving)

    @property
    def open(self) -> Iterator[Fetch]:
        """The fetches that have not ended."""
        return iter(self._open)

    @property
    def leaving(self) -> Iterator[AbandonedRead]:
        """The slots of ended fetches to which a call may still write."""
        return iter(self._leaving)

    @property
    def coming(self) -> Mapping[bytes, Fetch]:
        """Which fetch reads a page, by the page's key and anchor."""
        return self._coming

    # -- beginning --------------------------------------------------------------------------

    def begin(self, prompt: Prompt, token_s: float, limit_s: float | None = None) -> Fetch | None:
        """Start the look-up of a prompt's pages; None if too few are missing.

        `token_s` is the time to compute a token, 0 if it is not known. `limit_s` is how long the
        fetch may take, as requests wait if not given.
        """
        outline = self._index.outline(prompt)
        missing = outline.limit - deepest_boundary(self._memory, outline.limit, outline.held)
        if missing * self._memory.page_tokens < self._patience.min_tokens:
            return None
        tokens = missing * self._memory.page_tokens
        limit_s = self._patience.limit_s(tokens) if limit_s is None else limit_s
        fetch = Fetch(prompt, self._clock() + limit_s, token_s)
        self._open.append(fetch)
        self._look(fetch, outline)
        return fetch

    def _look(self, fetch: Fetch, outline: Outline) -> None:
        fetch.stage, fetch.leader = Stage.LOOKING, None
        fetch.asked = {name: np.flatnonzero(~held) for name, held in outline.held.items()}
        asked = fetch.asked
        computed = self._index.page_keys(fetch.prompt, outline.limit)
        of_pages = fetch.keys = list[PageKey]()

        def sought() -> list[SoughtPage]:
            of_pages.extend(computed)
            return [
                SoughtPage(anchor, of_pages[page].key)
                for anchor, pages in asked.items()
                for page in pages.tolist()
            ]

        fetch.lookup = self._link.look(sought, max(0.0, fetch.deadline - self._clock()))

    # -- once per poll ----------------------------------------------------------------------

    def verdicts(self) -> list[int]:
        """Per fetch its verdict and the number of pages read; ranks take the minimum of each."""
        return [value for one in self._shown() for value in self._verdict(one)]

    def _shown(self) -> list[Fetch | AbandonedRead]:
        """The fetches of this exchange.

        Look-ups and reads have half of it each, so that neither keeps the other waiting; fetches
        behind another one come last.
        """
        looking, reading, behind = (
            [fetch for fetch in self._open if fetch.stage is stage]
            for stage in (Stage.LOOKING, Stage.READING, Stage.BEHIND)
        )
        half = MAX_OPEN // 2
        first = [*looking[:half], *reading[:half]]
        rest = [*looking[half:], *reading[half:], *behind]
        return [*first, *rest[: MAX_OPEN - len(first)], *self._leaving[:MAX_LEAVING]]

    def _verdict(self, fetch: Fetch | AbandonedRead) -> tuple[int, int]:
        if isinstance(fetch, AbandonedRead):
            return (Verdict.LANDED if fetch.reading.quiet else Verdict.PENDING), 0
        late = fetch.stopped or self._clock() > fetch.deadline
        done, ready = False, 0
        if fetch.stage is Stage.READING:
            assert fetch.reading is not None and fetch.order is not None
            # In this order: once the read is over, `ready` no longer changes.
            over, ready = fetch.reading.over, fetch.reading.ready
            done = over and (not late or ready == len(fetch.order.pages))
            if done and fetch.reading.error is not None:
                return Verdict.FAILED, ready
        elif fetch.stage is Stage.LOOKING and not late:
            # A late fetch begins no read.
            done = fetch.lookup is not None and fetch.lookup.over
        if done:
            return Verdict.LANDED, ready
        return (Verdict.OVERDUE if late else Verdict.PENDING), ready

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts: begin reads, adopt pages, give slots back."""
        for fetch, verdict, ready in zip(self._shown(), agreed[::2], agreed[1::2], strict=False):
            if verdict == Verdict.PENDING:
                continue
            if isinstance(fetch, AbandonedRead):
                self._index.forgo(fetch.arriving)
                self._leaving.remove(fetch)
            elif fetch.stage is Stage.READING:
                self._adopt(fetch, ready, Verdict(verdict))
            elif fetch.stage is Stage.LOOKING and verdict == Verdict.LANDED:
                self._looked(fetch)
            else:
                self._end(fetch, "late")
        for fetch in self._open:
            if fetch.stage is Stage.BEHIND and (fetch.leader is None or fetch.leader.over):
                self._look(fetch, self._index.outline(fetch.prompt))

    def stop_all(self) -> None:
        for fetch in self._open:
            fetch.stop()

    def discard(self, prompt: Prompt) -> None:
        """End all fetches of prompts with this first page; none of their pages is adopted."""
        for fetch in list(self._open):
            if fetch.prompt.same_first_page(prompt, self._index.page_bytes):
                self._end(fetch, "discarded")

    # -- what was found ---------------------------------------------------------------------

    def _looked(self, fetch: Fetch) -> None:
        """The look-up has ended on every rank: pages that all stores have count."""
        outline, lookup = self._index.outline(fetch.prompt), fetch.lookup
        assert lookup is not None
        asked = sum(map(len, fetch.asked.values()))
        found = np.array(self._agreement.all_true(lookup.found or [False] * asked), bool)
        there = {name: bits.copy() for name, bits in outline.held.items()}
        wanted = [
            WantedPages(name, page) for name, some in fetch.asked.items() for page in some.tolist()
        ]
        fetch.shapes = {wanted[number]: shape for number, shape in lookup.shapes.items()}
        at = 0
        for name, pages in fetch.asked.items():
            there[name][pages] |= found[at : at + len(pages)]
            at += len(pages)
        order = self._order(outline, there)
        fetch.found = max(fetch.found, order.boundary * self._memory.page_tokens)
        if not order.pages and fetch.looks > 1:
            self._end(fetch, "partly")
        elif not order.pages:
            self._end(fetch, "nothing" if lookup.error is None else "failed")
        elif not all(self._agreement.all_true([self._worth(fetch, order, outline)])):
            self._end(fetch, "declined")
        else:
            self._begin_reading(fetch, order)

    def _order(self, outline: Outline, there: Mapping[str, Bits]) -> Order:
        """What to read so that the prompt resumes as deep as possible, usable parts first."""
        limit, max_pages = outline.limit, self._max_pages()
        min_boundary = deepest_boundary(self._memory, outline.limit, outline.held)
        while True:
            boundary = deepest_boundary(self._memory, limit, there)
            if boundary <= min_boundary:
                return Order(0, [])
            runs = read_order(self._memory, boundary, outline.held, there)
            counts: Counter[str] = Counter()
            for anchor, pages in runs:
                counts[anchor] += len(pages)
            if all(count <= max_pages[anchor] for anchor, count in counts.items()):
                wanted = [
                    WantedPages(anchor, page) for anchor, some in runs for page in some.tolist()
                ]
                return Order(boundary, wanted)
            limit = boundary - max(1, boundary // 8)

    def _max_pages(self) -> dict[str, float]:
        """How many pages of each anchor may be fetched, beside all other fetches."""
        index = self._index
        return {
            name: MAX_HOST_FRACTION * index.capacity(Tier.HOST, name) - index.importing_pages(name)
            for name in index.anchor_names
        }

    def _worth(self, fetch: Fetch, order: Order, outline: Outline) -> bool:
        """Whether reading is faster than computing, as far as both are known."""
        speed = self._link.read_speed.bytes_s
        if not fetch.token_s or not speed:
            return True
        kinds = Counter((one.anchor, fetch.shapes.get(one)) for one in order.pages)
        size = sum(self._link.read_bytes(*kind) * count for kind, count in kinds.items())
        saved = order.boundary - deepest_boundary(self._memory, outline.limit, outline.held)
        worth = size / speed <= saved * self._memory.page_tokens * fetch.token_s
        if not worth:
            self._link.read_speed.raise_by(0.1)
        return worth

    def _begin_reading(self, fetch: Fetch, order: Order) -> None:
        keys = self._keys(fetch, order.pages)
        leader = next((self._coming[key] for key in keys if key in self._coming), None)
        if leader is not None:
            fetch.stage, fetch.leader = Stage.BEHIND, leader
            return
        lease = self._index.pin(self._index.match(fetch.prompt, Tier.HOST))
        arriving = self._index.take(lease, order.pages)
        if arriving is None:
            self._index.release(lease)
            self._end(fetch, "no_room")
            return
        fetch.stage, fetch.order, fetch.arriving = Stage.READING, order, arriving
        pages = []
        for want, taken in zip(order.pages, arriving.taken, strict=True):
            key, after = fetch.keys[want.page]
            shape = fetch.shapes.get(want)
            pages.append(StoredPage(want.anchor, key, taken.slot, after=after, shape=shape))
        self._coming.update(dict.fromkeys(keys, fetch))
        fetch.reading_since = self._clock()
        free = self._queued() if any(want.anchor in self._hot for want in order.pages) else None
        self.reading.begin()
        left_s = max(0.0, fetch.deadline - fetch.reading_since)
        fetch.reading = self._link.read(pages, left_s, free)

    @staticmethod
    def _keys(fetch: Fetch, pages: Sequence[WantedPages]) -> list[bytes]:
        return [fetch.keys[page].key + anchor.encode() for anchor, page in pages]

    # -- what came --------------------------------------------------------------------------

    def _adopt(self, fetch: Fetch, ready: int, verdict: Verdict) -> None:
        """Adopt the first `ready` pages, which every rank has read, and end the read."""
        assert fetch.arriving is not None and fetch.reading is not None
        assert fetch.order is not None
        fetch.reading.stop()
        self.seconds.observe(self._clock() - fetch.reading_since)
        pages = fetch.order.pages
        here = pages[:ready]
        came = fetch.arriving.taken[:ready]
        self._index.adopt(fetch.arriving, came, self._absent(here, fetch.reading))
        fetch.prompt.fetched = _joined(fetch.prompt.fetched, _span(self._memory, here))
        fetch.tokens = len(fetch.prompt.fetched) * self._memory.page_tokens
        self.fetched_pages += ready
        if ready == len(pages):
            self._end(fetch, "fetched" if fetch.looks == 1 else "partly")
        elif verdict == Verdict.LANDED and fetch.looks < MAX_LOOKS:
            # A page was lost or corrupt; another boundary may not need it.
            fetch.looks += 1
            self._let_go(fetch)
            self._look(fetch, self._index.outline(fetch.prompt))
        else:
            ends = {Verdict.OVERDUE: "late", Verdict.FAILED: "failed"}
            self._end(fetch, ends.get(verdict, "partly"))

    def _absent(self, pages: Sequence[WantedPages], reading: Reading) -> list[tuple[str, ...]]:
        """Of each page that was read, the optional sidecars that any rank's object lacked."""
        optional = {a.name: self._memory.optional_sidecars(a.name) for a in self._memory.anchors}
        asked = [(n, name) for n, want in enumerate(pages) for name in optional[want.anchor]]
        carried = self._agreement.all_true([name not in reading.absent[n] for n, name in asked])
        absent: list[tuple[str, ...]] = [()] * len(pages)
        for (number, name), has in zip(asked, carried, strict=True):
            if not has:
                absent[number] += (name,)
        return absent

    def _end(self, fetch: Fetch, outcome: str) -> None:
        """The fetch has ended; its slots go back when no call writes to them."""
        if fetch.lookup is not None:
            fetch.lookup.stop()
        self._let_go(fetch)
        fetch.stage, fetch.outcome = Stage.OVER, outcome
        # The request keeps the fetch for as long as it lives: drop what is large.
        fetch.lookup = fetch.leader = None
        fetch.asked, fetch.shapes, fetch.keys = {}, {}, []
        self.ended[outcome] += 1
        self._open.remove(fetch)

    def _let_go(self, fetch: Fetch) -> None:
        """Stop the read. The slots stay taken until no call writes to them."""
        if fetch.order is not None:
            for key in self._keys(fetch, fetch.order.pages):
                if self._coming.get(key) is fetch:
                    del self._coming[key]
        if fetch.arriving is not None and fetch.reading is not None:
            fetch.reading.stop()
            self.reading.end()
            self._index.abandon(fetch.arriving)
            self._leaving.append(AbandonedRead(fetch.arriving, fetch.reading))
        fetch.order = fetch.arriving = fetch.reading = None


def _joined(a: range, b: range) -> range:
    return range(min(a.start, b.start), max(a.stop, b.stop)) if a and b else a or b


def _span(memory: ModelMemory, pages: Sequence[WantedPages]) -> range:
    """The range of the history's pages among these; of all pages in a model without a history."""
    histories = {pool.name for pool in memory.anchors if pool.reuse.reach is ALL}
    numbers = [one.page for one in pages if one.anchor in histories or not histories]
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)
