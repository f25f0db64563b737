"""All objects in memory: rows in columns of numpy, found by key through a hash table.

A row is an object at a location. Two rows may have one key, when two processes wrote the same
object at once; `find` gives one of them. Everything works on batches: a look-up of 10,000 keys is
a few passes over arrays, not 10,000 steps in Python.

Bytes per row: 56 in columns, which grow by a quarter when full, 4 for each slot of the hash table,
of which 23% to 50% are taken, 4 while it waits to be used again. At most 92 together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.journal import Words
from kvtide.storage.file.segments import blocks_of

ObjectRows = NDArray[np.int64]
EMPTY, DELETED = -1, -2
NONE = -1
"""The result of `find` for a key that has no row."""

MAX_TAKEN = 0.5
MIN_SLOTS = 1024
COLUMNS = {
    "key": ("<u8", 4),
    "used": ("<u8", 1),
    "segment": ("<i4", 1),
    "block": ("<u4", 1),
    "length": ("<u4", 1),
    "space": ("<u2", 1),
    "fresh": ("?", 1),
    "alive": ("?", 1),
}


class ObjectTable:
    """Columns: key, used (stamp), segment (its number here), block, length, space (its number
    here), fresh (used since its last USE record), alive."""

    key: Words
    used: NDArray[np.uint64]
    segment: NDArray[np.int32]
    block: NDArray[np.uint32]
    length: NDArray[np.uint32]
    space: NDArray[np.uint16]
    fresh: NDArray[np.bool_]
    alive: NDArray[np.bool_]

    def __init__(self) -> None:
        for name, (kind, width) in COLUMNS.items():
            setattr(self, name, np.zeros((0, width) if width > 1 else 0, kind))
        self._slots = np.full(MIN_SLOTS, EMPTY, np.int32)
        self._taken = 0
        self._free = np.zeros(0, np.int32)
        self._free_count = 0
        self._end = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        columns = sum(getattr(self, name).nbytes for name in COLUMNS)
        return int(columns + self._slots.nbytes + self._free.nbytes)

    # ── looking up ────────────────────────────────────────────────────────────────────────────

    def find(self, keys: Words, space: int) -> ObjectRows:
        """A row for every key of the space, or NONE."""

        def same(asked: ObjectRows, rows: ObjectRows) -> NDArray[np.bool_]:
            alike: NDArray[np.bool_] = self.key[rows, 0] == keys[asked, 0]
            some = np.flatnonzero(alike)
            whole = (self.key[rows[some]] == keys[asked[some]]).all(axis=1)
            alike[some] = whole & (self.space[rows[some]] == space)
            return alike

        return self._probe(_hashes(keys, np.array([space], np.uint64)), same)

    def find_at(self, keys: Words, places: ObjectPlaces) -> ObjectRows:
        """The row at every place, or NONE. Keys and spaces only say where to look."""

        def same(asked: ObjectRows, rows: ObjectRows) -> NDArray[np.bool_]:
            at_block: NDArray[np.bool_] = self.block[rows] == places.block[asked]
            at_segment: NDArray[np.bool_] = self.segment[rows] == places.segment[asked]
            return at_block & at_segment

        return self._probe(_hashes(keys, places.space.astype(np.uint64)), same)

    def _probe(
        self, hashes: Words, same: Callable[[ObjectRows, ObjectRows], NDArray[np.bool_]]
    ) -> ObjectRows:
        mask = len(self._slots) - 1
        found = np.full(len(hashes), NONE, np.int64)
        asked = np.arange(len(hashes))
        at = (hashes & np.uint64(mask)).astype(np.int64)
        while asked.size:
            rows = self._slots[at].astype(np.int64)
            some = np.flatnonzero(rows >= 0)
            hit = some[same(asked[some], rows[some])]
            found[asked[hit]] = rows[hit]
            going = rows != EMPTY
            going[hit] = False
            asked, at = asked[going], (at[going] + 1) & mask
        return found

    # ── adding and dropping ───────────────────────────────────────────────────────────────────

    def add(
        self, keys: Words, places: ObjectPlaces, lengths: NDArray[Any], used: Words
    ) -> ObjectRows:
        """New rows. No place among them may have a row already."""
        rows = self._take_rows(len(keys))
        self.key[rows], self.used[rows], self.length[rows] = keys, used, lengths
        self.segment[rows], self.block[rows] = places.segment, places.block
        self.space[rows], self.fresh[rows], self.alive[rows] = places.space, False, True
        self.count += len(rows)
        if self._taken + len(rows) > MAX_TAKEN * len(self._slots):
            self._rebuild()
        else:
            self._link(rows)
        return rows

    def drop(self, rows: ObjectRows) -> None:
        """Forget rows, each of which is alive and named once."""
        hashes = _hashes(self.key[rows], self.space[rows].astype(np.uint64))
        mask = len(self._slots) - 1
        at, wanted = (hashes & np.uint64(mask)).astype(np.int64), rows
        while wanted.size:
            hit = self._slots[at] == wanted
            self._slots[at[hit]] = DELETED
            at, wanted = (at[~hit] + 1) & mask, wanted[~hit]
        self.alive[rows] = False
        self.count -= len(rows)
        needed = self._free_count + len(rows)
        if needed > len(self._free):
            self._free = np.resize(self._free, max(needed, len(self._free) * 5 // 4))
        self._free[self._free_count : needed] = rows
        self._free_count = needed

    def _take_rows(self, count: int) -> ObjectRows:
        reused = min(count, self._free_count)
        self._free_count -= reused
        old = self._free[self._free_count : self._free_count + reused].astype(np.int64)
        start, self._end = self._end, self._end + count - reused
        capacity = len(self.alive)
        if self._end > capacity:
            self._grow(max(self._end, capacity * 5 // 4, 64))
        return np.concatenate([old, np.arange(start, self._end)])

    def _grow(self, capacity: int) -> None:
        for name in COLUMNS:
            old = getattr(self, name)
            new = np.zeros((capacity, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def _rebuild(self) -> None:
        """Size the table for the live rows, without deleted slots."""
        size = MIN_SLOTS
        while self.count > MAX_TAKEN * size * 0.9:
            size *= 2
        self._slots = np.full(size, EMPTY, np.int32)
        self._taken = 0
        self._link(self.rows())

    def _link(self, rows: ObjectRows) -> None:
        """Put rows into slots: the first empty one behind where their hash points."""
        mask = len(self._slots) - 1
        hashes = _hashes(self.key[rows], self.space[rows].astype(np.uint64))
        at, left = (hashes & np.uint64(mask)).astype(np.int64), rows
        self._taken += len(rows)
        while left.size:
            free = self._slots[at] == EMPTY
            # Where several want one slot the last has it; the others see that and go on.
            self._slots[at[free]] = left[free]
            lost = self._slots[at] != left
            at, left = (at[lost] + 1) & mask, left[lost]

    # ── the whole ─────────────────────────────────────────────────────────────────────────────

    def rows(self) -> ObjectRows:
        return np.flatnonzero(self.alive[: self._end])

    def oldest(self, count: int) -> ObjectRows:
        """The rows used longest ago, oldest first."""
        rows = self.rows()
        used = self.used[rows]
        if count < len(rows):
            kept = np.argpartition(used, count)[:count]
            rows, used = rows[kept], used[kept]
        return rows[np.argsort(used, kind="stable")]

    def blocks(self, rows: ObjectRows) -> NDArray[np.int64]:
        return blocks_of(self.length[rows])

    def places(self, rows: ObjectRows) -> ObjectPlaces:
        return ObjectPlaces(self.segment[rows], self.block[rows], self.space[rows])


class ObjectPlaces:
    """Where objects lie: the numbers of segment and space that one process uses, and the block."""

    __slots__ = ("block", "segment", "space")

    def __init__(self, segment: NDArray[Any], block: NDArray[Any], space: NDArray[Any]) -> None:
        self.segment, self.block, self.space = segment, block, space

    def __getitem__(self, chosen: NDArray[Any]) -> ObjectPlaces:
        return ObjectPlaces(self.segment[chosen], self.block[chosen], self.space[chosen])

    def codes(self) -> Words:
        """One number for every place."""
        segment: Words = self.segment.astype(np.uint64)
        block: Words = self.block.astype(np.uint64)
        return np.asarray(segment << np.uint64(32) | block)


def _hashes(keys: Words, spaces: Words) -> Words:
    mixed: Words = keys[:, 0] ^ (spaces * np.uint64(0xD6E8FEB86659FD93))
    for column in range(1, 4):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= keys[:, column]
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed
