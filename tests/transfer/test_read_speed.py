"""The read speed of a store: what all readers see together, by a fake clock."""

from __future__ import annotations

import pytest

from kvtide.transfer.read_speed import ReadSpeed
from tests.transfer.stores import Clock


def test_one_reader_alone_sees_all_of_the_speed() -> None:
    clock = Clock()
    speed = ReadSpeed(clock)
    clock.now += 100.0
    began = speed.begin()
    clock.now += 2.0
    speed.end(began, 600)
    assert speed.bytes_s == 300.0


def test_two_readers_side_by_side_see_half_of_it_each() -> None:
    clock = Clock()
    speed = ReadSpeed(clock)
    laps = [speed.begin(), speed.begin()]
    clock.now += 2.0
    for began in laps:
        speed.end(began, 300)
    assert speed.bytes_s == 300.0


def test_readers_that_overlap_in_part_are_weighted_by_it() -> None:
    clock = Clock()
    speed = ReadSpeed(clock)
    first = speed.begin()
    clock.now += 1.0
    second = speed.begin()
    clock.now += 1.0
    speed.end(first, 300)
    assert speed.bytes_s == pytest.approx(1.5 * 300 / 2.0), "alone for half of the time"
    speed.end(second, 0)


def test_what_was_not_measured_is_not_raised() -> None:
    speed = ReadSpeed(Clock())
    speed.raise_by(0.1)
    assert speed.bytes_s is None
    speed.bytes_s = 100.0
    speed.raise_by(0.1)
    assert speed.bytes_s == pytest.approx(110.0)
