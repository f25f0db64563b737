"""The state of the folder in this process: every object of every space, from every journal.

The caller holds the store's lock. Row numbers are invalid once it releases the lock.

`sweep` reads the new records of other processes' journals; without any it only checks lengths. A
merged journal is skipped if all journals that it replaces were read. If one of them had never been
seen, everything is read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.file_settings import StoreCounts
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.journal import RecordKind, Records, Tail, Words, blank, nothing
from kvtide.storage.file.object_table import NONE, ObjectPlaces, ObjectRows, ObjectTable
from kvtide.storage.file.segments import blocks_of

MIN_QUEUED = 64
QUEUE_DIVISOR = 16
"""Eviction queues 1/16 of all objects at a time."""
WINDOW = 256


@dataclass(slots=True)
class Known:
    """A segment, and its live objects."""

    id: int
    path: Path
    space: int
    objects: int = 0
    bytes: int = 0
    blocks: int = 0
    deleted: bool = False


class Clock:
    """Growing stamps near the time of day, comparable between processes.

    Within a batch the first stamp is the latest: a batch runs from a prompt's first page to its
    last, and later pages are useless without the earlier ones, so they are evicted first.
    """

    def __init__(self) -> None:
        self._last = 0

    def stamps(self, count: int) -> Words:
        first = max(self._last + 1, time.time_ns() // 1000)
        self._last = first + count - 1
        return np.arange(self._last, first - 1, -1, dtype=np.int64).astype(np.uint64)


class Catalog:
    """blocks   all that live, of all spaces"""

    def __init__(self, folder: Folder, counts: StoreCounts) -> None:
        self._folder, self._counts = folder, counts
        self.clock = Clock()
        self.table = ObjectTable()
        self.segments: list[Known] = []
        self._numbers: dict[int, int] = {}
        self._sorted: tuple[Words, ObjectRows, ObjectRows] | None = None
        self._spaces: dict[bytes, int] = {}
        self._tails: dict[int, Tail] = {}
        self.own: set[int] = set()
        """Journals of this process, which it need not read."""
        self._replaced: set[int] = set()
        self._missed = False
        self._early: Words = np.zeros(0, np.uint64)
        self._queue: tuple[ObjectRows, Words] = (np.zeros(0, np.int64), np.zeros(0, np.uint64))
        self.blocks = 0
        self.additions = 0
        """Grows with every object that is added."""

    # ── spaces and segments ───────────────────────────────────────────────────────────────────

    def space(self, space: bytes) -> int:
        return self._spaces.setdefault(space, len(self._spaces))

    def segment(self, id: int, space: bytes) -> int:
        """The number of a segment, which may be new."""
        number = self._numbers.get(id)
        if number is None:
            self._sorted = None
            number = self._numbers[id] = len(self.segments)
            self.segments.append(Known(id, self._folder.segment(id), self.space(space)))
        return number

    def number(self, id: int) -> int | None:
        return self._numbers.get(id)

    # ── reading journals ──────────────────────────────────────────────────────────────────────

    def refresh(self) -> None:
        """Take in other processes' changes; if the folder cannot be read, keep the known state."""
        try:
            if not self.sweep():
                with self._folder.adding():
                    self.load()
        except OSError as error:
            self._counts.add("journal", error=error)

    def load(self) -> None:
        """Read everything again. The caller holds the folder's lock, so no process merges."""
        opened = [self._open(path) for path in self._folder.journal_paths()]
        tails = {tail.id: tail for tail in opened if tail is not None}
        for tail in tails.values():
            if tail.is_merged:
                self._replaced |= tail.replaced()
        # A crash may leave journals behind that have been replaced.
        tails = {id: tail for id, tail in tails.items() if id not in self._replaced}
        parts = [self._read(tail) for tail in tails.values()]
        self._tails = {id: tail for id, tail in tails.items() if id not in self.own}
        old, self.table = self.table, ObjectTable()
        self.blocks = 0
        self._early = np.zeros(0, np.uint64)
        self._queue = (np.zeros(0, np.int64), np.zeros(0, np.uint64))
        for known in self.segments:
            known.objects = known.bytes = known.blocks = 0
        self._ingest(parts)
        self._remember(old)
        self._missed = False
        self.additions += 1

    def sweep(self) -> bool:
        """Take in other processes' changes. False: a journal was missed, so `load` is needed."""
        merged = []
        if self._folder.has_changed():
            for tail in self._new_tails():
                if tail.is_merged:
                    merged.append(tail)
                else:
                    self._tails[tail.id] = tail
        parts = [self._read(tail) for tail in self._tails.values() if not tail.is_merged]
        self._ingest([part for part in parts if len(part)])
        for tail in merged:
            self._take_over(tail)
        return not self._missed

    def _new_tails(self) -> list[Tail]:
        known = self._tails.keys() | self.own | self._replaced
        paths = [path for path in self._folder.journal_paths() if int(path.stem, 16) not in known]
        return [tail for path in paths if (tail := self._open(path)) is not None]

    def _take_over(self, tail: Tail) -> None:
        """Let a merged journal stand for those it was made of, if all of them were read.

        They were finished before it came to be, and so have been read to their ends by now.
        """
        replaced = tail.replaced()
        if not replaced <= self._tails.keys() | self.own | self._replaced:
            self._missed = True
        for id in replaced & self._tails.keys():
            del self._tails[id]
        self._replaced |= replaced
        self._tails[tail.id] = tail

    def _open(self, path: Path) -> Tail | None:
        try:
            return Tail(path)
        except FileNotFoundError:
            return None  # Merged since it was listed; the next sweep finds its replacement.
        except OSError as error:
            self._counts.add("journal", error=error)
            return None

    def _read(self, tail: Tail) -> Records:
        before = tail.corrupt
        try:
            records = tail.read_whole() if tail.is_merged else tail.read()
        except OSError as error:
            self._counts.add("journal", error=error)
            return nothing()
        self._counts.add("corrupt", tail.corrupt - before)
        return records

    def _ingest(self, parts: list[Records]) -> None:
        parts = [part for part in parts if len(part)]
        if not parts:
            return
        records = np.concatenate(parts) if len(parts) > 1 else parts[0]
        kinds = records["kind"]
        for record in records[kinds == RecordKind.SEGMENT]:
            self.segment(int(record["segment"]), record["key"].tobytes())
        puts, put_at = self._placed(records[kinds == RecordKind.PUT])
        dels, del_at = self._placed(records[kinds == RecordKind.DEL])
        uses, use_at = self._placed(records[kinds == RecordKind.USE])

        put_codes, del_codes = put_at.codes(), del_at.codes()
        new = self._new(puts["key"], put_at, np.concatenate([del_codes, self._early]))
        self.add(puts["key"][new], put_at[new], puts["length"][new], puts["stamp"][new])

        rows = self.table.find_at(dels["key"], del_at)
        # A removal may be read before its put, which the next sweep brings at the latest.
        self._early = del_codes[rows == NONE]
        if len(self._early):
            self._early = self._early[~np.isin(self._early, put_codes)]
        self.drop(np.unique(rows[rows != NONE]))

        rows = self.table.find_at(uses["key"], use_at)
        found = rows != NONE
        np.maximum.at(self.table.used, rows[found], uses["stamp"][found])

    def _new(self, keys: Words, at: ObjectPlaces, dead: Words) -> NDArray[np.bool_]:
        """Which places are neither known, nor dead, nor named before in the same batch."""
        codes = at.codes()
        new = ~np.isin(codes, dead) if len(dead) else np.ones(len(codes), np.bool_)
        if (codes[1:] <= codes[:-1]).any():
            first = np.zeros(len(codes), np.bool_)
            first[np.unique(codes, return_index=True)[1]] = True
            new &= first
        if len(self.table):
            new[new] = self.table.find_at(keys[new], at[new]) == NONE
        return new

    def _placed(self, records: Records) -> tuple[Records, ObjectPlaces]:
        """Records of segments that are known, and where in this process's numbers they point."""
        if not len(records) or not self._numbers:
            none = np.zeros(0, np.int64)
            self._counts.add("unknown", int((records["kind"] == RecordKind.PUT).sum()))
            return records[:0], ObjectPlaces(none, none, none)
        ids, numbers, spaces = self._sorted = self._sorted or self._sort()
        which = np.minimum(np.searchsorted(ids, records["segment"]), len(ids) - 1)
        known = ids[which] == records["segment"]
        if not known.all():
            self._counts.add("unknown", int((records["kind"][~known] == RecordKind.PUT).sum()))
            records, which = records[known], which[known]
        return records, ObjectPlaces(numbers[which], records["block"], spaces[which])

    def _sort(self) -> tuple[Words, ObjectRows, ObjectRows]:
        """All segments there ever were, by id: their numbers and spaces."""
        ids = np.sort(np.fromiter(self._numbers, np.uint64, len(self._numbers)))
        numbers = np.array([self._numbers[id] for id in ids.tolist()])
        return ids, numbers, np.array([self.segments[n].space for n in numbers.tolist()])

    def _remember(self, old: ObjectTable) -> None:
        """Carry over the uses that only this process knows."""
        rows = old.rows()
        found = self.table.find_at(old.key[rows], old.places(rows))
        rows, found = rows[found != NONE], found[found != NONE]
        self.table.used[found] = np.maximum(self.table.used[found], old.used[rows])
        self.table.fresh[found] = old.fresh[rows]

    # ── objects ───────────────────────────────────────────────────────────────────────────────

    def add(self, keys: Words, at: ObjectPlaces, lengths: NDArray[Any], used: Words) -> None:
        if len(keys):
            self.additions += 1
            if len(self._queue[1]) and used.min() <= self._queue[1][-1]:
                self._queue = (self._queue[0][:0], self._queue[1][:0])
            self._count(self.table.add(keys, at, lengths, used), 1)

    def drop(self, rows: ObjectRows) -> None:
        if len(rows):
            self._count(rows, -1)
            self.table.drop(rows)

    def _count(self, rows: ObjectRows, sign: int) -> None:
        segments, which = np.unique(self.table.segment[rows], return_inverse=True)
        lengths = self.table.length[rows]
        blocks = blocks_of(lengths)
        sums = [
            np.bincount(which, weights).astype(np.int64).tolist()
            for weights in (None, lengths, blocks)
        ]
        for number, objects, count, taken in zip(segments.tolist(), *sums, strict=True):
            known = self.segments[number]
            known.objects += sign * objects
            known.bytes += sign * count
            known.blocks += sign * taken
        self.blocks += sign * int(blocks.sum())

    def use(self, rows: ObjectRows) -> None:
        self.table.used[rows] = self.clock.stamps(len(rows))
        self.table.fresh[rows] = True

    def records_of(self, kind: RecordKind, rows: ObjectRows) -> Records:
        """Records of one kind for rows."""
        records = blank(len(rows), kind)
        table = self.table
        records["key"], records["stamp"] = table.key[rows], table.used[rows]
        records["block"], records["length"] = table.block[rows], table.length[rows]
        numbers, which = np.unique(table.segment[rows], return_inverse=True)
        ids = np.array([self.segments[number].id for number in numbers.tolist()], np.uint64)
        records["segment"] = ids[which]
        return records

    def of_segments(self, numbers: Iterable[int]) -> ObjectRows:
        rows = self.table.rows()
        return rows[np.isin(self.table.segment[rows], list(numbers))]

    def of_space(self, space: int) -> ObjectRows:
        rows = self.table.rows()
        ours: ObjectRows = rows[self.table.space[rows] == space]
        return ours

    def victims(self, blocks: int, max_rows: int) -> ObjectRows:
        """The least recently used rows that together hold so many blocks, at most `max_rows`.

        They come from a queue of the oldest rows, which is rebuilt when it is empty. A row used
        since then has another stamp and is skipped; all others are older than any row outside it.
        """
        table, chosen = self.table, [np.zeros(0, np.int64)]
        count = 0
        while blocks > 0 and count < min(len(table), max_rows):
            if not len(self._queue[0]):
                oldest = table.oldest(count + max(MIN_QUEUED, len(table) // QUEUE_DIVISOR))
                oldest = oldest[~np.isin(oldest, np.concatenate(chosen))]
                self._queue = (oldest, table.used[oldest].copy())
            rows, stamps = self._queue[0][:WINDOW], self._queue[1][:WINDOW]
            same = np.flatnonzero(table.alive[rows] & (table.used[rows] == stamps))
            held = np.cumsum(table.blocks(rows[same]))
            enough = min(int(np.searchsorted(held, blocks)) + 1, max_rows - count)
            end = len(rows) if enough > len(same) else int(same[enough - 1]) + 1
            taken = rows[same[:enough]]
            self._queue = (self._queue[0][end:], self._queue[1][end:])
            chosen.append(taken)
            count += len(taken)
            blocks -= int(held[len(taken) - 1]) if len(taken) else 0
        return np.concatenate(chosen)
