"""How fast pages move between device and host, beside plain copies of as many bytes.

Every case is timed in turns with a plain copy, on the wall clock, from the call that submits it to
its last byte; a fraction is the median over the turns. Slots are scattered at random on both sides,
unless a case is contiguous.

There are two fractions. `alone` is one copy on an idle link beside one plain copy as long.
`back to back` is as many of them as make up two gibibytes, queued at once, beside one plain copy of
that length: the link's limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from kvtide.bench.link import Link
from kvtide.bench.progress import ShowProgress
from kvtide.spec import ModelMemory, PageMove, Slots, catalog
from kvtide.storage import object_formats
from kvtide.storage.store import SPACE_BYTES
from kvtide.tiers import Arrangement, Buffers, Layout
from kvtide.transfer.backends import CELLS, DEFAULTS, open_copier
from kvtide.transfer.copy_jobs import Copier
from kvtide.transfer.host_pages import tails
from kvtide.transfer.strided import Way

TIMEOUT_S = 60.0
SPREAD = 2
"""How many slots there are for every page that is copied."""
_SPACE = bytes(SPACE_BYTES)


@dataclass(frozen=True, slots=True)
class TransferCase:
    """What a resume after so many tokens moves, with one layout on the host and one backend."""

    name: str
    memory: ModelMemory
    tokens: int
    layout: Layout
    backend: str
    goal: float | None = None
    scattered: bool = True

    @property
    def pages(self) -> dict[str, int]:
        """All pages of a history; of windows and states what they reach back over."""
        page = self.memory.page_tokens
        pages = self.tokens // page
        reaches = {p.name: p.reuse.reach_pages(page) for p in self.memory.anchors}
        return {name: min(pages, reach or pages) for name, reach in reaches.items()}

    @property
    def bytes(self) -> int:
        return sum(n * self.memory.at_rest.slot_bytes(anchor) for anchor, n in self.pages.items())

    @property
    def slots(self) -> dict[str, int]:
        """More of them than pages, so that pages can lie scattered."""
        return {anchor: SPREAD * n for anchor, n in self.pages.items()}

    def on_host(self) -> Arrangement:
        """With the gap behind each page that a cache leaves for its label."""
        kept = self.memory.at_rest
        return Arrangement(kept, self.slots, self.layout, tails(object_formats(kept, _SPACE)))


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """`alone`: fraction of a plain copy as long; `back_to_back`: fraction of the link's limit."""

    case: str
    way: str
    layout: str
    backend: str
    bytes: int
    legs: int
    gb_s: float
    alone: float
    back_to_back: float
    goal: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def goal_cases(device: torch.device, tokens: int) -> list[TransferCase]:
    """The cases with a goal, with the default layout and backend."""
    v4, qwen = catalog.resolve("deepseek-v4-flash"), catalog.resolve("qwen3-8b", 64)
    named = (
        ("DeepSeek-V4-Flash, page 256", v4, tokens, 0.92),
        ("Qwen3-8B, page 64", qwen, tokens, 0.95),
        ("only C128 and index rows, 1.7 and 8.4 KB", small_rows(v4), 8 * tokens, 0.85),
    )
    backend = DEFAULTS[device.type]
    cases = [
        TransferCase(name, memory, count, Layout.PAGE_FIRST_DIRECT, backend, goal)
        for name, memory, count, goal in named
    ]
    in_a_row = "DeepSeek-V4-Flash, pages in a row"
    return [*cases, replace(cases[0], name=in_a_row, scattered=False, goal=None)]


def cell_cases(device: torch.device, tokens: int) -> list[TransferCase]:
    """Every valid cell of layout and backend, with many small rows and with few large ones."""
    v4, qwen = catalog.resolve("deepseek-v4-flash"), catalog.resolve("qwen3-8b", 64)
    return [
        TransferCase(name, memory, tokens, layout, backend)
        for name, memory in (("DeepSeek-V4-Flash", v4), ("Qwen3-8B", qwen))
        for (kind, backend), layouts in CELLS.items()
        for layout in Layout
        if kind == device.type and layout in layouts
    ]


def small_rows(memory: ModelMemory) -> ModelMemory:
    """Of DeepSeek-V4 only the pools with small rows: C128 entries and index keys."""
    kept = tuple(pool for pool in memory.pools if pool.name in ("kv", "c4_index", "c128"))
    return replace(memory, pools=kept)


# -- measuring ------------------------------------------------------------------------------


class Rig:
    """A case on a link, ready to copy."""

    def __init__(self, case: TransferCase, link: Link, device_layout: Layout) -> None:
        self._case = case
        self._order = np.random.default_rng(0)
        self.link = link
        self.copier: Copier = open_copier(
            case.backend,
            Buffers(Arrangement(case.memory, case.slots, device_layout), link.device_block),
            Buffers(case.on_host(), link.host_block),
        )

    def moves(self, way: Way) -> list[PageMove]:
        """The case's pages, from and to slots in random order, or one after another."""
        return [
            PageMove(anchor, way.source, way.target, self._slots(count), self._slots(count))
            for anchor, count in self._case.pages.items()
        ]

    def time(self, way: Way, times: int = 1) -> float:
        """Seconds from the first submission to the last byte."""
        moves = self.moves(way)
        self.link.synchronize()
        start = time.perf_counter()
        tickets = [self.copier.copy(way, moves, TIMEOUT_S) for _ in range(times)]
        tickets[-1].wait(-1)
        self.link.finish()
        return time.perf_counter() - start

    @property
    def queued(self) -> int:
        """How many of these copies are as long as the plain copy they are compared with."""
        return max(1, round(self.link.limit_bytes / self._case.bytes))

    def close(self) -> None:
        self.copier.close(TIMEOUT_S)

    def _slots(self, count: int) -> Slots:
        if not self._case.scattered:
            return np.arange(count, dtype=np.int32)
        return self._order.permutation(SPREAD * count)[:count].astype(np.int32)


