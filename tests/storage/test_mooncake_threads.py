"""Calls that come back, late or never: what waits for them, and for how long."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtide.storage.mooncake.library_threads import CallRefusedError, GivenUpError, LibraryThreads


def in_(seconds: float) -> float:
    return time.monotonic() + seconds


class Gate:
    """A call that ends when it is let go."""

    def __init__(self) -> None:
        self._open, self.begun, self.over = (threading.Event() for _ in range(3))

    def __call__(self) -> str:
        self.begun.set()
        assert self._open.wait(60)
        return "late"

    def let_go(self) -> None:
        self._open.set()
        assert self.over.wait(60)


def stick(threads: LibraryThreads) -> Gate:
    gate = Gate()
    with pytest.raises(GivenUpError) as raised:
        threads.run(gate, in_(0.05), gate.over.set)
    assert raised.value.began and not gate.over.is_set()
    return gate


def eventually_free(threads: LibraryThreads) -> None:
    deadline = in_(60)
    while threads.stuck:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_answers_and_errors_come_back():
    threads, after = LibraryThreads("test", 2), []
    assert threads.run(lambda: 7, in_(60), lambda: after.append("answer")) == 7
    with pytest.raises(KeyError, match="what went wrong"):
        threads.run(lambda: {}["what went wrong"], in_(60), lambda: after.append("error"))
    assert after == ["answer", "error"]
    assert threads.finish(lambda: after.append("end"), 60)
    assert after[-1] == "end"


def test_a_stuck_call_does_not_block_others_and_is_followed_up_when_it_ends():
    threads = LibraryThreads("test", 2)
    gate = stick(threads)
    assert threads.stuck == 1
    assert [threads.run(lambda n=n: n, in_(60)) for n in range(10)] == list(range(10))
    gate.let_go()
    eventually_free(threads)
    threads.finish(lambda: None, 60)


def test_when_all_are_stuck_calls_are_refused_at_once_until_one_comes_back():
    threads, after = LibraryThreads("test", 3), []
    gates = [stick(threads) for _ in range(3)]
    start = time.monotonic()
    with pytest.raises(CallRefusedError, match="3 calls are stuck in the library"):
        threads.run(lambda: None, in_(60), lambda: after.append("refused"))
    assert time.monotonic() - start < 30
    assert after == ["refused"]
    gates[0].let_go()
    deadline = in_(60)
    while threads.stuck == 3:
        assert time.monotonic() < deadline
    assert threads.run(lambda: "works", in_(60)) == "works"
    for gate in gates[1:]:
        gate.let_go()
    threads.finish(lambda: None, 60)


def test_a_call_that_no_thread_began_never_runs():
    threads, after, ran = LibraryThreads("test", 1), [], []
    gate = Gate()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(threads.run, gate, in_(60), gate.over.set)
        assert gate.begun.wait(60)
        with pytest.raises(GivenUpError) as raised:
            threads.run(lambda: ran.append(1), in_(0.05), lambda: after.append("never begun"))
        assert not raised.value.began
        assert after == ["never begun"]
        gate.let_go()
        assert first.result() == "late"
    assert threads.run(lambda: "next", in_(60)) == "next"
    assert ran == []
    threads.finish(lambda: None, 60)


def test_finishing_goes_on_by_itself_while_calls_are_stuck():
    threads, ended = LibraryThreads("test", 2), threading.Event()
    gate = stick(threads)
    start = time.monotonic()
    assert not threads.finish(ended.set, 0.05)
    assert time.monotonic() - start < 30
    assert not ended.is_set()
    with pytest.raises(CallRefusedError, match="closed"):
        threads.run(lambda: None, in_(60))
    gate.let_go()
    assert ended.wait(60)


def test_every_call_is_followed_up_once_whatever_the_order():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    threads, lock, ends = LibraryThreads("test", 4), threading.Lock(), [0] * 400
    durations = [chance.choice((0, 0, 0.001, 0.01)) for _ in ends]
    patience = [chance.choice((0, 0.002, 0.005, 60)) for _ in ends]

    def end(number: int) -> None:
        with lock:
            ends[number] += 1

    def call(number: int) -> str:
        try:
            threads.run(lambda: time.sleep(durations[number]), in_(patience[number]),
                     lambda: end(number))  # fmt: skip
        except GivenUpError as error:
            return f"given up, began {error.began}"
        except CallRefusedError:
            return "refused"
        return "answered"

    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(call, range(len(ends))))
    assert threads.finish(lambda: None, 60)
    assert ends == [1] * len(ends)
    assert threads.stuck == 0
    assert {"answered", "given up, began True"} <= set(outcomes)
