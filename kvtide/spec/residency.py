"""Which pools stay on the host while requests run, and how many of their entries are hot.

Attention that selects reads few entries per query, yet all of them take device memory. Served
`hot`, such a pool has its pages on the host, and every running request has a buffer of so many
entries on the device. What the indexer reads, windows and states stay in device pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvtide.spec.memory import ModelMemory
from kvtide.spec.pool import ALL, PoolSpec, SpecError


@dataclass(frozen=True, slots=True)
class Residency:
    """How pools with a selector are served: all resident, hot, or what fits (`auto`).

    hot  entries of a running request on the device; None: all pages are there
    """

    hot: int | None = None
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> Residency:
        """`all`, `auto` or `hot:B`."""
        if text in ("all", "auto"):
            return cls(auto=text == "auto")
        kind, _, entries = text.partition(":")
        if kind != "hot" or not entries.isdecimal() or not int(entries):
            raise SpecError(f"'{text}' is no residency; use all, auto, or hot:4096")
        return cls(int(entries))

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return "all" if self.hot is None else f"hot:{self.hot}"

    def of(self, memory: ModelMemory, drafts: int = 0) -> ModelMemory:
        """The memory served this way, beside so many drafts; its caller decides `auto`."""
        assert not self.auto, "auto becomes all or hot before it is applied"
        if self.hot is None:
            return memory
        return served_hot(memory, self.hot, step_queries(memory, drafts))


ALL_RESIDENT = Residency()


def step_queries(memory: ModelMemory, drafts: int) -> int:
    """Tokens of a sequence in a decode step, at the most: one, and its drafts.

    With recurrent states a step also computes again what was accepted before a rejected draft.
    """
    again = any(pool.tail_entries is not None for pool in memory.pools)
    return 1 + drafts * (2 if again else 1)


def fitting_drafts(memory: ModelMemory, residency: Residency, drafts: int) -> int:
    """So many of these drafts, that the selections of a step fit the hot buffer of a request."""
    fitting = range(drafts, 0, -1)
    return next((k for k in fitting if least_hot(memory, k) <= (residency.hot or math.inf)), 0)


def least_hot(memory: ModelMemory, drafts: int) -> int:
    """Entries of the smallest hot buffer beside so many drafts; 0 where nothing is selected."""
    selected = max((pool.selected or 0 for pool in memory.pools), default=0)
    return step_queries(memory, drafts) * selected


def served_hot(memory: ModelMemory, entries: int, queries: int = 1) -> ModelMemory:
    """`memory` with all pools that are selected from on the host, and `entries` hot per request.

    `queries` is how many tokens of a sequence a decode step has at most (`step_queries`): their
    selections share the hot buffer. A draft is added afterwards, and stays on the device.
    """
    selecting = [pool for pool in memory.pools if pool.selected is not None]
    if not selecting:
        raise SpecError(
            f"{memory.model}: attention reads all entries of all its pools, so none can stay on "
            "the host; use --resident all"
        )
    for pool in selecting:
        min_entries = queries * (pool.selected or 0)
        if entries < min_entries:
            drafts = f", and drafts make {queries} queries of a step" if queries > 1 else ""
            raise SpecError(
                f"{memory.model}: a hot buffer of {entries:,} entries, where a query selects up to "
                f"{pool.selected:,} of {pool.name}{drafts}; use --resident hot:{min_entries}"
            )
    names = {pool.name for pool in selecting}
    heirs = {name: _heir(memory, name) for name in names if memory.pool(name).is_anchor}
    staying = [
        replace(pool, follows=_followed(pool, heirs))
        for pool in memory.pools
        if pool.name not in names
    ]
    hot = [replace(pool, follows=None, hot=entries) for pool in selecting]
    return replace(memory, pools=(*staying, *hot))


def _heir(memory: ModelMemory, anchor: str) -> str:
    """The sidecar that owns the slots when its anchor leaves for the host."""
    beside = (p for p in memory.pools if p.follows == anchor and p.selected is None)
    heir = next((p.name for p in beside if p.reuse.reach is ALL and p.reuse.required), None)
    if heir is None:
        raise SpecError(
            f"{memory.model}: nothing of {anchor}'s history would stay on the device; "
            "use --resident all"
        )
    return heir


def _followed(pool: PoolSpec, heirs: dict[str, str]) -> str | None:
    """Whose slots a pool uses when the hot ones have left."""
    if pool.follows is None:
        return None
    owner = heirs.get(pool.follows, pool.follows)
    return None if owner == pool.name else owner


@dataclass(frozen=True, slots=True)
class HotShape:
    """The device memory of one hot pool, in pages of its own.

    layers, rows   hot buffers: one for every layer and running request
    row_pages      pages of one hot buffer
    ring_pages     pages per request for the entries that a step writes
    gather_pages   pages for the context of requests that prefill, one layer at a time

        layer ▸ row ▸ row_pages │ row ▸ ring_pages │ gather_pages
    """

    layers: int
    rows: int
    row_pages: int
    ring_pages: int
    gather_pages: int
    page_bytes: int
    page_entries: int

    @classmethod
    def of(cls, pool: PoolSpec, page_tokens: int, rows: int, longest: int) -> HotShape:
        """For so many running requests, and sequences of up to `longest` pages."""
        assert pool.hot is not None and pool.selected is not None
        return cls(
            len(pool.layers),
            rows,
            -(-pool.hot // pool.entries_per_page(page_tokens)),
            pages_spanned(hot_queries(pool), page_tokens),
            longest,
            pool.row_bytes(page_tokens),
            pool.entries_per_page(page_tokens),
        )

    @property
    def first_ring(self) -> int:
        return self.layers * self.rows * self.row_pages

    @property
    def first_gathered(self) -> int:
        return self.first_ring + self.rows * self.ring_pages

    @property
    def pages(self) -> int:
        return self.first_gathered + self.gather_pages

    @property
    def bytes(self) -> int:
        """With the numbers that say which entry is in which slot."""
        hot = 8 * self.first_ring * self.page_entries
        gathered = 4 * self.gather_pages * self.page_entries * (self.rows + 1)
        return self.pages * self.page_bytes + hot + gathered


def hot_bytes(memory: ModelMemory, rows: int, longest: int) -> int:
    """Device memory of all hot pools, for so many requests and sequences of `longest` pages."""
    shapes = (HotShape.of(p, memory.page_tokens, rows, longest) for p in memory.hot_pools)
    return sum(shape.bytes for shape in shapes)


def hot_slots(pool: PoolSpec, rows: int) -> int:
    """Entries of a hot pool that the hot buffers of so many requests have, in all layers."""
    assert pool.hot is not None
    return rows * pool.hot * len(pool.layers)


def hot_queries(pool: PoolSpec) -> int:
    """Tokens of a sequence in one step whose selections surely fit the hot buffer."""
    assert pool.hot is not None and pool.selected is not None
    return pool.hot // pool.selected


def pages_spanned(tokens: int, page_tokens: int) -> int:
    """Pages that so many tokens in a row touch at most."""
    return (tokens + page_tokens - 2) // page_tokens + 1