def block_bytes(cases: Iterable[TransferCase]) -> int:
    """What the largest case needs on either side."""
    return max(case.on_host().bytes for case in cases)


def measure(
    cases: list[TransferCase],
    link: Link,
    repetitions: int,
    progress: ShowProgress,
    device_layout: Layout = Layout.PAGE_FIRST_DIRECT,
) -> list[TransferMeasurement]:
    """Every case, both ways."""
    found = []
    for case in progress(cases, len(cases), "cases"):
        rig = Rig(case, link, device_layout)
        found += [_measure(case, rig, way, repetitions) for way in Way]
        rig.close()
    return found


def _measure(case: TransferCase, rig: Rig, way: Way, repetitions: int) -> TransferMeasurement:
    size = case.bytes
    rig.time(way)
    turns = [
        (
            rig.time(way),
            rig.link.time(way, size),
            rig.time(way, rig.queued) / rig.queued,
            rig.link.limit_bytes_s(way),
        )
        for _ in range(repetitions)
    ]
    return TransferMeasurement(
        case.name,
        way.name.lower(),
        case.layout.value,
        case.backend,
        size,
        len(rig.copier.groups) if way is Way.LOAD else 1,
        statistics.median(size / one / 1e9 for one, _, _, _ in turns),
        statistics.median(plain / one for one, plain, _, _ in turns),
        statistics.median(size / queued / limit for _, _, queued, limit in turns),
        case.goal,
    )


# -- beside other work ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure that is no plain bandwidth. `value` in `unit`; `goal` its upper or lower bound."""

    what: str
    value: float
    unit: str
    goal: str = "–"
    reached: bool | None = None


def both_ways(case: TransferCase, link: Link, repetitions: int) -> list[Beside]:
    """Loads and backups at once, beside plain copies both ways at once.

    First as a step submits them: all that goes one way leaves together. Then one submission after
    another while copies run, so that the submitting thread and the lanes want the interpreter at
    the same time.
    """
    rig = Rig(case, link, Layout.PAGE_FIRST_DIRECT)
    together = [_both_ways(rig, case, 1, rig.queued) for _ in range(repetitions + 1)]
    fraction = statistics.median(together[1:])
    name = f"both directions at once, {case.name}"
    found = [Beside(name, fraction, "share", "≥ 95%", fraction >= 0.95)]
    if rig.queued > 1:
        apart = [_both_ways(rig, case, rig.queued, 1) for _ in range(repetitions + 1)]
        fraction = statistics.median(apart[1:])
        found.append(Beside(f"the same in {rig.queued} submissions each way", fraction, "share"))
    rig.close()
    return found


def _both_ways(rig: Rig, case: TransferCase, submissions: int, merged: int) -> float:
    """The rate of `submissions` each way, as a fraction of plain copies both ways."""
    moves = {way: rig.moves(way) * merged for way in Way}
    rig.link.synchronize()
    start = time.perf_counter()
    tickets = [
        rig.copier.copy(way, moves[way], TIMEOUT_S) for _ in range(submissions) for way in Way
    ]
    for ticket in tickets[-2:]:
        ticket.wait(-1)
    rig.link.finish()
    rate = 2 * submissions * merged * case.bytes / (time.perf_counter() - start)
    return rate / rig.link.both_ways_bytes_s()


def matmul_beside(case: TransferCase, link: Link, repetitions: int, way: Way = Way.LOAD) -> Beside:
    """Speed of a large GEMM while the case's copies run, beside its speed alone."""
    rig = Rig(case, link, Layout.PAGE_FIRST_DIRECT)
    moves = rig.moves(way)
    gemm = link.gemm()
    fractions = []
    for _ in range(repetitions + 1):
        before = gemm.time()
        tickets = [rig.copier.copy(way, moves, TIMEOUT_S) for _ in range(8 * rig.queued)]
        beside = gemm.time()
        running = not tickets[-1].done()
        tickets[-1].wait(-1)
        link.finish()
        assert running, "the copies ended before the GEMM did; the case is too small"
        fractions.append((before + gemm.time()) / 2 / beside)
    rig.close()
    fraction = statistics.median(fractions[1:])
    name = f"8192³ bf16 GEMM beside a {way.name.lower()}, {case.name}"
    return Beside(name, fraction, "share", "≥ 97%", fraction >= 0.97)


def submission(case: TransferCase, link: Link, repetitions: int) -> list[Beside]:
    """The time that a submission takes of the calling thread."""
    rig = Rig(case, link, Layout.PAGE_FIRST_DIRECT)
    found = []
    for way in Way:
        costs = []
        for _ in range(10 * repetitions):
            moves = rig.moves(way)
            link.synchronize()
            start = time.perf_counter()
            ticket = rig.copier.copy(way, moves, TIMEOUT_S)
            costs.append((time.perf_counter() - start) * 1e6)
            ticket.wait(-1)
            link.finish()
        pages = sum(case.pages.values())
        name = f"submitting a {way.name.lower()}, {pages} pages × {case.memory.layers} layers"
        median = statistics.median(costs)
        found.append(Beside(name, median, "µs", "< 200 µs", median < 200))
    rig.close()
    return found
