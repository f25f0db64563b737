"""Which branches a store has: asked in one call, now and then, and within the engine's time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from kvtide.index import TreeBranch
from kvtide.server.live.stored_branches import ASK_EVERY_S, StoredBranches
from kvtide.spec import RankShape
from kvtide.storage.objects import object_key

SUFFIXES = (b"0", b"1")


class Cache:
    """An engine whose branches are keyed by their start, and a store of these keys."""

    def __init__(self, *there: int) -> None:
        self.cache = self.index = self.storage = self
        self.counted_anchor = "kv"
        self.there = {object_key(key(one), suffix) for one in there for suffix in SUFFIXES}
        self.calls: list[tuple[Callable[[Any], Any], Future[Any]]] = []

    def last_page_key(self, branch: TreeBranch) -> bytes | None:
        return None if branch.start < 0 else key(branch.start)

    def object_suffixes(self, anchor: str, shape: RankShape) -> tuple[bytes, ...]:
        assert (anchor, shape) == ("kv", RankShape(1, 2))
        return SUFFIXES

    def ask(self, function: Callable[[Any], Any]) -> Future[Any]:
        self.calls.append((function, Future()))
        return self.calls[-1][1]

    def exists(self, keys: list[bytes]) -> list[bool]:
        return [one in self.there for one in keys]

    def answer(self, error: Exception | None = None) -> None:
        function, future = self.calls.pop()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(function(self))


def key(start: int) -> bytes:
    return start.to_bytes(32, "big")


def branches(*starts: int) -> list[TreeBranch]:
    return [TreeBranch(start=start) for start in starts]


def advance(stored: StoredBranches, engine: Any, now: float = 0.0, most: int = 99) -> bool:
    left = count(most, -1)
    return stored.advance(engine, now, lambda: next(left) > 0)


def test_a_branch_is_stored_when_all_ranks_objects_of_its_last_page_are() -> None:
    engine, shown = Cache(1, 2), branches(1, 2, 3, -1)
    engine.there.discard(object_key(key(2), SUFFIXES[1]))
    stored = StoredBranches(RankShape(1, 2))
    stored.begin(shown)
    assert not advance(stored, engine)
    engine.answer()
    assert advance(stored, engine)
    assert [branch.stored for branch in shown] == [True, False, False, False]
    assert not advance(stored, engine), "no more is known"


def test_keys_are_computed_within_the_time_and_asked_for_once_in_a_while() -> None:
    engine, stored = Cache(1), StoredBranches(RankShape(1, 2))
    stored.begin(branches(*range(10)))
    for _ in range(3):
        assert not advance(stored, engine, most=3) and not engine.calls
    advance(stored, engine, most=3)
    assert len(engine.calls) == 1
    advance(stored, engine, now=2 * ASK_EVERY_S)
    assert len(engine.calls) == 1, "one at a time"
    engine.answer()
    advance(stored, engine, now=ASK_EVERY_S / 2)
    assert not engine.calls
    advance(stored, engine, now=ASK_EVERY_S)
    assert len(engine.calls) == 1


def test_a_new_outline_shows_what_is_known_until_the_next_answer() -> None:
    engine, stored = Cache(1), StoredBranches(RankShape(1, 2))
    stored.begin(branches(1))
    advance(stored, engine)
    engine.answer()
    advance(stored, engine)
    again = branches(1, 2)
    stored.begin(again)
    assert advance(stored, engine, now=1.0)
    assert [branch.stored for branch in again] == [True, False]
    advance(stored, engine, now=ASK_EVERY_S)
    engine.there.clear()
    engine.answer()
    assert advance(stored, engine, now=ASK_EVERY_S)
    assert [branch.stored for branch in again] == [False, False]


def test_a_store_that_does_not_answer_changes_nothing() -> None:
    engine, stored, shown = Cache(1), StoredBranches(RankShape(1, 2)), branches(1)
    stored.begin(shown)
    advance(stored, engine)
    engine.answer()
    advance(stored, engine)
    advance(stored, engine, now=ASK_EVERY_S)
    engine.answer(TimeoutError("late"))
    assert not advance(stored, engine, now=ASK_EVERY_S)
    assert shown[0].stored
