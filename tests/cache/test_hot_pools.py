"""Pools whose pages are at home on the host: who may write and read these, and when; and rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from kvtide.cache import FetchPatience, Lease
from kvtide.cache.fetching import Stage
from kvtide.spec import ALL, ModelMemory, Tier
from kvtide.storage import open_store
from kvtide.transfer.strided import Way
from tests.cache.building import Rig, page_names, text
from tests.cache.late_device import LateDevice
from tests.cache.memories import ALL_MEMORIES, HOT, HOT_V4, PAGE
from tests.cache.stores import (
    begun,
    faulty,
    in_store,
    new_url,
    opened,
    readable,
    settle,
    stored,
    until,
)
from tests.cache.test_storage_traffic import StoredTraffic, play

HOT_MEMORIES = {name: memory for name, memory in ALL_MEMORIES.items() if memory.hot_pools}
every_hot_memory = pytest.mark.parametrize("memory", HOT_MEMORIES.values(), ids=HOT_MEMORIES)


def hot_pool(memory: ModelMemory) -> str:
    (pool,) = memory.hot_pools
    return pool.name


# -- what a store writes was computed -------------------------------------------------------


def by_commit(rig: Rig, lease: Lease) -> None:
    """write_through: the commit has begun the backup."""


def by_second_prompt(rig: Rig, lease: Lease) -> None:
    rig.cache.release(rig.started(text(1, 5)))


def by_pressure(rig: Rig, lease: Lease) -> None:
    rig.cache.release(lease)
    wanted = {pool.name: 100 for pool in rig.memory.anchors if not pool.hot}
    rig.cache._writing.make_room(wanted)


BEGINNINGS = {
    "write_through": by_commit,
    "write_through_selective": by_second_prompt,
    "write_back": by_pressure,
}


@pytest.mark.parametrize("policy", BEGINNINGS)
@every_hot_memory
def test_hot_pages_are_stored_when_the_device_has_computed_them(
    url: str, rigs: list[Rig], memory: ModelMemory, policy: str
) -> None:
    rig = opened(rigs, url, memory, write_policy=policy)
    device, name = LateDevice(rig), hot_pool(memory)
    lease = rig.started(text(1, 4))
    rig.compute(lease)
    BEGINNINGS[policy](rig, lease)
    for _ in range(20):
        rig.cache.poll()
        rig.hands[Way.BACKUP].run()
        time.sleep(0.001)
    assert device.behind and not rig.cache.index.tree.departures
    assert not any(in_store(rig, url, text(1, 4), name))
    settle(rig)
    for _ in range(2):  # A demotion takes the ends of paths, and the rest when these have landed.
        BEGINNINGS[policy](rig, lease)
        settle(rig)
    whole = len(page_names(lease.prompt))
    assert in_store(rig, url, text(1, 4), name) == [True] * whole
    rig.cache.release(lease)
    other = opened(rigs, url, memory)
    begun(other, text(1, 4))
    settle(other)
    assert readable(other, text(1, 4)) == whole * PAGE


@every_hot_memory
def test_hot_pages_alone_are_stored_too_and_behind_the_step_that_computed_them(
    url: str, rigs: list[Rig], memory: ModelMemory
) -> None:
    """The host has copies of the other histories by then: nothing of them is copied."""
    rig, name = opened(rigs, url, memory), hot_pool(memory)
    stored(rig, text(1, 4))
    open_store(url, rig.cache.storage.space).clear()
    rig.cache.index.evict(Tier.HOST, name, 100)
    moved = rig.cache.stats().moved_pages["backup"]
    device = LateDevice(rig)
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 0
    rig.compute(lease)
    for _ in range(20):
        rig.cache.poll()
        rig.hands[Way.BACKUP].run()
        time.sleep(0.001)
    assert device.behind and not any(in_store(rig, url, text(1, 4), name))
    settle(rig)
    assert all(in_store(rig, url, text(1, 4), name))
    windows = sum(pool.reuse.reach is not ALL for pool in memory.anchors)
    assert rig.cache.stats().moved_pages["backup"] == moved + windows, "they went with the history"


def test_without_a_policy_nothing_is_stored(url: str, rigs: list[Rig]) -> None:
    rig = opened(rigs, url, HOT, write_policy="none")
    stored(rig, text(1, 4))
    assert not any(in_store(rig, url, text(1, 4)))


def test_without_a_store_hot_pages_cost_no_transfer(build: Callable[..., Rig]) -> None:
    rig = build(HOT)
    rig.remember(text(1, 4))
    rig.settle()
    before = rig.cache.stats().transfers
    rig.cache.index.evict(Tier.HOST, "kv", 100)
    rig.remember(text(1, 4))
    rig.settle()
    assert rig.cache.stats().transfers == before


# -- where a fetch writes, no step writes ---------------------------------------------------


def taken_over(rigs: list[Rig], url: str, memory: ModelMemory, **options: object) -> Rig:
    """A rig whose device has yet to write to host slots that a fetch will take."""
    stored(opened(rigs, url, memory), text(1, 4))
    rig = opened(rigs, url, memory, host=9, **options)
    LateDevice(rig)
    lease = rig.started(text(2, 8))
    rig.write(lease, 0, len(page_names(lease.prompt)))
    rig.cache.release(lease)
    return rig


@every_hot_memory
def test_a_fetch_reads_into_hot_slots_when_the_device_is_done_with_them(
    url: str, rigs: list[Rig], memory: ModelMemory
) -> None:
    rig = taken_over(rigs, url, memory)
    fetch = begun(rig, text(1, 4))
    until(lambda: rig.cache.poll() is not None and fetch.stage is Stage.READING)
    time.sleep(0.02)
    rig.cache.poll()
    assert fetch.stage is Stage.READING and faulty(rig).calls["read"] == 0
    settle(rig)
    assert fetch.outcome == "fetched"
    assert readable(rig, text(1, 4)) == fetch.tokens > 0


def test_a_fetch_that_may_not_begin_in_time_ends_and_gives_its_slots_back(
    url: str, rigs: list[Rig]
) -> None:
    patience = FetchPatience("timeout", base_s=0.05, per_1k_s=0.0, min_tokens=1)
    rig = taken_over(rigs, url, HOT, patience=patience)
    free = rig.cache.index.free_pages(Tier.HOST, "kv")
    fetch = begun(rig, text(1, 4))
    until(lambda: rig.cache.poll() is not None and not rig.cache.storage.at_work)
    assert fetch.outcome == "late" and faulty(rig).calls["read"] == 0
    assert rig.cache.index.free_pages(Tier.HOST, "kv") == free


def test_other_memories_wait_for_nothing(url: str, rigs: list[Rig]) -> None:
    rig = taken_over(rigs, url, ALL_MEMORIES["full"])
    fetch = begun(rig, text(1, 4))
    until(lambda: rig.cache.poll() is not None and not rig.cache.storage.at_work)
    assert fetch.outcome == "fetched"


# -- everything at once, over a device that is behind ----------------------------------------


class LateTraffic(StoredTraffic):
    """Bytes are judged when the device has done all; until then the trees are."""

    def __init__(self, memory: ModelMemory, write_policy: str, seed: int) -> None:
        super().__init__(memory, write_policy, seed, (new_url(),))
        self.device = LateDevice(self.rig)

    def verbs(self) -> dict[Callable[[], None], float]:
        return {**super().verbs(), self.work: 25 * self.device.behind}

    def work(self) -> None:
        self.device.work()

    def problems(self) -> list[str]:
        return self.cache.validate() if self.device.behind else super().problems()

    def end(self) -> None:
        self.work()
        super().end()


@pytest.mark.quick
@pytest.mark.parametrize("policy", BEGINNINGS)
@pytest.mark.parametrize("name", [*HOT_MEMORIES, "v4_drafted"])
def test_everything_in_any_order_over_a_device_that_is_behind(name: str, policy: str) -> None:
    for seed in range(2):
        play([LateTraffic(ALL_MEMORIES[name], policy, seed)], 250, seed)


# -- rows -----------------------------------------------------------------------------------


def test_a_request_without_a_free_row_waits_and_evicts_nothing(build: Callable[..., Rig]) -> None:
    rig = build(HOT, hot_rows=1, device=8, host=16)
    rig.remember_on_host(text(3, 3))
    rig.remember(text(1, 6))
    rig.settle()
    first = rig.started(text(2, 1))
    kept = rig.cache.stats().pages
    assert rig.begin(text(3, 3)) is None and rig.cache.hot_row(first) == 0
    assert rig.cache.stats().pages == kept and not rig.cache.busy
    assert rig.cache.stats().refused == 1
    rig.cache.release(first)
    second = rig.started(text(3, 3))
    assert rig.cache.hot_row(second) == 0 and second.cached_tokens == 3 * PAGE


def test_sessions_fetches_and_prefetches_need_no_row(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url, HOT), text(2, 4))
    rig = opened(rigs, url, HOT, hot_rows=1)
    stored(rig, text(1, 4))
    lease = rig.started(text(1, 4))
    assert rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)))
    fetch = begun(rig, text(2, 4))
    settle(rig)
    assert fetch.outcome == "fetched" and rig.cache.prefetch(rig.cache.prompt(text(2, 4)))
    rig.settle()
    assert rig.cache.index.hot_rows == (1, 1)
    rig.cache.release(lease)
    assert rig.cache.index.hot_rows == (0, 1)


def test_no_row_is_lost_over_thousands_of_requests_however_they_end(
    build: Callable[..., Rig],
) -> None:
    rig, chance = build(HOT_V4, hot_rows=4, device=24, host=40), random.Random(7)
    running: list[Lease] = []
    refused = 0
    for number in range(3000):
        lease = rig.begin(text(chance.randrange(12), chance.randrange(1, 7)))
        refused += lease is None
        if lease is not None:
            running.append(lease)
            if chance.random() < 0.5 and not lease.loading:
                rig.compute(lease)
        rows = [rig.cache.hot_row(lease) for lease in running]
        assert sorted(set(rows)) == sorted(rows) and rig.cache.index.hot_rows == (len(rows), 4)
        if chance.random() < 0.1 and rig.hands[Way.LOAD].jobs:
            rig.hands[Way.LOAD].run_raising()
        if number % 5 == 0:
            rig.settle()
            rig.cache.flush(Tier.DEVICE)
        while running and chance.random() < 0.55:
            rig.cache.release(running.pop(chance.randrange(len(running))))
    assert refused > 100 and rig.problems() == []
    assert rig.cache.stats().transfers["load", "failed"] > 10
