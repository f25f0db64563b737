"""File stores against a dictionary: two at a time on one folder, closed, reopened and merged.

A follower reads along, which takes in what changed as often as the rules choose.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.storage import open_store
from kvtide.storage.file import FileStore, FolderFollower, FolderSpace
from kvtide.storage.file.segments import blocks_of
from tests.storage.test_file_store import OTHER, SPACE, body, got, key

NUMBERS = st.lists(st.integers(0, 25), min_size=1, max_size=6)
SIDES = st.sampled_from([0, 1])
LENGTHS = [0, 1, 4096, 5000, 9000, 20_000]


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


class Machine(RuleBasedStateMachine):
    """Two stores of one space and one of another; the cap is larger than all objects together."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [self._open(SPACE), self._open(SPACE)]
        self.other = self._open(OTHER)
        self.model: set[int] = set()
        self.other_model: set[int] = set()
        self.follower = FolderFollower(FolderSpace(self.folder, SPACE))
        self.followed: set[int] = set()

    def _open(self, space: bytes) -> FileStore:
        url = f"file://{self.folder}?cap=10MB&floor=0&threads=2&segment=32KiB"
        store = open_store(url, space)
        assert isinstance(store, FileStore)
        return store

    @rule(side=SIDES, numbers=NUMBERS)
    def write(self, side: int, numbers: list[int]) -> None:
        sources = [memoryview(body(n, length_of(n))) for n in numbers]
        assert all(self.stores[side].write([key(n) for n in numbers], sources))
        self.model |= set(numbers)

    @rule(numbers=NUMBERS)
    def write_other(self, numbers: list[int]) -> None:
        sources = [memoryview(body(n, length_of(n))) for n in numbers]
        assert all(self.other.write([key(n) for n in numbers], sources))
        self.other_model |= set(numbers)

    @rule(side=SIDES, numbers=NUMBERS)
    def remove(self, side: int, numbers: list[int]) -> None:
        removed = self.stores[side].remove([key(n) for n in numbers])
        assert removed == len(self.model & set(numbers))
        self.model -= set(numbers)

    @rule(side=SIDES, number=st.integers(0, 25))
    def read(self, side: int, number: int) -> None:
        expected = body(number, length_of(number)) if number in self.model else None
        assert got(self.stores[side], number, 20_000) == expected

    @rule(side=SIDES)
    def clear(self, side: int) -> None:
        removed = self.stores[side].clear()
        assert removed.objects == len(self.model)
        assert removed.bytes == sum(map(length_of, self.model))
        self.model.clear()

    @rule(side=SIDES)
    def reopen(self, side: int) -> None:
        self.stores[side].close()
        self.stores[side] = self._open(SPACE)

    @rule(side=SIDES)
    def open_beside(self, side: int) -> None:
        new = self._open(SPACE)
        self.stores[side].close()
        self.stores[side] = new

    @rule()
    def keep(self) -> None:
        """What is done in the background."""
        store = self.stores[0]
        store._sync()
        store._log_uses()
        store._state.writer.renew_journal()

    @rule()
    def follow(self) -> None:
        """What the follower names as changed accounts for every difference."""
        named = self.follower.look()
        there = self.follower.has([key(n) for n in range(26)])
        now = {n for n in range(26) if there[n]}
        assert now == self.model
        changed = now ^ self.followed
        assert named is None or {key(n) for n in changed} <= set(named)
        self.followed = now

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def all_agree(self) -> None:
        keys = [key(n) for n in range(26)]
        for store in self.stores:
            assert store.exists(keys) == [n in self.model for n in range(26)]
            status = store.status()
            assert status.notes == ()
            assert status.objects == len(self.model)
            assert status.bytes == sum(map(length_of, self.model))
            table = store._state.catalog.table
            rows = table.rows()
            assert status.all_bytes == blocks_of(table.length[rows]).sum() * 4096
        assert self.other.exists(keys) == [n in self.other_model for n in range(26)]

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in [*self.stores, self.other]:
                store.close()
            shutil.rmtree(self.folder)


TestFileStores = Machine.TestCase
TestFileStores.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_removals_of_a_segment_that_is_gone_are_nothing_to_speak_of() -> None:
    machine = Machine()
    machine.start()
    machine.write(numbers=[0], side=1)
    machine.open_beside(side=1)
    machine.clear(side=0)
    machine.open_beside(side=0)
    machine.all_agree()
    machine.teardown()
