"""The changes of this process to the folder: its journal, its current segment, its removals.

An object's life, and what a crash after each step leaves:

    take       a location in the segment     unnamed blocks; the next process to open punches them
    (moved)    its bytes are written         the same
    commit     a PUT record is appended      the object; only now it is acknowledged
    remove     a DEL record is appended      nothing, but blocks are still taken
    punch      its blocks are given back     nothing

The caller holds the store's lock, except for `punch`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtide.storage.file.file_io import padded
from kvtide.storage.file.file_settings import StoreCounts
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.journal import Journal, RecordKind, Words, blank, segment_of
from kvtide.storage.file.object_table import ObjectPlaces, ObjectRows
from kvtide.storage.file.segments import (
    BLOCK_BYTES,
    Appender,
    OpenSegments,
    blocks_of,
    delete,
    lock,
)


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """Where an object is being written."""

    appender: Appender
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Hole:
    """A range without a live object."""

    path: Path
    offset: int
    count: int


class Writer:
    def __init__(
        self, folder: Folder, space: bytes, catalog: Catalog, journal: Journal, counts: StoreCounts
    ) -> None:
        self._folder, self._space, self._catalog = folder, space, catalog
        self.journal, self._counts = journal, counts
        self.opened = OpenSegments()
        self.unsynced: set[Path] = set()
        self._appender: Appender | None = None
        self._finishing: list[Appender] = []
        self.direct = True

    # ── appending ─────────────────────────────────────────────────────────────────────────────

    def take(self, length: int, segment_bytes: int, spare: int) -> SegmentPlace:
        """A place for an object; OSError if the file system has none."""
        count = padded(length)
        appender = self._appender
        if appender is None or not appender.has_room(count):
            appender = self._next_segment(max(segment_bytes, count))
        return SegmentPlace(appender, appender.take(count, spare), count)

    def look(self) -> None:
        """Leave a segment whose file was deleted."""
        if self._appender is not None and not self._appender.is_there():
            self._retire()

    def ahead(self) -> int:
        return self._appender.ahead() if self._appender else 0

    def _next_segment(self, size_bytes: int) -> Appender:
        with self._folder.adding():
            id, path = self._folder.new_segment()
            appender = Appender(path, size_bytes)
            try:
                self.journal.append(segment_of(id, self._space))
            except OSError:
                appender.discard()
                raise
        appender.number = self._catalog.segment(id, self._space)
        self.unsynced |= {self._folder.segments, self._folder.journals}
        self._retire()
        self._appender = appender
        self.direct = appender.direct
        return appender

    def _retire(self) -> None:
        """Append no more to the current segment."""
        if self._appender is not None:
            self._finishing.append(self._appender)
            self._appender = None
        self._finish()

    def _finish(self) -> None:
        """Close segments of which everything has been committed."""
        for appender in [each for each in self._finishing if not each.in_flight]:
            self._finishing.remove(appender)
            try:
                appender.finish()
            except OSError as error:
                self._counts.add("punch", error=error)

    def commit(
        self, places: Sequence[SegmentPlace], keys: Words, lengths: Sequence[int], stamps: Words
    ) -> None:
        """Publish objects whose bytes are written; OSError and nothing changed otherwise."""
        if not places:
            return
        space = self._catalog.space(self._space)
        at = ObjectPlaces(
            np.array([place.appender.number for place in places]),
            np.array([place.offset // BLOCK_BYTES for place in places]),
            np.full(len(places), space),
        )
        records = blank(len(places), RecordKind.PUT)
        segments = self._catalog.segments
        records["segment"] = [segments[place.appender.number].id for place in places]
        records["block"], records["length"], records["key"] = at.block, lengths, keys
        records["stamp"] = stamps
        self.journal.append(records)
        self._catalog.add(keys, at, records["length"], records["stamp"])
        for place in places:
            place.appender.in_flight -= 1
            self.unsynced.add(place.appender.path)
        self.unsynced.add(self.journal.path)
        self._finish()

    def give_up(self, places: Sequence[SegmentPlace]) -> list[Hole]:
        """Release locations that hold no object."""
        for place in places:
            place.appender.in_flight -= 1
        holes = [Hole(place.appender.path, place.offset, place.count) for place in places]
        self._finish()
        return holes

    # ── removing ──────────────────────────────────────────────────────────────────────────────

    def remove(self, rows: ObjectRows) -> list[Hole]:
        """Remove objects; the caller punches the holes. OSError and nothing changed otherwise."""
        if not len(rows):
            return []
        self.journal.append(self._catalog.records_of(RecordKind.DEL, rows))
        table, segments = self._catalog.table, self._catalog.segments
        holes = [
            Hole(segments[segment].path, block * BLOCK_BYTES, count * BLOCK_BYTES)
            for segment, block, count in zip(
                table.segment[rows].tolist(),
                table.block[rows].tolist(),
                blocks_of(table.length[rows]).tolist(),
                strict=True,
            )
        ]
        self._catalog.drop(rows)
        return holes

    def punch(self, holes: Sequence[Hole]) -> None:
        """Give ranges back, neighbours together."""
        for hole in _joined(holes):
            try:
                self.opened.get(hole.path).punch(hole.offset, hole.count)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._counts.add("punch", error=error)

    def delete_empty(self, numbers: Iterable[int]) -> None:
        """Delete segments without live objects, unless a process appends to them."""
        for known in (self._catalog.segments[number] for number in numbers):
            if known.objects or known.deleted:
                continue
            try:
                fd = os.open(known.path, os.O_RDONLY)
            except OSError as error:
                known.deleted = isinstance(error, FileNotFoundError)
                self.opened.forget(known.path)
                continue
            try:
                # Under its lock nothing is added to it, and the sweep sees all earlier additions.
                if lock(fd) and self._catalog.sweep() and not known.objects:
                    delete(known.path)
                    known.deleted = True
                    self.opened.forget(known.path)
            except OSError as error:
                self._counts.add("punch", error=error)
            finally:
                os.close(fd)

    # ── uses and journals ─────────────────────────────────────────────────────────────────────

    def log_uses(self) -> None:
        """Write the uses since the last time, for other processes and later starts."""
        table = self._catalog.table
        rows = np.flatnonzero(table.fresh & table.alive)
        if len(rows):
            self.journal.append(self._catalog.records_of(RecordKind.USE, rows))
            table.fresh[rows] = False

    def renew_journal(self) -> None:
        """Continue in a new journal, and leave the old one to be merged."""
        with self._folder.adding():
            new = Journal(self._folder.new_journal())
        if self._appender is not None:
            id = self._catalog.segments[self._appender.number].id
            new.append(segment_of(id, self._space))
        self._catalog.own.add(new.id)
        old, self.journal = self.journal, new
        old.close()

    def close(self) -> None:
        self._retire()
        self.journal.close()
        self.opened.close()


def sync(paths: Iterable[Path], counts: StoreCounts) -> None:
    """Flush files and folders to the disk: objects before the journals that name them."""
    for path in sorted(paths, key=lambda path: path.suffix != ".data"):
        try:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            counts.add("sync", error=error)


def _joined(holes: Sequence[Hole]) -> list[Hole]:
    joined: list[Hole] = []
    for hole in sorted(holes, key=lambda hole: (hole.path, hole.offset)):
        last = joined[-1] if joined else None
        if last and last.path == hole.path and last.offset + last.count == hole.offset:
            joined[-1] = Hole(last.path, last.offset, last.count + hole.count)
        else:
            joined.append(hole)
    return joined
