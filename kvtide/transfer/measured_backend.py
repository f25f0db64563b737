"""Both backends, each for the pieces it is better at, by one measurement at the start.

Which one is faster depends on how long a contiguous run is, on the direction, and on the machine.
So both are timed once, with scattered runs of a few lengths in the tiers' own memory while that is
still empty. The copy engine leaves the device's processors alone, so it wins what is nearly even.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kvtide.tiers.buffers import Buffers
from kvtide.transfer.copy_engine import Direct
from kvtide.transfer.lane import Backend
from kvtide.transfer.strided import PieceTable, Strided, Way
from kvtide.transfer.triton_copies import strided_kernel

LENGTHS_BYTES = (2048, 8192, 32768, 65536, 131072, 196608, 262144, 524288)
"""Among them what a group of a large model's layers brings (`copy_jobs.GROUP_PAGE_BYTES`)."""
NEARLY_EVEN = 0.85
_MAX_RUNS = 256
_TIMED_BYTES = 256 << 20
_MAX_IN_A_ROW = 16
_REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Bytes per second of both backends with runs of one length."""

    way: Way
    run_bytes: int
    direct_bytes_s: float
    kernel_bytes_s: float

    @property
    def direct_wins(self) -> bool:
        return self.direct_bytes_s >= NEARLY_EVEN * self.kernel_bytes_s


class MeasuredBackend:
    """`min_direct_bytes[way]`: the shortest run that goes to the copy engine."""

    name = "auto"

    def __init__(
        self, kernel: Backend, direct: Backend, min_direct_bytes: Mapping[Way, int]
    ) -> None:
        self.min_direct_bytes = dict(min_direct_bytes)
        self._kernel = kernel
        self._direct = direct
        self._split: dict[PieceTable, tuple[PieceTable, PieceTable]] = {}

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        short: list[Strided] = []
        long: list[Strided] = []
        for work in works:
            tables = self._parts(work.table)
            for table, part in zip(tables, (short, long), strict=True):
                if len(table):
                    part.append(Strided(table, work.source_index, work.target_index))
        for _ in zip(self._direct.issue(long, legs), self._kernel.issue(short, legs), strict=True):
            yield

    def _parts(self, table: PieceTable) -> tuple[PieceTable, PieceTable]:
        parts = self._split.get(table)
        if parts is None:
            long = table.bytes >= self.min_direct_bytes[table.way]
            parts = self._split[table] = (table.pick(~long), table.pick(long))
        return parts


def fastest_of_both(device: Buffers, host: Buffers) -> MeasuredBackend:
    """Time both backends on these empty tiers, and choose."""
    kernel, direct = strided_kernel(device.data.device), Direct()
    results = measure(device, host, kernel, direct)
    return MeasuredBackend(kernel, direct, {way: shortest_direct(results, way) for way in Way})


def shortest_direct(results: list[LinkMeasurement], way: Way) -> int:
    """The length from which on the copy engine wins every measurement of this direction."""
    shortest = 2 * LENGTHS_BYTES[-1]
    for result in sorted(results, key=lambda one: -one.run_bytes):
        if result.way is way:
            if not result.direct_wins:
                break
            shortest = result.run_bytes
    return shortest


def measure(
    device: Buffers, host: Buffers, kernel: Backend, direct: Backend
) -> list[LinkMeasurement]:
    """Time scattered runs of every length that the tiers have room for, in both directions."""
    room = min(device.data.numel(), host.data.numel())
    return [
        LinkMeasurement(
            way,
            length,
            _bytes_s(direct, _scattered(way, device, host, length)),
            _bytes_s(kernel, _scattered(way, device, host, length)),
        )
        for way in Way
        for length in LENGTHS_BYTES
        if room >= 8 * length
    ]


def _scattered(way: Way, device: Buffers, host: Buffers, length: int) -> Strided:
    """Runs of one length, every other place, in two different random orders."""
    source, target = (host, device) if way is Way.LOAD else (device, host)
    places = min(source.data.numel(), target.data.numel()) // length
    count = min(_MAX_RUNS, places // 2)
    order = np.random.default_rng(length)

    def column(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value], np.int64)

    table = PieceTable(
        way,
        column(source.address),
        column(length),
        column(target.address),
        column(length),
        column(length),
        (0, 1),
        16,
        True,
    )
    every_other = np.arange(places // 2, dtype=np.int64) * 2
    return Strided(
        table, order.permutation(every_other)[:count], order.permutation(every_other)[:count]
    )


def _bytes_s(backend: Backend, work: Strided) -> float:
    """The best of a few timings of many copies in a row, after one that warms up."""
    in_a_row = min(_MAX_IN_A_ROW, -(-_TIMED_BYTES // work.bytes))
    stream = _aside()
    best = float("inf")
    with torch.cuda.stream(stream):
        list(backend.issue([work], 1))
        for _ in range(_REPETITIONS):
            stream.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(in_a_row):
                list(backend.issue([work], 1))
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e-3 / in_a_row)
    return work.bytes / best


@cache
def _aside() -> torch.cuda.Stream:
    """One stream for all measurements: torch has few, and reuses them."""
    return torch.cuda.Stream()
