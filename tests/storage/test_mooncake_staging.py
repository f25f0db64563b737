"""Staging memory is lent out once, and comes back whole."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise

import pytest

from kvtide.storage.mooncake.registered_memory import MemoryRange, RegisteredBuffers, where


def test_where_memory_lies():
    block = memoryview(bytearray(100))
    start = where(block).start
    assert where(block[10:30]) == MemoryRange(start + 10, 20)
    assert where(block).holds(where(block[10:30]))
    assert not where(block[10:30]).holds(where(block))
    assert where(memoryview(b"read only")).bytes == 9
    assert where(block[:0]).bytes == 0


def test_a_loan_takes_what_there_is_room_for():
    staging = RegisteredBuffers(4096)
    loan = staging.borrow([2000, 2000, 2000], time.monotonic())
    assert loan is not None and len(loan.pieces) == 2
    loan.memory(0)[:5] = b"bytes"
    assert loan.address(1) - loan.address(0) >= 2000
    assert staging.borrow([100], time.monotonic() + 0.01) is None
    loan.drop()
    assert staging.borrow([4096], time.monotonic()) is not None


def test_a_loan_waits_for_another_to_come_back():
    staging = RegisteredBuffers(4096)
    first = staging.borrow([4096], time.monotonic())
    threading.Timer(0.05, first.drop).start()
    second = staging.borrow([4096], time.monotonic() + 5)
    assert second is not None


def test_a_loan_comes_back_when_the_last_holder_drops_it():
    staging = RegisteredBuffers(4096)
    loan = staging.borrow([4096], time.monotonic())
    loan.hold()
    loan.drop()
    assert staging.borrow([1], time.monotonic()) is None
    loan.drop()
    assert staging.borrow([4096], time.monotonic()) is not None


@pytest.mark.parametrize("seed", range(20))
def test_pieces_never_meet_and_all_comes_back(seed):
    chance, staging, loans = random.Random(seed), RegisteredBuffers(1 << 16), []
    for _ in range(500):
        if loans and chance.random() < 0.5:
            loans.pop(chance.randrange(len(loans))).drop()
        else:
            sizes = [chance.randint(1, 9000) for _ in range(chance.randint(1, 5))]
            if (loan := staging.borrow(sizes, time.monotonic())) is not None:
                assert all(p.bytes >= s for p, s in zip(loan.pieces, sizes, strict=False))
                loans.append(loan)
        taken = [piece for loan in loans for piece in loan.pieces]
        everything = sorted([*taken, *staging._free], key=lambda piece: piece.start)
        assert sum(piece.bytes for piece in everything) == 1 << 16
        assert all(one.end == two.start for one, two in pairwise(everything))
        assert all(one.end < two.start for one, two in pairwise(staging._free))
    for loan in loans:
        loan.drop()
    assert staging._free == [MemoryRange(0, 1 << 16)]
