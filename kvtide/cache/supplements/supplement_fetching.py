"""Optional sidecars fetched from storage for pages that the host has without them.

    LOOKING ──found──▶ READING ──the store's calls have returned──▶ OVER
       └──nothing, too late, discarded────────────────────────────▶ OVER

No request waits for it: the store's writer does it, behind the writes that were there before. While
sidecars are read, their host pages are pinned (`index.SidecarImport`).

Ranks agree on which sidecars their stores have, and on which of them have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtide.cache.rank_agreement import Agreement
from kvtide.index import Index, LackingPage, Prompt, SidecarImport
from kvtide.index.keys import PageKey
from kvtide.spec import RankShape
from kvtide.transfer.storage_requests import Lookup, Reading, SoughtPage, StoredPage
from kvtide.transfer.store_link import StoreLink
from kvtide.transfer.transfers import Verdict

MAX_OPEN = 16
"""At a time; prompts beyond that go without."""


class SupplementStage(Enum):
    LOOKING = "looking"
    READING = "reading"
    OVER = "over"


@dataclass(slots=True, eq=False)
class SupplementFetch:
    """`asked`: the pages that lacked sidecars when it began, and `keys` those of all pages.
    `discarded`: the prompt is in quarantine."""

    prompt: Prompt
    asked: Sequence[LackingPage]
    lookup: Lookup
    keys: list[PageKey]
    stage: SupplementStage = SupplementStage.LOOKING
    discarded: bool = False
    shapes: dict[tuple[str, int], RankShape] = field(default_factory=dict)
    arriving: SidecarImport | None = None
    reading: Reading | None = None

    @property
    def over(self) -> bool:
        return self.stage is SupplementStage.OVER


class SupplementFetches:
    """All of a store, oldest first. `pages` counts sidecars that came, by page.

    timeout_s  of a look-up, and of the calls of a read
    """

    def __init__(
        self,
        index: Index,
        link: StoreLink,
        agreement: Agreement,
        timeout_s: float,
    ) -> None:
        self.pages = 0
        self._index = index
        self._memory = index.memory
        self._link = link
        self._agreement = agreement
        self._timeout_s = timeout_s
        self._open: list[SupplementFetch] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open(self) -> Iterator[SupplementFetch]:
        """Those that have not ended."""
        return iter(self._open)

    def begin(self, prompt: Prompt) -> SupplementFetch | None:
        """Look for sidecars that pages of the prompt lack; None if no page does."""
        asked = self._index.sidecars.lacking(prompt) if len(self._open) < MAX_OPEN else []
        if not asked:
            return None
        computed = self._index.page_keys(prompt, max(page.page for page in asked) + 1)
        keys = list[PageKey]()

        def sought() -> list[SoughtPage]:
            keys.extend(computed)
            return [
                SoughtPage(page.anchor, keys[page.page].key, name, keys[page.page].after)
                for page, name in _each(asked)
            ]

        lookup = self._link.look_behind(sought, self._timeout_s)
        fetch = SupplementFetch(prompt, asked, lookup, keys)
        self._open.append(fetch)
        return fetch

    # -- once per poll ----------------------------------------------------------------------

    def verdicts(self) -> list[int]:
        return [self._verdict(fetch) for fetch in self._open]

    def _verdict(self, fetch: SupplementFetch) -> Verdict:
        if fetch.reading is not None:
            return Verdict.LANDED if fetch.reading.quiet else Verdict.PENDING
        if fetch.lookup.late or fetch.lookup.stopped:
            return Verdict.OVERDUE
        return Verdict.LANDED if fetch.lookup.over else Verdict.PENDING

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts."""
        for fetch, verdict in zip(list(self._open), agreed, strict=False):
            if verdict == Verdict.PENDING:
                continue
            if fetch.reading is not None:
                self._came(fetch, fetch.reading)
            elif verdict == Verdict.LANDED and not fetch.discarded:
                self._looked(fetch)
            else:
                self._end(fetch)

    def stop_all(self) -> None:
        for fetch in self._open:
            fetch.lookup.stop()
            if fetch.reading is not None:
                fetch.reading.stop()

    def discard(self, prompt: Prompt) -> None:
        """Nothing that is read for prompts with this first page counts."""
        for fetch in self._open:
            if fetch.prompt.same_first_page(prompt, self._index.page_bytes):
                fetch.discarded = True

    # -- the steps --------------------------------------------------------------------------

    def _looked(self, fetch: SupplementFetch) -> None:
        """The look-up has ended on every rank: sidecars that all stores have are read, where the
        host still lacks them."""
        lookup, asked = fetch.lookup, _each(fetch.asked)
        found = self._agreement.all_true(lookup.found or [False] * len(asked))
        (answered,) = self._agreement.all_true([lookup.error is None])
        there = {
            (page.anchor, page.page, name): has
            for (page, name), has in zip(asked, found, strict=True)
        }
        fetch.shapes = {
            (asked[number][0].anchor, asked[number][0].page): shape
            for number, shape in lookup.shapes.items()
        }
        known = [
            page._replace(sidecars=names)
            for page in self._index.sidecars.lacking(fetch.prompt)
            if (names := tuple(n for n in page.sidecars if there.get((page.anchor, page.page, n))))
        ]
        if answered:
            self._index.sidecars.sought(fetch.prompt, known)
        if wanted := [page for page in known if page.slot is not None]:
            self._read(fetch, wanted)
        else:
            self._end(fetch)

    def _read(self, fetch: SupplementFetch, wanted: Sequence[LackingPage]) -> None:
        fetch.stage = SupplementStage.READING
        fetch.arriving = self._index.sidecars.take(fetch.prompt, wanted)
        fetch.reading = self._link.read_behind(
            [self._stored(fetch, page) for page in wanted], self._timeout_s
        )

    def _stored(self, fetch: SupplementFetch, page: LackingPage) -> StoredPage:
        assert page.slot is not None, "the host has the page"
        key, after = fetch.keys[page.page]
        others = {page.anchor, *self._memory.optional_sidecars(page.anchor)} - {*page.sidecars}
        shape = fetch.shapes.get((page.anchor, page.page))
        return StoredPage(page.anchor, key, page.slot, tuple(sorted(others)), after, shape)

    def _came(self, fetch: SupplementFetch, reading: Reading) -> None:
        """No call of any rank writes to the pages any longer: sidecars that came everywhere are
        there."""
        assert fetch.arriving is not None
        pages = fetch.arriving.pages
        came: list[tuple[str, ...]] = [()] * len(pages)
        asked = [(n, name) for n, page in enumerate(pages) for name in page.sidecars]
        here = [reading.whole(n) and name not in reading.absent[n] for n, name in asked]
        for (number, name), has in zip(asked, self._agreement.all_true(here), strict=True):
            if has and not fetch.discarded:
                came[number] += (name,)
        self.pages += sum(map(len, came))
        self._index.sidecars.land(fetch.arriving, came)
        self._end(fetch)

    def _end(self, fetch: SupplementFetch) -> None:
        fetch.lookup.stop()
        fetch.stage, fetch.arriving, fetch.reading = SupplementStage.OVER, None, None
        self._open.remove(fetch)


def _each(pages: Sequence[LackingPage]) -> list[tuple[LackingPage, str]]:
    """Every sidecar of every page."""
    return [(page, name) for page in pages for name in page.sidecars]
