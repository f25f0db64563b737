"""Ranks in processes of their own, over gloo, stay together whatever happens to one of them.

A world plays all scenarios of `rank_worker` and `rank_storage`; every scenario is a test here.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from kvtide.cache import CacheConfig, Tier, TieredCache, Tokens
from kvtide.cache.rank_agreement import Alone
from tests.cache.rank_stand import PAGE, WHOLE, World
from tests.cache.rank_storage import SCENARIOS as WITH_STORAGE
from tests.cache.rank_worker import SCENARIOS
from tests.worlds import Report, cells, check, play

PLAYED = {**WITH_STORAGE, **SCENARIOS}
"""Those that break the connection between ranks come last."""


@pytest.fixture(
    scope="module", params=(2, pytest.param(4, marks=pytest.mark.full)), ids=("2 ranks", "4 ranks")
)
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Report]:
    names = {cell["scenario"] for cell in cells(request) if cell["reports"] == request.param}
    scenarios = {name: scenario for name, scenario in PLAYED.items() if name in names}
    return play(request.param, tmp_path_factory.mktemp("ranks"), scenarios, World)


@pytest.mark.quick
@pytest.mark.parametrize("scenario", PLAYED)
def test_ranks(reports: list[Report], scenario: str) -> None:
    check(reports, scenario)


def test_one_rank_communicates_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a rank that is alone has no group")

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
    assert Alone().all_min(values) == values
