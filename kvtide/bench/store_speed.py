"""Write and read rates of a store, beside its disk or its own client library.

All drivers take turns in one run, each with objects of its own: write a batch, read it back, remove
it. A rate is the median over the turns, a ratio the median of the ratios within a turn. Memory is
page-aligned and lent to the store. What our store reads is compared with what was written.
"""

from __future__ import annotations

import itertools
import json
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from kvtide.bench.progress import ShowProgress
from kvtide.spec import catalog
from kvtide.storage import Store, StoreError, object_formats
from kvtide.storage.store import SPACE_BYTES
from kvtide.storage.trial import new_keys
from kvtide.tiers import Arrangement, Buffers, Layout, host_arena
from kvtide.transfer.host_pages import tails
from kvtide.transfer.shapes import OtherShapes
from kvtide.transfer.shapes.shape_marks import REFRESH_S
from kvtide.transfer.storage_requests import SoughtPage, StoredPage
from kvtide.transfer.store_link import StoreLink

BATCH_BYTES = 64 << 20
"""The size of a call, unless one object is larger."""
ALIGN = 4096
WAYS = ("write", "read")
ASKED_KEYS, KEYS_THERE = 10_000, 1_000
SMALL_BYTES = 64
OPENING_BATCH = 10_000
LONGEST_S = 60.0


