"""A store that fails is left alone, asked once in a while, and used again when it answers."""

from __future__ import annotations

from kvtide.transfer.breaker import MAX_FAILURES, REST_S, Breaker
from tests.transfer.stores import Clock


def _opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        assert breaker.allows()
        breaker.failed()
    return breaker, clock


def test_it_opens_after_failures_in_a_row() -> None:
    breaker, _ = _opened()
    assert breaker.open and not breaker.allows() and breaker.trips == 1


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(Clock())
    for _ in range(3 * MAX_FAILURES):
        breaker.failed()
        breaker.succeeded()
    assert not breaker.open and breaker.allows() and breaker.trips == 0


def test_after_a_rest_one_call_goes_through_and_the_others_wait_for_it() -> None:
    breaker, clock = _opened()
    clock.now += REST_S
    assert not breaker.open, "asking has a point again"
    assert breaker.allows() and not breaker.allows()
    assert breaker.open


def test_asking_whether_it_is_open_uses_up_no_probe() -> None:
    breaker, clock = _opened()
    clock.now += REST_S
    assert not any(breaker.open for _ in range(5))
    assert breaker.allows()


def test_a_probe_that_fails_begins_another_rest() -> None:
    breaker, clock = _opened()
    clock.now += REST_S
    assert breaker.allows()
    clock.now += REST_S / 2
    breaker.failed()
    clock.now += REST_S * 0.9
    assert breaker.open and not breaker.allows()
    clock.now += REST_S * 0.2
    assert breaker.allows() and breaker.trips == 1


def test_a_probe_that_works_closes_it() -> None:
    breaker, clock = _opened()
    clock.now += REST_S
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.open and all(breaker.allows() for _ in range(5))
    for _ in range(MAX_FAILURES):
        breaker.failed()
    assert breaker.open and breaker.trips == 2


def test_a_probe_that_never_comes_back_does_not_block_the_next() -> None:
    breaker, clock = _opened()
    for _ in range(3):
        clock.now += REST_S
        assert breaker.allows() and not breaker.allows()
