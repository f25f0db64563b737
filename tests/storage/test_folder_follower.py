"""A follower knows what is stored from the journals alone, and nothing when it cannot read one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvtide.storage import StoreError
from kvtide.storage.file import FolderFollower, FolderSpace
from tests.storage.test_file_store import KIB, OTHER, SPACE, Open, key, opened, put

__all__ = ["opened"]


def test_it_sees_what_is_written_removed_evicted_and_cleared(opened: Open) -> None:
    store = opened(cap="64KiB")
    follower = FolderFollower(store.followed)
    assert follower.look() == []
    put(store, [0, 1, 2, 3], 8 * KIB)
    assert set(follower.look() or ()) == {key(n) for n in range(4)}
    store.remove([key(1)])
    assert follower.look() == [key(1)]
    put(store, list(range(4, 10)), 8 * KIB)
    assert key(3) in (follower.look() or ()), "evicted for the cap"
    known = [key(n) for n in range(10)]
    assert follower.has(known) == store.exists(known) and not all(follower.has(known))
    store.clear()
    assert follower.look() and not any(follower.has(known))


def test_it_begins_with_what_is_there_and_outlives_the_processes_that_wrote_it(
    opened: Open,
) -> None:
    first = opened()
    put(first, [1, 2])
    follower = FolderFollower(first.followed)
    assert follower.has([key(1), key(2), key(3)]) == [True, True, False]
    first.close()
    second = opened()  # It merges the journal of the first.
    second.remove([key(2)])
    follower.look()
    assert follower.has([key(1), key(2)]) == [True, False]


def test_other_spaces_of_the_folder_are_not_seen(opened: Open) -> None:
    ours, others = opened(), opened(space=OTHER)
    follower = FolderFollower(ours.followed)
    put(others, [1])
    others.remove([key(1)])
    assert follower.look() == [] and follower.has([key(1)]) == [False]


def test_it_writes_nothing(opened: Open) -> None:
    store = opened()
    put(store, [1])
    before = sorted(os.listdir(store.followed.root / "journals"))
    follower = FolderFollower(store.followed)
    follower.look()
    assert sorted(os.listdir(store.followed.root / "journals")) == before


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such folder"):
        FolderFollower(FolderSpace(tmp_path / "none", SPACE))
    assert not (tmp_path / "none").exists()


def test_it_raises_when_the_folder_goes(opened: Open) -> None:
    store = opened()
    put(store, [1])
    follower = FolderFollower(store.followed)
    shutil.rmtree(store.followed.root)
    with pytest.raises(FileNotFoundError):
        follower.look()


def test_it_raises_when_a_journal_cannot_be_read(opened: Open) -> None:
    store = opened()
    follower = FolderFollower(store.followed)
    put(store, [1])
    (store.followed.root / "journals" / f"{7:016x}.journal").mkdir()
    with pytest.raises(StoreError, match="a journal cannot be read"):
        follower.look()
