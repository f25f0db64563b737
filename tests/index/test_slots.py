"""reserve → take → forfeit: slots of one anchor in one tier."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.index.tree.slots import SlotPool


def test_slots_are_given_out_once_each() -> None:
    pool = SlotPool(5)
    assert pool.reserve(5)
    taken = np.concatenate((pool.take(2), pool.take(3)))
    assert sorted(taken.tolist()) == [0, 1, 2, 3, 4]
    assert pool.available == 0 and not pool.reserve(1) and pool.reserve(0)


def test_a_promise_that_cannot_be_kept_changes_nothing() -> None:
    pool = SlotPool(4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert (pool.promised, pool.available) == (3, 1)
    assert pool.reserve(1) and pool.available == 0


def test_a_forfeited_promise_can_be_given_to_others() -> None:
    pool = SlotPool(4)
    pool.reserve(4)
    pool.take(1)
    pool.forfeit(2)
    assert (pool.promised, pool.available) == (1, 2)
    assert pool.reserve(2) and not pool.reserve(1)


def test_taking_or_forfeiting_more_than_promised_asserts() -> None:
    pool = SlotPool(4)
    pool.reserve(1)
    with pytest.raises(AssertionError, match="taking 2 slots of 1"):
        pool.take(2)
    with pytest.raises(AssertionError, match="forfeiting 2 slots of 1"):
        pool.forfeit(2)
    assert pool.promised == 1


def test_freed_slots_come_back_and_no_others() -> None:
    pool = SlotPool(3)
    pool.reserve(3)
    slots = pool.take(3)
    pool.free(slots[1:2])
    assert pool.free_slots().tolist() == slots[1:2].tolist() and pool.available == 1
    pool.free(slots[[0, 2]])
    with pytest.raises(AssertionError, match="more slots came back"):
        pool.free(slots[:1])


def test_taken_slots_do_not_change_when_others_come_back() -> None:
    """They are copies: the stack they came from is written over by `free`."""
    pool = SlotPool(4)
    pool.reserve(4)
    first, second = pool.take(2), pool.take(2)
    before = second.tolist()
    pool.free(first)
    pool.free(second[:1])
    assert second.tolist() == before
