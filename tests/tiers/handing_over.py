"""Two sides with ranks, layouts and residencies of their own, and what each must have of a page.

The content of a page is drawn once, by pool, layer, field and unit, as one rank would have it. A
side is given its part of it, or should have got it, unit by unit as `TensorRanks` divides them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.spec import ModelMemory, PoolSpec
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.tiers.manifest import PAGES, TAIL, Area, MemoryKind, MemoryManifest, running_areas
from kvtide.tiers.pairing import pair
from kvtide.tiers.row_copies import RegionRuns, expand

Bytes = npt.NDArray[np.uint8]
FINGERPRINT, DRAFT = b"weights", b"draft"
GUARD = 64
TAIL_ROWS = 3


@dataclass(frozen=True)
class Shape:
    """How a side is divided and laid out. `behind`: bytes free behind every page on the host."""

    stages: int = 1
    tensor_ranks: int = 1
    layout: Layout = Layout.LAYER_FIRST
    on_device: bool = False
    behind: int = 0


class Content:
    """The bytes of pages as one rank has them: (entries, units, bytes of a unit) by field."""

    def __init__(self, memory: ModelMemory, seed: int) -> None:
        self._memory = memory
        self._rng = np.random.default_rng(seed)
        self._drawn: dict[tuple[int, str, int, str], Bytes] = {}

    def of(self, page: int, pool: PoolSpec, layer: int, name: str) -> Bytes:
        """The same for all sides; `pool` may be a rank's part."""
        key = (page, pool.name, layer, name)
        if key not in self._drawn:
            whole = self._memory.pool(pool.name)
            part = next(f for f in whole.entry.fields if f.name == name)
            units = (part.groups or part.shape[0]) if part.sharded else 1
            shape = (whole.entries_per_page(self._memory.page_tokens), units, part.bytes // units)
            self._drawn[key] = self._rng.integers(0, 256, shape, np.uint8)
        return self._drawn[key]

    def on_rank(self, page: int, pool: PoolSpec, layer: int, ranks: TensorRanks) -> Bytes:
        """A rank's row without its padding."""
        parts = []
        for part in pool.entry.fields:
            drawn = self.of(page, pool, layer, part.name)
            mine = ranks.shard(drawn.shape[1]) if part.sharded else range(drawn.shape[1])
            assert mine is not None
            kept = drawn[:, mine.start : mine.stop]
            parts.append(kept.reshape(len(kept), -1))
        return np.concatenate(parts, 1).ravel()


@dataclass
class Rank:
    """One rank's slice, its arrangements by area, and its regions."""

    memory: ModelMemory
    tensor: TensorRanks
    manifest: MemoryManifest
    arrangements: list[tuple[Area, Arrangement]]
    regions: dict[int, Bytes]
    landed: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def row(self, area: Area, arrangement: Arrangement, pool: str, layer: int, slot: int) -> Bytes:
        """A row's bytes, as a view."""
        row = arrangement.row(arrangement.memory.pool(pool), layer)
        start = area.base + row.offset + slot * row.stride
        return self.regions[area.region][start : start + row.bytes]

    def places(self, name: str) -> Iterator[tuple[Area, Arrangement, PoolSpec, int]]:
        """Every row of an area: its pool and layer."""
        for area, arrangement in self.arrangements:
            if area.name == name:
                for pool, layer in sorted({(row.pool, row.layer) for row in area.rows}):
                    yield area, arrangement, arrangement.memory.pool(pool), layer


def sliced(memory: ModelMemory, shape: Shape) -> list[tuple[ModelMemory, TensorRanks]]:
    """Stage by stage, as `RankTopology` numbers ranks."""
    ranks = [TensorRanks(n, shape.tensor_ranks) for n in range(shape.tensor_ranks)]
    stages = [list(memory.stages(shape.stages, one.rank, one.count)) for one in ranks]
    return [(stages[r.rank][s], r) for s in range(shape.stages) for r in ranks]


def source_ranks(memory: ModelMemory, shape: Shape, slots: Mapping[str, int]) -> list[Rank]:
    """Pools where forward passes have them: hot ones on the host."""
    found = []
    for part, tensor in sliced(memory, shape):
        hot = {pool.name for pool in part.hot_pools}
        on_device = {name: 0 if name in hot else count for name, count in slots.items()}
        device = Arrangement(part, on_device, shape.layout)
        host = Arrangement(part.at_rest, slots, Layout.PAGE_FIRST_DIRECT)
        areas = running_areas(device, host, regions=(4, 7))
        found.append(_rank(part, tensor, list(zip(areas, (device, host), strict=False))))
    return found


def target_ranks(memory: ModelMemory, shape: Shape, slots: Mapping[str, int]) -> list[Rank]:
    """Whole pages on the host, or on the device but for hot pools; and tail rows."""
    found = []
    for part, tensor in sliced(memory, shape):
        behind = {pool.name: shape.behind for pool in part.at_rest.pools}
        host = Arrangement(part.at_rest, slots, shape.layout, behind)
        tail = Arrangement(part, dict.fromkeys(slots, TAIL_ROWS), Layout.PAGE_FIRST_DIRECT)
        hot = [pool.name for pool in part.hot_pools]
        pages = [(Area.of(PAGES, host, MemoryKind.HOST, region=2, base=GUARD), host)]
        if shape.on_device:
            device = Arrangement(part, slots, shape.layout)
            resident = [pool.name for pool in part.in_device_pages.pools]
            on = Area.of(PAGES, device, MemoryKind.DEVICE, region=5, pools=resident)
            beside = Area.of(PAGES, host, MemoryKind.HOST, region=2, base=GUARD, pools=hot)
            pages = [(on, device), (beside, host)]
        last = (Area.of(TAIL, tail, MemoryKind.HOST, region=0, base=2 * GUARD), tail)
        found.append(_rank(part, tensor, [*pages, last]))
    return found


def _rank(
    memory: ModelMemory, tensor: TensorRanks, areas: Sequence[tuple[Area, Arrangement]]
) -> Rank:
    drafted = DRAFT if memory.draft_sidecars else b""
    manifest = MemoryManifest.of(memory, [area for area, _ in areas], FINGERPRINT, drafted)
    regions = {}
    for number, (area, arrangement) in enumerate(areas):
        rng = np.random.default_rng(number)
        size = area.base + arrangement.bytes + GUARD
        regions[area.region] = rng.integers(0, 256, size, np.uint8)
    # As peers get them.
    received = MemoryManifest.from_json(json.loads(json.dumps(manifest.to_json())))
    return Rank(memory, tensor, received, list(areas), regions)


@dataclass
class Handover:
    """Pages of one sequence from one side to the other, copied run by run."""

    content: Content
    sources: list[Rank]
    targets: list[Rank]
    tables: Mapping[str, npt.NDArray[np.int32]]
    """Source slots by source anchor and page."""

    def __post_init__(self) -> None:
        for rank in self.sources:
            for area, arrangement, pool, layer in rank.places("running"):
                for page, slot in enumerate(self.tables[pool.follows or pool.name]):
                    row = rank.row(area, arrangement, pool.name, layer, int(slot))
                    wanted = self.content.on_rank(page, pool, layer, rank.tensor)
                    row[: len(wanted)] = wanted
        for rank in self.targets:
            rank.landed = {n: np.zeros(len(b), np.int64) for n, b in rank.regions.items()}
        manifests = [[rank.manifest for rank in side] for side in (self.sources, self.targets)]
        self.pairing = pair(*manifests)
        self.before = [{n: b.copy() for n, b in rank.regions.items()} for rank in self.targets]

    def runs(self, s: int, t: int, area: str, anchor: str, to: Mapping[int, int]) -> RegionRuns:
        """`to` is page → slot."""
        copies = self.pairing.copies(s, t, area)
        return expand(copies, self.tables, anchor, list(to), list(to.values()))

    def send(self, area: str, slots: Mapping[str, Mapping[int, int]]) -> None:
        """All sources write these pages to all targets: target anchor → page → slot."""
        for s, source in enumerate(self.sources):
            for t, target in enumerate(self.targets):
                for anchor, to in slots.items():
                    apply(self.runs(s, t, area, anchor, to), source, target)

    def check(self, sent: Mapping[str, Mapping[str, Mapping[int, int]]]) -> None:
        """Of every target: fields are the content's, and no byte but of these rows is another.

        `sent` is area → target anchor → page → slot.
        """
        for before, rank in zip(self.before, self.targets, strict=True):
            wanted = {number: block.copy() for number, block in before.items()}
            padding = {number: np.zeros(len(b), np.bool_) for number, b in before.items()}
            for name, anchors in sent.items():
                for area, arrangement, pool, layer in rank.places(name):
                    if pool.name in self.pairing.absent:
                        continue
                    row = arrangement.row(pool, layer)
                    for page, slot in anchors[pool.follows or pool.name].items():
                        start = area.base + row.offset + slot * row.stride
                        bytes_ = self.content.on_rank(page, pool, layer, rank.tensor)
                        end = start + len(bytes_)
                        wanted[area.region][start:end] = bytes_
                        padding[area.region][end : start + row.bytes] = True
                        assert (rank.landed[area.region][start:end] == 1).all(), (pool.name, layer)
            for number, block in rank.regions.items():
                wrong = (block != wanted[number]) & ~padding[number]
                assert not wrong.any(), f"region {number}: byte {np.flatnonzero(wrong)[0]} differs"
                assert rank.landed[number].max(initial=0) <= 1


def apply(runs: RegionRuns, source: Rank, target: Rank) -> None:
    """Copy what the runs say, and count how often each byte was written."""
    columns = (runs.source_region, runs.source, runs.target_region, runs.target, runs.bytes)
    for here, start, there, to, size in zip(*(c.tolist() for c in columns), strict=True):
        assert start >= 0 and to >= 0 and size > 0
        read = source.regions[here][start : start + size]
        target.regions[there][to : to + size] = read
        target.landed[there][to : to + size] += 1
