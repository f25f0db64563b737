"""What finished requests leave: the time that the cache saved, and when a tick was."""

from __future__ import annotations

import pytest

from kvtide.server.live.finished import MAX_TICKS, SavedTime, TickTimes
from kvtide.server.rate_estimate import RateEstimate


def test_a_token_saves_the_prefill_time_of_its_moment() -> None:
    rate = RateEstimate()
    saved = SavedTime(rate)
    rate.stepped(100, 1.0, 0)
    saved.add(50)
    assert (saved.tokens, saved.seconds) == (50, pytest.approx(0.5))
    rate.stepped(100_000, 100.0, 0)  # Ten times faster from now on.
    saved.add(50)
    assert saved.seconds == pytest.approx(0.5 + rate.saved_s(50))
    assert rate.saved_s(50) < 0.06


def test_tokens_before_the_first_prefill_wait_for_its_rate() -> None:
    rate = RateEstimate()
    saved = SavedTime(rate)
    saved.add(50)
    assert (saved.tokens, saved.seconds) == (50, 0.0)
    rate.stepped(100, 1.0, 0)
    assert saved.seconds == pytest.approx(0.5)
    rate.stepped(100_000, 100.0, 0)
    assert saved.seconds == pytest.approx(0.5)


def test_a_tick_was_no_later_than_reported() -> None:
    now = 0.0
    ticks = TickTimes(lambda: now)
    assert ticks.time_of(3) is None
    for tick in range(0, 100, 10):
        now = float(tick)
        ticks.note(tick)
    assert [ticks.time_of(tick) for tick in (0, 1, 10, 55)] == [0.0, 10.0, 10.0, 60.0]
    assert ticks.time_of(91) is None


def test_many_ticks_are_remembered_in_fewer() -> None:
    now = 0.0
    ticks = TickTimes(lambda: now)
    for tick in range(10 * MAX_TICKS):
        now = float(tick)
        ticks.note(tick)
    assert len(ticks._ticks) <= MAX_TICKS + 1
    for tick in range(0, 9 * MAX_TICKS, 777):
        found = ticks.time_of(tick)
        assert found is not None and tick <= found <= tick + 64
