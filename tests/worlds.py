"""Worlds: ranks in processes of their own, over gloo, that play scenarios together.

Processes are slow to start, so a world is started once and plays all scenarios that the run
selects; each is a test of its own. Ranks are forked from a server that has imported torch. A rank
that fails leaves, the others lose their connection to it. A world in which no scenario ends for
`STALLED_S` is killed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import pytest  # Ranks do without it.

GROUP_TIMEOUT = timedelta(seconds=120)
STALLED_S = 300.0
"""Longer than any scenario takes on a machine with ten times as much to do as it has cores."""

PRELOADED = ["tests.worlds", "tests.grids", "kvtide.cache", "kvtide.engine", "kvtide.models"]
"""What every rank imports."""
SERVING = ["tests.server.forking", "kvtide.cli.serve_command"]
"""What every server that is forked imports."""

Report = Mapping[str, tuple[str | None, float]]
"""A rank's report on each scenario: the problem, if any, and the seconds it took."""
END = "end"
"""In the place of a scenario: how the rank's process ended, and after how long."""


class World:
    """This rank among the others. `folder` is known to all."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.odd_one = rank == ranks - 1

    def gather(self, value: object) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def same(self, value: object) -> None:
        """Assert that every rank came here with the same value."""
        digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
        seen = torch.tensor([digest, -digest])
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if seen.sum():
            raise AssertionError("ranks differ:\n" + "\n".join(map(repr, self.gather(value))))


Scenario = Callable[[Any], None]
Kind = Callable[[int, int, Path], World]


def forkserver() -> ForkServerContext:
    """Its processes are forked from one that has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *SERVING])
    return context


def play(
    ranks: int, folder: Path, scenarios: Mapping[str, Scenario], kind: Kind = World
) -> list[Report]:
    """Start a world, play all scenarios, and read the ranks' reports."""
    context = forkserver()
    workers = [
        context.Process(target=_work, args=(rank, ranks, folder, scenarios, kind), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    began = time.monotonic()
    reports: list[Report] = []
    _wait(workers, [folder / f"rank{rank}" for rank in range(ranks)])
    for rank, worker in enumerate(workers):
        if worker.is_alive():
            worker.kill()
            worker.join()
        end = f"exit code {worker.exitcode}", time.monotonic() - began
        reports.append({END: end, **_read(folder / f"rank{rank}")})
    return reports


def _wait(workers: Sequence[BaseProcess], reports: Sequence[Path]) -> None:
    """Until all ranks have ended, or none has reported a scenario for too long."""
    seen, changed = -1, time.monotonic()
    while any(worker.is_alive() for worker in workers):
        size = sum(report.stat().st_size for report in reports if report.exists())
        if size != seen:
            seen, changed = size, time.monotonic()
        if time.monotonic() - changed > STALLED_S:
            return
        for worker in workers:
            worker.join(0.1)


def cells(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The cells of a module's grids that this run selects: a world plays no other scenarios."""
    return [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]


def check(reports: list[Report], scenario: str) -> None:
    """Assert that no rank reports a problem."""
    missing = "did not get here: {} after {:.0f} s".format
    problems = {
        rank: report[scenario][0] if scenario in report else missing(*report[END])
        for rank, report in enumerate(reports)
    }
    wrong = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    assert not wrong, "\n".join(wrong)


def _read(report: Path) -> Report:
    lines = report.read_text().splitlines() if report.exists() else []
    return {name: (problem, seconds) for name, problem, seconds in map(json.loads, lines)}


def _work(
    rank: int, ranks: int, folder: Path, scenarios: Mapping[str, Scenario], kind: Kind
) -> None:
    """Play scenario after scenario; each has a line in the rank's report."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=ranks,
        timeout=GROUP_TIMEOUT,
    )
    world = kind(rank, ranks, folder)
    with (folder / f"rank{rank}").open("w") as report:
        for name, scenario in scenarios.items():
            began, problem = time.monotonic(), None
            try:
                scenario(world)
            except Exception:
                problem = traceback.format_exc()
            seconds = time.monotonic() - began
            print(json.dumps([name, problem, seconds]), file=report, flush=True)
            if problem is not None:
                # The closed connection ends the other ranks too.
                raise SystemExit(1)
    dist.barrier()
    dist.destroy_process_group()
