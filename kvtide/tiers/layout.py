"""Where every row of a tier lies. The only place in the project that knows strides.

A *row* is what one layer of one pool keeps for one page: always contiguous, always a multiple of
16 bytes. An arrangement gives every row its offset in slot 0 and the stride between slots; the
three layouts differ in these two numbers alone.

    layer_first         pool ▸ layer ▸ slot     a layer's rows side by side, as attention reads them
    page_first          pool ▸ slot ▸ layer     a page of one pool in one run
    page_first_direct   anchor ▸ slot ▸ layer ▸ pool     all of a page in one run: the anchor's rows
                        and its sidecars', in the order in which a forward pass needs them; then
                        each optional sidecar's

In the last one any range of layers is a single run per page, whatever pools a model has, so that
a copy engine is given few large copies where the others give it many small ones. The same order is
the canonical one in which a page leaves the process; a *tail* behind every page, and behind every
optional sidecar of it, keeps room for what goes with it then.

`pieces` compares two arrangements and joins what is contiguous in both: the one strided copy that
all backends implement.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from kvtide.spec import ModelMemory, PoolSpec


class Layout(Enum):
    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"


@dataclass(frozen=True, slots=True)
class Row:
    """One layer of one pool: the row of slot s is `bytes` bytes from `offset + s · stride` on."""

    pool: str
    layer: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """What an object holds of a page, with its tail: `bytes` from `offset + s · stride` on."""

    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A strided copy: per page, `bytes` bytes from `offset + slot · stride` here to there."""

    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int
    bytes: int


class Arrangement:
    """All rows of a tier with so many slots per anchor, laid out one way.

    `tails`: bytes to leave free behind every page of an anchor, and behind optional sidecars, where
    a page is one run.
    """

    def __init__(
        self,
        memory: ModelMemory,
        slots: Mapping[str, int],
        layout: Layout,
        tails: Mapping[str, int] | None = None,
    ) -> None:
        self.memory = memory
        self.slots = {anchor.name: slots[anchor.name] for anchor in memory.anchors}
        self.layout = layout
        rows_of = _ROWS_OF[layout]
        self._rows: dict[str, dict[tuple[int, str], Row]] = {}
        self._runs: dict[str, Run] = {}
        tails = tails if tails and layout is Layout.PAGE_FIRST_DIRECT else {}
        start = 0
        for anchor, count in self.slots.items():
            stride = stride_bytes(memory, anchor, tails)
            found = sorted(rows_of(memory, anchor, count, start, tails), key=lambda row: row.layer)
            self._rows[anchor] = {(row.layer, row.pool): row for row in found}
            at = start
            for name, pools in _object_parts(memory, anchor):
                size = sum(pool.page_bytes(memory.page_tokens) for pool in pools)
                self._runs[name] = Run(at, stride, size + tails.get(name, 0))
                at += self._runs[name].bytes
            start += stride * count
        self.bytes = start

    def run(self, pool: str) -> Run | None:
        """Where an anchor's pages lie, or an optional sidecar's, each with its tail.

        None where they are not one run.
        """
        return self._runs[pool] if self.layout is Layout.PAGE_FIRST_DIRECT else None

    def row(self, pool: PoolSpec, layer: int) -> Row:
        """A pool's row by its global layer number."""
        row = self._rows[pool.follows or pool.name].get((layer, pool.name))
        assert row is not None, f"pool {pool.name} has layers {pool.layers}, not {layer}"
        return row

    def rows(self, anchor: str) -> tuple[Row, ...]:
        """What one slot of the anchor stands for, in canonical order: by layer, then by pool."""
        return tuple(self._rows[anchor].values())


def stride_bytes(memory: ModelMemory, anchor: str, tails: Mapping[str, int]) -> int:
    """A page of an anchor with all its tails."""
    behind = (tails.get(pool, 0) for pool in (anchor, *memory.optional_sidecars(anchor)))
    return memory.slot_bytes(anchor) + sum(behind)


def pieces(
    source: Arrangement,
    target: Arrangement,
    anchor: str,
    layers: Container[int],
    sidecar: str | None = None,
) -> tuple[Piece, ...]:
    """How to copy pages of an anchor, these layers of them, in the fewest contiguous runs.

    Rows that only one side has stay there; with a `sidecar`, all but its own.
    """
    there = {(row.layer, row.pool): row for row in target.rows(anchor)}
    pairs = ((row, there.get((row.layer, row.pool))) for row in source.rows(anchor))
    wanted = [
        (a, b)
        for a, b in pairs
        if b is not None and a.layer in layers and sidecar in (None, a.pool)
    ]
    joined: list[Piece] = []
    for a, b in sorted(wanted, key=lambda pair: pair[0].offset):
        piece = Piece(a.offset, a.stride, b.offset, b.stride, a.bytes)
        if joined and _adjoins(joined[-1], piece):
            piece = replace(joined[-1], bytes=joined[-1].bytes + piece.bytes)
            joined.pop()
        joined.append(piece)
    return tuple(joined)


def _adjoins(before: Piece, piece: Piece) -> bool:
    return (
        before.source_offset + before.bytes == piece.source_offset
        and before.target_offset + before.bytes == piece.target_offset
        and before.source_stride == piece.source_stride
        and before.target_stride == piece.target_stride
    )


# -- the three layouts ----------------------------------------------------------------------


def _layer_first(
    memory: ModelMemory, anchor: str, slots: int, start: int, tails: Mapping[str, int]
) -> Iterator[Row]:
    for pool in memory.group(anchor):
        size = pool.row_bytes(memory.page_tokens)
        for layer in pool.layers:
            yield Row(pool.name, layer, start, size, size)
            start += slots * size


def _page_first(
    memory: ModelMemory, anchor: str, slots: int, start: int, tails: Mapping[str, int]
) -> Iterator[Row]:
    for pool in memory.group(anchor):
        size, page = pool.row_bytes(memory.page_tokens), pool.page_bytes(memory.page_tokens)
        for number, layer in enumerate(pool.layers):
            yield Row(pool.name, layer, start + number * size, page, size)
        start += slots * page


def _page_first_direct(
    memory: ModelMemory, anchor: str, slots: int, start: int, tails: Mapping[str, int]
) -> Iterator[Row]:
    page = stride_bytes(memory, anchor, tails)
    # What stays on the device lies behind the rest, so that what moves is one run.
    within_page = [pool for pool in memory.group(anchor) if pool.reuse.reach == 0]
    for name, pools in (*_object_parts(memory, anchor), ("", within_page)):
        for layer in sorted({layer for pool in pools for layer in pool.layers}):
            for pool in pools:
                if layer in pool.layers:
                    size = pool.row_bytes(memory.page_tokens)
                    yield Row(pool.name, layer, start, page, size)
                    start += size
        start += tails.get(name, 0)


def _object_parts(memory: ModelMemory, anchor: str) -> Iterator[tuple[str, list[PoolSpec]]]:
    """The pools of each object that a page becomes, by the pool that names it."""
    for name in (anchor, *memory.optional_sidecars(anchor)):
        yield name, [pool for pool in memory.object_pools(name) if pool.reuse.reach != 0]


_ROWS_OF = {
    Layout.LAYER_FIRST: _layer_first,
    Layout.PAGE_FIRST: _page_first,
    Layout.PAGE_FIRST_DIRECT: _page_first_direct,
}
