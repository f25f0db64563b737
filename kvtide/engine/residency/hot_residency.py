"""Pools that live on the host, as a step sees them: their buffers, and the tables of its chunks.

A chunk of few tokens reads its hot row: all that its queries select fits there. A longer one has
its whole context gathered, layer by layer, in pages that the chunks of a step share
(`GatherBudget`). Where the row of a lease had another sequence's entries, it is cleared first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from kvtide.cache import Lease, TieredCache
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.page_tables import Numbers, PageTables, Table, TableVersion
from kvtide.layers.step import HOT_ROWS, HotPool, host_table
from kvtide.spec import ModelMemory
from kvtide.spec.residency import hot_queries
from kvtide.tiers import Buffers, HotBuffers


class HotResidency:
    """`pools` are the hot pools for a `Step`, empty where all pools are resident."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._buffers = cache.hardware.hot
        self._tables = PageTables(cache)
        self._rows_in_use: WeakSet[Lease] = WeakSet()
        self._known: WeakKeyDictionary[Lease, tuple[TableVersion, Table]] = WeakKeyDictionary()
        self.pools = hot_pools(self._buffers, cache.hardware.host)

    def tables(self, chunks: Sequence[ScheduledChunk]) -> list[tuple[TableVersion, Table]]:
        """The page tables of a step's chunks, each with a version that names its contents."""
        found = [self._tables.of(chunk.request.held) for chunk in chunks]
        if not self._buffers:
            return found
        gathered, queries = 0, min(hot_queries(hot.pool) for hot in self._buffers.values())
        with_hot: list[tuple[TableVersion, Table]] = []
        for chunk, (version, table) in zip(chunks, found, strict=True):
            lease, row = chunk.request.held, self._row(chunk.request.held)
            if chunk.tokens <= queries:
                with_hot.append(self._hot_row_tables(lease, row, version, table))
                continue
            pages = self._pages(chunk.start + chunk.tokens)
            more = hot_tables(self._buffers, table, row, chunk.tokens, gathered, pages)
            with_hot.append(((*version, gathered, pages), dict(table) | more))
            gathered += pages
        return with_hot

    def _hot_row_tables(
        self, lease: Lease, row: int, version: TableVersion, table: Table
    ) -> tuple[TableVersion, Table]:
        """Those of a chunk that reads its hot row: the same in every step, while slots are."""
        known = self._known.get(lease)
        if known is None or known[0] != (*version, -1, 0):
            more = hot_tables(self._buffers, table, row, 1, 0, 0)
            known = self._known[lease] = ((*version, -1, 0), dict(table) | more)
        return known

    def _row(self, lease: Lease) -> int:
        """The lease's hot row, cleared at its first use."""
        row = self._cache.hot_row(lease)
        if lease not in self._rows_in_use:
            self._rows_in_use.add(lease)
            for hot in self._buffers.values():
                hot.clear(row)
        return row

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._cache.memory.page_tokens)

    def padding(self, pages: int) -> dict[str, Numbers]:
        """The tables of a sequence that reads and writes nothing of hot pools."""
        nothing = np.full(pages, -1, np.int32)
        names = [name for pool in self._buffers for name in (pool, host_table(pool))]
        return dict.fromkeys([*names, HOT_ROWS] if names else [], nothing)

    def advance(self) -> None:
        """Begin a forward pass: what it uses counts as used after all before."""
        for hot in self._buffers.values():
            hot.clock.add_(1)


def table_names(memory: ModelMemory) -> list[str]:
    """The tables of a step: a page table per anchor; for hot pools that of the host, and rows."""
    hosts = [host_table(pool.name) for pool in memory.hot_pools]
    return [*(anchor.name for anchor in memory.anchors), *hosts, *([HOT_ROWS] if hosts else [])]


def hot_pools(buffers: Mapping[str, HotBuffers], host: Buffers) -> dict[str, HotPool]:
    """The buffers as layers take them; `host` has the pages."""
    return {name: _hot_pool(hot, host) for name, hot in buffers.items()}


def _hot_pool(hot: HotBuffers, host: Buffers) -> HotPool:
    pool, shape = hot.pool, hot.shape
    assert pool.hot is not None
    return HotPool(
        entries=pool.hot,
        rows=shape.rows,
        ring_pages=shape.ring_pages,
        layers=pool.layers,
        page_entries=hot.page_entries,
        pages=hot.pages,
        held=hot.held,
        used=hot.used,
        clock=hot.clock,
        marks=hot.marks,
        wanted=hot.wanted,
        host_rows=lambda layer: host.rows(pool.name, layer),
        counts=hot.counts,
    )


def hot_tables(
    buffers: Mapping[str, HotBuffers],
    table: Table,
    row: int,
    tokens: int,
    gathered: int,
    pages: int,
) -> dict[str, Numbers]:
    """The tables of hot pools for a sequence with so many new tokens and `pages` pages in all.

    `table` has the host slots by pool. `gathered` is the first gathered page that is free.
    """
    tables = {HOT_ROWS: np.array([row], np.int32)}
    for name, hot in buffers.items():
        tables[host_table(name)] = table[name]
        if tokens > hot_queries(hot.pool):
            tables[name] = hot.gathered_table(gathered, pages)
        else:
            tables[name] = hot.ring_table(row, len(table[name]))
    return tables


class GatherBudget:
    """The pages that the chunks of one step may gather; without hot pools there is no limit."""

    def __init__(self, cache: TieredCache) -> None:
        hot = cache.hardware.hot.values()
        self._page = cache.memory.page_tokens
        self._pages = min((each.shape.gather_pages for each in hot), default=None)
        self._queries = min((hot_queries(each.pool) for each in hot), default=0)

    def take(self, past: int, tokens: int) -> bool:
        """Whether a chunk of so many tokens still has its place; if so, it takes it."""
        if self._pages is None or tokens <= self._queries:
            return True
        pages = -(-(past + tokens) // self._page)
        if pages > self._pages:
            return False
        self._pages -= pages
        return True