class Driver(Protocol):
    """A store of objects under measurement. Every failure raises."""

    name: str

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None: ...
    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None: ...
    def remove(self, keys: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreCase:
    """Objects of one size, as many as make up about so many bytes."""

    name: str
    object_bytes: int
    objects: int

    @property
    def bytes(self) -> int:
        return self.object_bytes * self.objects


@dataclass(frozen=True, slots=True)
class StoreMeasurement:
    """`beside`: the other drivers' rates; `ratio`: ours to theirs."""

    case: str
    object_bytes: int
    objects: int
    way: str
    gb_s: float
    beside: dict[str, float]
    ratio: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Opened:
    """A store opened anew by a new process, with so many objects in it."""

    objects: int
    seconds: float
    bytes_per_object: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class MemoryBlocks:
    """Memory to write from and to read into, for any case."""

    def __init__(self, max_bytes: int) -> None:
        self.source = memoryview(mmap.mmap(-1, max_bytes))
        self.target = memoryview(mmap.mmap(-1, max_bytes))
        noise = np.random.default_rng(0).integers(0, 256, max_bytes, np.uint8)
        self.source[:] = noise.data
        self.target[:] = noise.data  # Touched, so that no page is new when it is timed.

    def cut(self, block: memoryview, case: StoreCase) -> list[memoryview]:
        size = case.object_bytes
        return [block[n * size : (n + 1) * size] for n in range(case.objects)]


class Ours:
    """The store under test, as a driver."""

    name = "kvtide"

    def __init__(self, store: Store, blocks: MemoryBlocks) -> None:
        self._store = store
        store.lend(blocks.source)
        store.lend(blocks.target)

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        refused = self._store.write(keys, sources).count(False)
        if refused:
            raise StoreError(
                f"storage {self._store.name}: {refused} objects refused; raise its capacity"
            )

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        lengths = self._store.read(keys, targets)
        lost = sum(n != len(target) for n, target in zip(lengths, targets, strict=True))
        if lost:
            raise StoreError(f"storage {self._store.name}: {lost} objects lost; raise its capacity")

    def remove(self, keys: Sequence[bytes]) -> None:
        self._store.remove(keys)

    def close(self) -> None:
        """The caller closes the store."""


def cases(models: Sequence[str], total_bytes: int) -> list[StoreCase]:
    """Pages of models, an anchor each, and round sizes."""
    sizes: dict[str, int] = {}
    for name in models:
        memory = catalog.resolve(name).at_rest
        for pool, found in object_formats(memory, bytes(SPACE_BYTES)).items():
            sizes[f"{name} {pool}"] = -(-found.bytes // ALIGN) * ALIGN
    sizes |= {"64 KiB": 64 << 10, "1 MiB": 1 << 20}
    return [StoreCase(name, size, max(1, total_bytes // size)) for name, size in sizes.items()]


def measure(
    case: StoreCase,
    drivers: Sequence[Driver],
    blocks: MemoryBlocks,
    turns: int,
    progress: ShowProgress,
) -> list[StoreMeasurement]:
    """Both ways, the first driver beside the others."""
    sources, targets = blocks.cut(blocks.source, case), blocks.cut(blocks.target, case)
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in progress(range(turns + 1), turns + 1, case.name):
        first = turn % len(drivers)
        for driver in [*drivers[first:], *drivers[:first]]:
            took = _turn(driver, case, sources, targets)
            if turn:  # The first is for connections, threads and caches to warm up.
                for way, seconds in zip(WAYS, took, strict=True):
                    rates.setdefault((way, driver.name), []).append(case.bytes / seconds / 1e9)
    return [_measured(case, way, rates, [driver.name for driver in drivers]) for way in WAYS]


def _turn(
    driver: Driver, case: StoreCase, sources: list[memoryview], targets: list[memoryview]
) -> tuple[float, float]:
    keys = new_keys(case.objects)
    batches = list(_batches(case))
    for target in targets:
        target[:ALIGN] = bytes(min(ALIGN, len(target)))
    start = time.perf_counter()
    for batch in batches:
        driver.write(keys[batch], sources[batch])
    middle = time.perf_counter()
    for batch in batches:
        driver.read(keys[batch], targets[batch])
    end = time.perf_counter()
    driver.remove(keys)
    if isinstance(driver, Ours) and any(s != t for s, t in zip(sources, targets, strict=True)):
        raise StoreError("the store returned other bytes than were written to it")
    return middle - start, end - middle


def _batches(case: StoreCase) -> Iterator[slice]:
    count = max(1, BATCH_BYTES // case.object_bytes)
    for start in range(0, case.objects, count):
        yield slice(start, min(start + count, case.objects))


def _measured(
    case: StoreCase, way: str, rates: dict[tuple[str, str], list[float]], names: list[str]
) -> StoreMeasurement:
    ours, *others = names
    own = rates[way, ours]
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, rates[way, name], strict=True))
        for name in others
    }
    beside = {name: statistics.median(rates[way, name]) for name in others}
    gb_s = statistics.median(own)
    return StoreMeasurement(case.name, case.object_bytes, case.objects, way, gb_s, beside, ratios)


# -- ranks of another shape -----------------------------------------------------------------

Times = tuple[float, float]
"""Milliseconds of a look-up, and of a read."""


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """A prompt's pages by the shape that stored them: looked up, and those that are there read.

    own_ms     by a link that knows this shape alone; `ms`: by one that finds those of any shape
    lookup_ms  of the look-ups among them: own; of any shape; the same where marks are looked up
    ratio      of `ms` to `own_ms`, the median of the turns' ratios
    """

    model: str
    prompt_pages: int
    stored_pages: int
    own_ms: float
    ms: float
    lookup_ms: tuple[float, float, float]
    ratio: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Shared:
    """The store under test for a link, which would close it."""

    def __init__(self, store: Store) -> None:
        self.name, self.lend, self.exists = store.name, store.lend, store.exists
        self.read, self.write, self.remove = store.read, store.write, store.remove
        self.clear, self.status = store.clear, store.status

    def close(self) -> None:
        """The caller closes the store."""


class _ShapeLinks:
    """Host pages of a model that one rank serves, and links of them to a store.

    own, any, marking  one knows this shape alone; one finds any; and one looks up the marks of
                       other shapes each time, which the second does now and then
    """

    def __init__(self, store: Store, space: bytes, model: str, max_bytes: int) -> None:
        self.memory = catalog.resolve(model).at_rest
        formats = object_formats(self.memory, space)
        anchors = [anchor.name for anchor in self.memory.anchors]
        page_bytes = sum(formats[name].bytes for name in anchors)
        self.pages = max(1, max_bytes // page_bytes)
        slots = dict.fromkeys(anchors, self.pages)
        page_first = Layout.PAGE_FIRST_DIRECT
        host = Arrangement(self.memory, slots, page_first, tails(formats))
        self._arena = host_arena(host.bytes, pinned=False)
        buffers = Buffers(host, self._arena.data)
        later = itertools.count(step=REFRESH_S)
        clocks: list[Callable[[], float]] = [lambda: 0.0, lambda: next(later)]
        self.own = StoreLink(_Shared(store), formats, buffers)
        self.any, self.marking = (
            StoreLink(_Shared(store), formats, buffers, OtherShapes(host, space, clock=clock))
            for clock in clocks
        )
        keys = new_keys(self.pages)
        self.stored = [StoredPage(name, key, n) for name in anchors for n, key in enumerate(keys)]
        self.missing = [
            StoredPage(name, key, 0) for name in anchors for key in new_keys(self.pages)
        ]

    def write(self) -> None:
        writing = self.own.write(self.stored, LONGEST_S)
        _await(lambda: writing.quiet)
        if writing.count != len(self.stored):
            raise StoreError(f"{writing.count} of {len(self.stored)} pages written")

    def restore(self, link: StoreLink, sought: Sequence[StoredPage]) -> tuple[float, float]:
        """Milliseconds of a look-up, and of reading those pages that are stored."""
        stored = [page for page in sought if page in self.stored]
        began = time.perf_counter()
        lookup = link.look(
            lambda: [SoughtPage(page.anchor, page.key) for page in sought], LONGEST_S
        )
        _await(lambda: lookup.over)
        middle = time.perf_counter()
        if sum(lookup.found or ()) != len(stored) or lookup.shapes:
            raise StoreError(f"pages of this shape were not found ({lookup.error})")
        reading = link.read(stored, LONGEST_S)
        _await(lambda: reading.over and reading.quiet)
        end = time.perf_counter()
        if reading.ready != len(stored):
            raise StoreError(f"{reading.ready} of {len(stored)} pages read")
        return 1e3 * (middle - began), 1e3 * (end - middle)

    def close(self) -> None:
        for link in (self.own, self.any, self.marking):
            link.close(LONGEST_S)
        self._arena.close()


def shape_costs(
    store: Store, space: bytes, model: str, max_bytes: int, turns: int, progress: ShowProgress
) -> list[ShapeCost]:
    """Of a prompt that is stored, of one whose second half is not, and of one that is not."""
    links = _ShapeLinks(store, space, model, max_bytes)
    try:
        links.write()
        found = []
        known = (links.own, links.any, links.marking)
        for sought in (links.stored, [*links.stored, *links.missing], links.missing):
            took: list[list[Times]] = []
            for turn in progress(range(turns + 1), turns + 1, f"{model}, pages of one shape"):
                order = known if turn % 2 else known[::-1]
                times = {link: links.restore(link, sought) for link in order}
                if turn:  # The first turn warms up; the second link looks up marks in it.
                    took.append([times[link] for link in known])
            stored = sum(page in links.stored for page in sought)
            found.append(_shape_cost(model, len(sought), stored, took))
        return found
    finally:
        links.close()


def _shape_cost(
    model: str,
    prompt_pages: int,
    stored_pages: int,
    took: Sequence[Sequence[Times]],
) -> ShapeCost:
    own, other, _ = ([sum(times) for times in column] for column in zip(*took, strict=True))
    looked = [statistics.median(times[0] for times in column) for column in zip(*took, strict=True)]
    ratio = statistics.median(b / a for a, b in zip(own, other, strict=True))
    return ShapeCost(
        model,
        prompt_pages,
        stored_pages,
        statistics.median(own),
        statistics.median(other),
        (looked[0], looked[1], looked[2]),
        ratio,
    )


def _await(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not true():
        if time.monotonic() > deadline:
            raise StoreError(f"a call of the store took over {LONGEST_S:g} s")
        time.sleep(50e-6)


# -- looking and opening --------------------------------------------------------------------


def existence_ms(store: Store, turns: int) -> float:
    """Milliseconds of one call for ten thousand keys, a thousand of which exist."""
    there = new_keys(KEYS_THERE)
    small = memoryview(bytearray(SMALL_BYTES))
    store.write(there, [small] * len(there))
    took = []
    try:
        for _ in range(turns):
            keys = [*there, *new_keys(ASKED_KEYS - KEYS_THERE)]
            start = time.perf_counter()
            found = store.exists(keys)
            took.append(1e3 * (time.perf_counter() - start))
            assert sum(found) == KEYS_THERE
    finally:
        store.remove(there)
    return statistics.median(took)


def fill(store: Store, objects: int, progress: ShowProgress) -> None:
    """Write `objects` small objects, for a measurement of opening the store."""
    sources = [memoryview(bytearray(SMALL_BYTES))] * OPENING_BATCH
    starts = range(0, objects, OPENING_BATCH)
    for start in progress(starts, len(starts), "objects to open with, by ten thousand"):
        count = min(OPENING_BATCH, objects - start)
        if not all(store.write(new_keys(count), sources[:count])):
            raise StoreError(f"storage {store.name}: objects refused; raise its capacity")


def opened_anew(url: str, space: bytes, objects: int) -> Opened:
    """In a process of its own, so that its memory is not mixed with this one's."""
    command = [sys.executable, "-m", "kvtide.bench.store_opening", url, space.hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"opening it anew failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    return Opened(objects, found["seconds"], found["bytes"] / max(1, objects))
