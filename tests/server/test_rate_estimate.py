"""Estimates that clients see: what a prompt's token costs, and when to come again."""

from __future__ import annotations

import pytest

from kvtide.server.rate_estimate import RateEstimate


def test_only_steps_that_compute_prompts_say_what_a_prompts_token_costs() -> None:
    rate = RateEstimate()
    assert rate.saved_s(1000) == 0.0
    rate.stepped(512, 0.512, 1)
    rate.stepped(8, 4.0, 8)
    rate.stepped(20, 4.0, 0)
    assert rate.saved_s(1000) == pytest.approx(1.0)


def test_the_retry_time_is_the_time_of_the_queue_and_idle_time_does_not_count() -> None:
    rate = RateEstimate()
    assert rate.retry_s(20) == 1
    for _ in range(100):
        rate.stepped(8, 0.5, 8)
        rate.finished()
    assert rate.retry_s(20) == 10
    assert rate.retry_s(1000) == 60
