"""Scattered rows from pinned host memory into hot slots, by the kernels of a swap-in.

A few sequences select entries of which none is hot; each has a long history on the host. Timed are
the copies alone, and whole swap-ins with their plan, several in one CUDA graph. On a CPU the
reference swaps in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvtide.bench.gpu.ceilings import timed
from kvtide.engine.residency.hot_residency import hot_pools
from kvtide.layers import ForwardPass, Place, Rows, Step
from kvtide.layers.backend.choice import choose
from kvtide.layers.step import HOT_ROWS, Batch, HotPool, host_table
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec
from kvtide.spec.residency import HotShape
from kvtide.tiers import Arrangement, Buffers, HotBuffers, Layout, host_arena

PAGE = 64
ROUNDS = 8
"""Swap-ins of a graph, each of other rows."""
LIMITS_GB_S = {
    584: {512: 21.0, 2048: 35.0, 8192: 41.0},
    656: {512: 23.0, 2048: 40.0, 8192: 45.0},
    1152: {512: 35.0, 2048: 46.0, 8192: 50.0},
}
"""Of a plain gather kernel on an H200, by bytes of a row and rows."""
GOAL = 0.9


@dataclass(frozen=True, slots=True)
class RowResult:
    """Seconds of a copy of so many rows, of a swap-in with its plan, and of one without misses.

    memcpy_bytes_s  of one plain copy of as many bytes
    """

    row_bytes: int
    rows: int
    copy_s: float
    swap_s: float
    floor_s: float
    memcpy_bytes_s: float
    limit_gb_s: float | None

    @property
    def copy_gb_s(self) -> float:
        return self.row_bytes * self.rows / self.copy_s / 1e9

    @property
    def of_limit(self) -> float | None:
        return None if self.limit_gb_s is None else self.copy_gb_s / self.limit_gb_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"copy_gb_s": self.copy_gb_s, "of_limit": self.of_limit}


class RowBed:
    """Sequences with a history on the host, that select so many entries each."""

    def __init__(
        self,
        row_bytes: int,
        sequences: int,
        count: int,
        context: int,
        device: torch.device,
        host: Tensor,
    ) -> None:
        self.device, self.sequences, self.count = device, sequences, count
        self.context, self.pages = context, -(-(context + 1) // PAGE)
        entry = Entry((Field("bytes", (row_bytes,), DType.UINT8),))
        pool = PoolSpec("rows", (0,), entry, selected=count, hot=2 * count)
        self.pool, self.ops = pool, choose(False, device)
        self.buffers = HotBuffers(
            pool, HotShape.of(pool, PAGE, sequences, self.pages), PAGE, device
        )
        alone = replace(pool, hot=None, selected=None)
        memory = ModelMemory("rows", PAGE, (alone,), 1)
        each = pool.row_bytes(PAGE)
        self.slots = min(sequences * self.pages, host.numel() // each)
        arrangement = Arrangement(memory, {"rows": self.slots}, Layout.LAYER_FIRST)
        pools = hot_pools({"rows": self.buffers}, Buffers(arrangement, host))
        self.hot: HotPool = pools["rows"]

    def run(self) -> ForwardPass:
        """A step in which every sequence has one new token."""
        numbers = torch.arange(self.sequences * self.pages).view(self.sequences, -1)
        host = numbers % self.slots
        rows = []
        for row in range(self.sequences):
            tables = {
                "rows": torch.from_numpy(self.buffers.ring_table(row, self.pages)).long(),
                host_table("rows"): host[row],
                HOT_ROWS: torch.full((self.pages,), row),
            }
            on_device = {name: table.to(self.device) for name, table in tables.items()}
            rows.append(Rows(row, row + 1, self.context, on_device))
        at = torch.full((self.sequences,), self.context, device=self.device)
        step = Step(
            *(at, at, tuple(rows), PAGE, lambda *_: self.buffers.view, lambda _: None),
            Batch.of(rows, self.device),
            {"rows": self.hot},
        )
        return ForwardPass(step)

    def choices(self, rounds: int) -> list[Tensor]:
        """(sequences, count) for every round: no entry is chosen in two of them."""
        assert rounds * self.count <= self.context, "the history is too short"
        random = torch.Generator().manual_seed(5)
        order = [
            torch.randperm(self.context, generator=random)[: rounds * self.count]
            for _ in range(self.sequences)
        ]
        parts = torch.stack(order).int().view(self.sequences, rounds, self.count)
        return [parts[:, number].contiguous().to(self.device) for number in range(rounds)]

    def swap_s(self, choices: Sequence[Tensor]) -> float:
        """Seconds of a swap-in, of these choices in turn."""
        runs = [self.run() for _ in choices]
        place = Place(self.pool, 0)
        selections = [self._selection(*both) for both in zip(runs, choices, strict=True)]

        def swap() -> None:
            for run, selection in zip(runs, selections, strict=True):
                self.hot.clock.add_(1)
                # What kernels of a pass leave for each other is anew in every pass.
                self.ops.swap_in(ForwardPass(run.step), place, selection)

        return repeated_s(swap, self.device) / len(choices)

    def _selection(self, run: ForwardPass, selected: Tensor) -> list[Tensor]:
        if self.ops.uses_kernels:
            return [selected]
        entries = torch.arange(self.context + 1)
        return [torch.isin(entries, selected[rows.start])[None] for rows in run.sequences]

    def copy_s(self, choices: Sequence[Tensor]) -> float:
        """Seconds of the copies of a swap-in, without its plan."""
        moves = [self._move(selected) for selected in choices]

        def copy() -> None:
            for move in moves:
                move()

        return repeated_s(copy, self.device) / len(choices)

    def _move(self, selected: Tensor) -> Callable[[], object]:
        run = self.run()
        host = torch.stack([rows.slots[host_table("rows")] for rows in run.sequences])
        entries = selected.long()
        sources = (host.gather(1, entries // PAGE) * PAGE + entries % PAGE).flatten().int()
        if not self.ops.uses_kernels:
            size = self.pool.entry.bytes
            rows = self.hot.host_rows(0)[:, : PAGE * size].reshape(-1, size)
            return lambda: rows[sources.long()]
        row_entries = self.hot.row_pages * PAGE
        targets = torch.arange(self.sequences, device=self.device)[:, None] * row_entries
        targets = (targets + torch.arange(self.count, device=self.device)).flatten().int()
        # The kernels' module is there only where Triton is.
        call = import_module("kvtide.layers.kernels.swap_in")._Call(
            run, Place(self.pool, 0), self.hot, selected, torch.empty_like(selected)
        )
        scratch = call.scratch
        scratch.sources[: len(sources)] = sources
        scratch.targets[: len(targets)] = targets
        scratch.new_slots.fill_(-1)
        scratch.misses.fill_(len(sources))
        move: Callable[[], object] = call.move
        return move


def repeated_s(function: Callable[[], None], device: torch.device) -> float:
    """Median seconds of a call, as a CUDA graph where there is one."""
    if device.type != "cuda":
        return timed(function, device, 3)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function()
        function()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return timed(graph.replay, device, 20)


@contextmanager
def host_block(total_bytes: int, device: torch.device) -> Iterator[Tensor]:
    """Pinned where the device is a GPU."""
    arena = host_arena(total_bytes, pinned=device.type == "cuda")
    try:
        yield arena.data
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        arena.close()


def measure(
    row_bytes: int,
    rows: int,
    device: torch.device,
    host: Tensor,
    *,
    max_selected: int = 2048,
    context: int = 65_536,
) -> RowResult:
    """`rows` of this size, by sequences that select up to `max_selected` of them."""
    count = min(max_selected, rows)
    bed = RowBed(row_bytes, max(1, rows // count), count, context, device, host)
    choices = bed.choices(ROUNDS)
    swap_s = bed.swap_s(choices)
    floor_s = bed.swap_s([choices[0]] * ROUNDS)
    size = row_bytes * rows
    target = torch.empty(size, dtype=torch.uint8, device=device)
    memcpy_s = timed(lambda: target.copy_(host[:size], non_blocking=True), device)
    return RowResult(
        row_bytes,
        rows,
        copy_s=bed.copy_s(choices),
        swap_s=swap_s,
        floor_s=floor_s,
        memcpy_bytes_s=size / memcpy_s,
        limit_gb_s=LIMITS_GB_S.get(row_bytes, {}).get(rows),
    )


def read_bytes_s(
    row_bytes: int,
    rows: int,
    device: torch.device,
    host: Tensor,
    *,
    max_selected: int = 2048,
    context: int = 65_536,
) -> float:
    """Speed of the copies alone, of about so many rows."""
    count = max(1, min(max_selected, rows))
    bed = RowBed(row_bytes, max(1, round(rows / count)), count, context, device, host)
    copied = row_bytes * bed.sequences * count
    return copied / bed.copy_s(bed.choices(ROUNDS))
