"""Ranks in processes of their own, over gloo, stay together whatever happens to one of them.

Processes are slow to start, so each world is started once and plays all scenarios of `rank_worker`
and `rank_storage`; every scenario is a test here. A rank that fails leaves, the others lose their
connection to it, and what did not end in time is ended: nothing here waits for ever.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from kvtide.cache import CacheConfig, Tier, TieredCache, Tokens
from kvtide.cache.ranks import Alone
from tests.cache.rank_stand import PAGE, WHOLE
from tests.cache.rank_storage import SCENARIOS as WITH_STORAGE
from tests.cache.rank_worker import SCENARIOS, work

WORLD_TIMEOUT_S = 120.0
PLAYED = {**WITH_STORAGE, **SCENARIOS}
"""Those that break the connection between ranks come last."""

Report = Mapping[str, tuple[str | None, float]]
"""What a rank says of each scenario it played: what went wrong, and how long it took."""


def play(ranks: int, folder: Path) -> list[Report]:
    """Start a world, let it play everything, and read what each rank has to say."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank, ranks, folder, PLAYED), daemon=True)
               for rank in range(ranks)]  # fmt: skip
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    return [_read(folder / f"rank{rank}") for rank in range(ranks)]


def _read(report: Path) -> Report:
    lines = report.read_text().splitlines() if report.exists() else []
    return {name: (problem, seconds) for name, problem, seconds in map(json.loads, lines)}


@pytest.fixture(scope="module", params=(2, 4), ids=("2 ranks", "4 ranks"))
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Report]:
    return play(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", PLAYED)
def test_ranks(reports: list[Report], scenario: str) -> None:
    problems = {
        rank: report[scenario][0] if scenario in report else "did not get here"
        for rank, report in enumerate(reports)
    }
    wrong = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    assert not wrong, "\n".join(wrong)


def test_one_rank_communicates_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a rank that is alone has nobody to talk to")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    assert not dist.is_initialized()
    cache = TieredCache(WHOLE, CacheConfig(Tokens(16 * PAGE)))
    lease = cache.reserve(cache.match(cache.prompt(range(4 * PAGE + 1))))
    assert lease is not None
    cache.commit(lease, 4 * PAGE)
    cache.release(lease)
    assert cache.drain(10.0)
    cache.flush(Tier.DEVICE)
    again = cache.reserve(cache.match(lease.prompt))
    assert again is not None and again.by_tier == {Tier.HOST: 4 * PAGE}
    cache.load(again)
    assert cache.drain(10.0) and not again.failed
    cache.close()
    assert not dist.is_initialized()


def test_alone_everything_is_agreed() -> None:
    values = list(range(1000))
    assert Alone().least(values) == values
