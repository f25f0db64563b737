"""Estimates that clients see: what a prompt's token costs, and when to come again."""

from __future__ import annotations

import pytest

from kvtide.server.rate_estimate import RateEstimate


def test_only_steps_that_compute_prompts_say_what_a_prompts_token_costs() -> None:
    pace = RateEstimate()
    assert pace.saved_s(1000) == 0.0
    pace.stepped(512, 0.512, 1)
    pace.stepped(8, 4.0, 8)
    pace.stepped(20, 4.0, 0)
    assert pace.saved_s(1000) == pytest.approx(1.0)


def test_who_waits_is_told_to_come_when_those_before_are_done_and_idle_time_does_not_count() -> (
    None
):
    pace = RateEstimate()
    assert pace.retry_s(20) == 1
    for _ in range(100):
        pace.stepped(8, 0.5, 8)
        pace.ended()
    assert pace.retry_s(20) == 10
    assert pace.retry_s(1000) == 60
