"""Conversations whose prefix stays until the next turn, and requests that matter more."""

from __future__ import annotations

import pytest

from kvtide.cache import Tier
from tests.cache.building import Rig, text
from tests.cache.memories import PAGE, WINDOW, every_memory


def keep(rig: Rig, session: str, tokens: list[int]) -> bool:
    return rig.cache.sessions.keep(session, rig.cache.prompt(tokens))


def press(rig: Rig, number: int = 90, requests: int = 6) -> None:
    """Requests that never come twice, one after another, enough to fill the device."""
    for other in range(number, number + requests):
        lease = rig.begin(text(other, 5))
        if lease is not None:
            rig.compute(lease)
            rig.cache.release(lease)
        rig.settle()


@every_memory
def test_a_kept_session_survives_pressure_and_a_flush(build, memory):
    rig = build(memory, host={pool.name: 16 if pool.hot else 0 for pool in memory.anchors})
    rig.remember(text(1, 4))
    assert keep(rig, "a", text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 4 * PAGE
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.cache.flush(tier)
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 4 * PAGE and rig.misread(lease) == []


def test_pressure_takes_what_no_session_keeps(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 0


def test_a_forgotten_session_can_go(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    keep(rig, "a", text(1, 4))
    assert rig.cache.sessions.forget("a")
    assert not rig.cache.sessions.forget("a")
    press(rig)
    assert rig.found(text(1, 4)) == 0


def test_the_next_turn_takes_the_place_of_the_last(build):
    rig = build(host=0)
    rig.remember(text(1, 4))
    keep(rig, "a", text(1, 4))
    rig.remember(text(2, 4))
    keep(rig, "a", text(2, 4))
    assert rig.cache.stats().sessions.pinned == 1
    press(rig)
    assert rig.found(text(1, 4)) == 0
    assert rig.found(text(2, 4)) == 4 * PAGE


def test_a_session_whose_prefix_is_on_the_host_keeps_it_there(build):
    rig = build(device=8, host=8, session_share=1.0)
    rig.remember_on_host(text(1, 4))
    keep(rig, "a", text(1, 4))
    press(rig)
    assert rig.found(text(1, 4)) == 4 * PAGE
    lease = rig.started(text(1, 4))
    rig.settle()
    assert rig.misread(lease) == []


def test_a_session_that_was_kept_while_its_prefix_arrives_survives_the_landing(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 4))
    keep(rig, "a", text(1, 4))
    rig.settle()
    rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 4 * PAGE


def test_sessions_beyond_their_fraction_let_go_of_the_one_kept_longest_ago(build):
    rig = build(device=20, host=0, session_fraction=0.4)
    for number in (1, 2):
        rig.remember(text(number, 4))
        assert keep(rig, str(number), text(number, 4))
    assert keep(rig, "1", text(1, 4)), "the first is now the one kept last"
    rig.remember(text(3, 4))
    assert keep(rig, "3", text(3, 4))
    assert rig.cache.stats().sessions.pinned == 2
    rig.cache.flush(Tier.DEVICE)
    assert [rig.found(text(number, 4)) for number in (1, 2, 3)] == [4 * PAGE, 0, 4 * PAGE]


def test_of_a_session_that_is_larger_than_its_share_the_first_part_is_kept(build):
    rig = build(device=20, host=0, session_fraction=0.4)
    rig.remember(text(1, 4))
    rig.remember(text(2, 9))
    assert keep(rig, "small", text(1, 4))
    assert keep(rig, "large", text(2, 9))
    assert rig.cache.stats().sessions.pinned == 2
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 4 * PAGE
    assert rig.found(text(2, 9)) == 4 * PAGE


def test_a_window_counts_for_no_more_than_it_reaches_back(build):
    """Two sessions of 4 pages of history, and of 2 pages of window each."""
    rig = build(WINDOW, device={"kv": 16, "swa": 8}, host=0, session_fraction=0.5)
    for number in (1, 2):
        rig.remember(text(number, 4))
        assert keep(rig, str(number), text(number, 4))
    assert rig.cache.stats().sessions.pinned == 2


def test_with_a_fraction_of_zero_nothing_is_kept(build):
    rig = build(session_fraction=0.0)
    rig.remember(text(1, 4))
    assert not keep(rig, "a", text(1, 4))
    assert rig.cache.stats().sessions.pinned == 0


def test_sessions_never_keep_a_request_out_for_good(build):
    rig = build(device=16, host=0, session_fraction=0.5)
    for number in range(1, 5):
        rig.remember(text(number, 4))
        keep(rig, str(number), text(number, 4))
    assert rig.begin(text(9, 7)) is not None


def test_closing_lets_all_sessions_go(build):
    rig = build()
    rig.remember(text(1, 4))
    keep(rig, "a", text(1, 4))
    rig.settle()
    rig.cache.close()
    assert rig.cache.stats().sessions.pinned == 0


@pytest.mark.parametrize("important", [1, 2])
def test_pages_of_high_priority_outlive_those_of_low(build, important):
    rig = build(device=10, host=0, eviction="priority")
    for number in (1, 2):
        rig.remember(text(number, 4), priority=int(number == important))
    assert rig.begin(text(3, 4)) is not None
    assert rig.found(text(important, 4)) == 4 * PAGE
    assert rig.found(text(3 - important, 4)) < 4 * PAGE


def test_a_session_raises_the_priority_of_what_it_keeps(build):
    rig = build(device=10, host=0, eviction="priority", session_share=1.0)
    for number in (1, 2):
        rig.remember(text(number, 4))
    rig.cache.sessions.keep("a", rig.cache.prompt(text(1, 4)), priority=3)
    rig.cache.sessions.forget("a")
    rig.remember(text(2, 4))
    assert rig.begin(text(3, 4)) is not None
    assert rig.found(text(1, 4)) == 4 * PAGE
