"""Prefixes that are brought up from storage and host before a request needs them."""

from __future__ import annotations

import pytest

from kvtide.cache import Namespace, Prefetched, SessionTurn, Tier
from kvtide.cache.sessions import prefetching
from kvtide.testing.faulty_store import Fault
from tests.cache.building import Rig, text
from tests.cache.memories import PAGE, every_memory
from tests.cache.stores import faulty, opened, settle, until


def begin(rig: Rig, tokens: list[int], turn: SessionTurn | None = None):
    return rig.cache.prefetches.begin(rig.cache.prompt(tokens), 60.0, turn)


def finished(rig: Rig, prefetch) -> Prefetched:
    """Poll as an engine does, until it is over."""

    def over() -> bool:
        rig.settle()
        assert rig.problems() == []
        return prefetch.over

    until(over)
    return prefetch.result.result(0)


@every_memory
def test_a_prefix_comes_from_the_host_to_the_device(build, memory):
    rig = build(memory, device=16, host=32)
    rig.remember_on_host(text(1, 4)) if not memory.hot_pools else rig.remember(text(1, 4))
    reached = finished(rig, begin(rig, text(1, 4)))
    assert reached.tokens == 4 * PAGE and reached.outcome == "loaded"
    assert reached.by_tier[Tier.STORAGE] == 0
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 4 * PAGE and not lease.loading and rig.misread(lease) == []


def test_a_prefix_comes_from_storage_to_the_device(url, rigs):
    first = opened(rigs, url)
    first.remember(text(1, 6))
    settle(first)
    rig = opened(rigs, url)
    prefetch = begin(rig, text(1, 6))
    assert rig.cache.unsettled, "an engine that is idle goes on polling"
    reached = finished(rig, prefetch)
    assert reached == Prefetched(
        6 * PAGE, {Tier.DEVICE: 6 * PAGE, Tier.STORAGE: 0}, 6 * PAGE, "loaded"
    )
    assert not rig.cache.unsettled
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 6))) is None, "nothing left to fetch"


def test_nothing_to_bring_is_over_with_the_next_poll(build):
    rig = build()
    reached = finished(rig, begin(rig, text(1, 4)))
    assert reached.tokens == 0 and reached.outcome == "loaded"


def test_a_prefetch_evicts_what_nothing_holds_and_takes_no_slot_of_a_request(build):
    rig = build(device=8, host=32)
    rig.remember_on_host(text(1, 4))
    rig.remember(text(2, 4))
    running = rig.started(text(3, 3))
    rig.settle()
    reached = finished(rig, begin(rig, text(1, 4)))
    assert reached.by_tier[Tier.DEVICE] == 4 * PAGE
    rig.compute(running)
    assert rig.misread(running) == []


def test_without_slots_the_prefix_stays_on_the_host(build):
    rig = build(device=8, host=32)
    rig.remember_on_host(text(1, 4))
    rig.started(text(3, 6))
    reached = finished(rig, begin(rig, text(1, 4)))
    assert reached.outcome == "no_room"
    assert reached.by_tier == {Tier.HOST: 4 * PAGE, Tier.STORAGE: 0}


def test_with_write_back_a_prefetch_waits_for_pages_that_leave(build):
    rig = build(device=8, host=32, write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 4))
    while (lease := rig.begin(text(2, 7, extra=0))) is None:
        rig.settle()
    rig.settle()
    rig.compute(lease)
    rig.cache.release(lease)
    assert rig.found(text(1, 4), Tier.DEVICE) < 4 * PAGE
    reached = finished(rig, begin(rig, text(1, 4)))
    assert reached.outcome == "loaded" and reached.by_tier[Tier.DEVICE] == 4 * PAGE


def test_a_load_that_fails_leaves_the_prefix_on_the_host(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    prefetch = begin(rig, text(1, 4))
    rig.cache.poll()
    (lane,) = (lane for lane in rig.hands.values() if lane.jobs)
    lane.run_raising()
    reached = finished(rig, prefetch)
    assert reached.outcome == "failed" and reached.by_tier[Tier.HOST] == 4 * PAGE


def test_a_prefetch_that_is_ended_says_how_far_it_came(url, rigs):
    first = opened(rigs, url)
    first.remember(text(1, 6))
    settle(first)
    rig = opened(rigs, url)
    faulty(rig).always["read"] = Fault.BLOCK
    prefetch = begin(rig, text(1, 6))
    until(lambda: rig.cache.poll() is not None and prefetch.fetch.found > 0)
    rig.cache.prefetches.end(prefetch)
    assert prefetch.result.result(0) == Prefetched(0, {Tier.STORAGE: 6 * PAGE}, 0, "ended")
    rig.cache.prefetches.end(prefetch)
    assert rig.cache.stats().prefetches == {"ended": 1}


def test_a_session_pins_what_was_brought(build):
    rig = build(host=16)
    rig.remember_on_host(text(1, 4))
    finished(rig, begin(rig, text(1, 4), SessionTurn("a", 0, 10.0)))
    assert rig.cache.stats().sessions.pages == {(Tier.DEVICE, "kv"): 4}
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.cache.flush(tier)
    assert rig.found(text(1, 4), Tier.DEVICE) == 4 * PAGE
    rig.cache.sessions.tick(10.0)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 0


def test_a_turn_that_came_meanwhile_keeps_its_pin(build):
    rig = build(host=16)
    rig.remember_on_host(text(1, 4))
    rig.remember(text(2, 3))
    prefetch = begin(rig, text(1, 4), SessionTurn("a"))
    rig.cache.sessions.asked("a", rig.cache.prompt(text(2, 3)))
    rig.cache.sessions.keep("a", rig.cache.prompt(text(2, 3)))
    finished(rig, prefetch)
    assert rig.cache.sessions.prompt_of("a").tokens == 3 * PAGE + 1


def test_so_many_prefetches_may_be_open_and_no_more(build, monkeypatch):
    monkeypatch.setattr(prefetching, "MAX_PREFETCHES", 2)
    rig = build()
    rig.remember_on_host(text(1, 4))
    both = [begin(rig, text(1, 4)) for _ in range(2)]
    assert begin(rig, text(1, 4)) is None
    for prefetch in both:
        finished(rig, prefetch)
    assert begin(rig, text(1, 4)) is not None
    rig.cache.prefetches.end_all()


def test_a_namespace_has_its_own_prefix(build):
    rig = build(host=16)
    rig.remember_on_host(text(1, 4))
    other = rig.cache.prompt(text(1, 4), Namespace(cache_salt="b"))
    assert finished(rig, rig.cache.prefetches.begin(other, 1.0)).tokens == 0


def test_scratch_prompts_have_nothing_to_prefetch(build):
    rig = build()
    with pytest.raises(AssertionError, match="no prefix"):
        rig.cache.prefetches.begin(rig.cache.scratch(text(1, 4)), 1.0)
