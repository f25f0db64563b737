"""What is learned of how soon pages are used again."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.index.evict.reuse_rates import CLASSES, COHORTS, ReuseRates

TICKS = 4
"""Between two requests."""


def _learned(requests: int, again: int, life: int) -> ReuseRates:
    """Each request has 10 pages that never come back and 10 that do, every `again` requests."""
    rates = ReuseRates()
    for number in range(1, requests + 1):
        tick = number * TICKS
        rates.begin_request(tick)
        rates.note_life(life)
        rates.count(0, tick, 10)
        if number <= again:
            rates.count(1, tick, 10)
        else:
            rates.count_reuse(min(number // again, CLASSES), tick - again * TICKS, 10)
    return rates


def test_pages_that_come_back_are_worth_more_the_closer_their_use() -> None:
    rates = _learned(800, 20, 200)
    returning = [rates.worth(CLASSES - 1, rates.now - age) for age in (8, 40, 60)]
    assert returning == sorted(returning)
    assert rates.worth(0, rates.now - 8) < returning[0] / 5


def test_a_class_that_is_worth_less_goes_sooner_than_the_one_that_is_worth_most() -> None:
    rates = _learned(800, 20, 200)
    ages = rates.even_ages(60, 0.7)
    assert ages[-1] == 60 and ages[0] < 20


def test_all_classes_go_at_one_age_before_anything_is_learned() -> None:
    rates = ReuseRates()
    rates.begin_request(1)
    assert rates.even_ages(50, 0.7) == [50] * CLASSES


@pytest.mark.parametrize("life", [100, 100_000])
def test_cohorts_reach_back_for_several_lives(life: int) -> None:
    """So pages are seen that come back later than `COHORTS` first cohorts reach."""
    again = 3000
    rates = _learned(4 * again, again, life)
    beyond = 2 * again * TICKS > COHORTS * 64
    assert beyond
    seen = rates.worth(CLASSES - 1, rates.now - (again - 100) * TICKS)
    unseen = rates.worth(0, rates.now - (again - 100) * TICKS)
    assert (seen > 2 * unseen) is (life > again)


def test_uses_before_the_oldest_cohort_are_forgotten() -> None:
    rates = _learned(6000, 20, 100)
    assert rates.same_cohort(0, 63) and not rates.same_cohort(0, 1 << 12)
    rates.count_reuse(1, 1, 1_000_000)
    before = rates.worth(1, rates.now - 100)
    for number in range(6001, 6600):
        rates.begin_request(number * TICKS)
    assert rates.worth(1, rates.now - 100) <= before + 1e-3


def test_requests_without_a_whole_page_teach_nothing() -> None:
    rates = ReuseRates()
    with np.errstate(all="raise"):
        for tick in range(1, 200):
            rates.begin_request(tick)
    assert rates.even_ages(50, 0.7) == [50] * CLASSES
