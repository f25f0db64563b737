"""Threads that share a call's work: in order, together, and never longer than the call."""

from __future__ import annotations

import random
import threading
import time

import pytest

from kvtide.storage.redis.connections import RedisThreadPool, batch_slices


@pytest.fixture
def threads():
    one = RedisThreadPool(3, "test")
    yield one
    one.close()


def _soon():
    return time.monotonic() + 60


def test_results_come_in_the_order_of_the_pieces(threads):
    assert threads.run([lambda n=n: n * n for n in range(10)], _soon()) == [
        n * n for n in range(10)
    ]
    assert threads.run([], _soon()) == []


def test_a_single_piece_runs_in_the_calling_thread(threads):
    assert threads.run([threading.current_thread], _soon()) == [threading.current_thread()]


def test_pieces_run_at_the_same_time(threads):
    together = threading.Barrier(3)
    threads.run([lambda: together.wait(60)] * 3, _soon())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_failure_is_raised_after_all_pieces_have_ended(threads, which):
    ended = []

    def piece(n):
        if n == which:
            raise ValueError(n)
        time.sleep(0.05)
        ended.append(n)

    with pytest.raises(ValueError, match=str(which)):
        threads.run([lambda n=n: piece(n) for n in range(3)], _soon())
    assert len(ended) == 2


def test_pieces_that_have_not_begun_by_the_deadline_never_do():
    threads, begun = RedisThreadPool(2, "test"), []

    def piece(n):
        begun.append(n)
        time.sleep(0.2)

    with pytest.raises(TimeoutError):
        threads.run([lambda n=n: piece(n) for n in range(9)], time.monotonic() + 0.1)
    at_return = len(begun)
    time.sleep(0.3)
    assert len(begun) == at_return < 9
    threads.close()


def test_slices_cover_a_batch_once_and_weigh_about_the_same():
    chance = random.Random(7)
    for _ in range(300):
        weights = [chance.randint(0, 100) for _ in range(chance.randint(1, 50))]
        max_batch, min_weight = chance.randint(1, 8), chance.randint(1, 200)
        found = batch_slices(weights, max_batch, min_weight)
        assert [n for part in found for n in range(part.start, part.stop)] == list(
            range(len(weights))
        )
        assert 1 <= len(found) <= max_batch
        assert all(part.start < part.stop for part in found)
        fair = sum(weights) / len(found)
        assert all(sum(weights[part]) <= fair + 200 for part in found)
    assert len(batch_slices([1] * 100, 4, 1000)) == 1
