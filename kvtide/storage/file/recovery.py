"""Opening a folder: finished journals are merged, and what a crash left behind is cleared away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtide.storage.file.counts import StoreCounts
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.journal import Journal
from kvtide.storage.file.merging import Merged, merge
from kvtide.storage.file.records import BLOCK_BYTES
from kvtide.storage.file.segments import delete, lock, punch

TOGETHER = 128
"""Segments that are looked at together, each of which is then open."""


def enter(folder: Folder, catalog: Catalog, counts: StoreCounts) -> Journal:
    """Read everything there is, and start a journal of one's own."""
    try:
        with folder.alone():
            merged = merge(folder)
            counts.add("corrupt", merged.corrupt)
            journal = Journal(folder.new_journal())
            catalog.own.add(journal.id)
            catalog.load()
            # What an unreadable journal speaks of must not be taken for left-overs.
            if not counts["journal"]:
                _clear_away(folder, catalog, merged, counts)
            return journal
    except OSError as error:
        raise folder.refusal(error) from error


def _clear_away(folder: Folder, catalog: Catalog, merged: Merged, counts: StoreCounts) -> None:
    removals: dict[int, list[tuple[int, int]]] = {}
    for segment, block, length in merged.removals:
        blocks = max(-(-length // BLOCK_BYTES), 1)
        removals.setdefault(segment, []).append((block * BLOCK_BYTES, blocks * BLOCK_BYTES))
    ids = folder.segment_ids()
    for id in (removals.keys() & ids) - merged.segments:
        with _counted(counts), contextlib.closing(_File(folder.segment(id))) as file:
            file.punch(removals[id])
    left = [id for id in ids if id in merged.segments or _is_empty(catalog, id)]
    for start in range(0, len(left), TOGETHER):
        _tidy(folder, catalog, left[start : start + TOGETHER], counts)


def _is_empty(catalog: Catalog, id: int) -> bool:
    number = catalog.number(id)
    return number is None or not catalog.segments[number].objects


def _tidy(folder: Folder, catalog: Catalog, ids: list[int], counts: StoreCounts) -> None:
    """Of segments that nobody appends to, give back all but what lives in them."""
    files: dict[int, _File] = {}
    for id in ids:
        with _counted(counts):
            files[id] = _File(folder.segment(id))
    # Once a segment's lock is ours nothing is added to it, and all that was will be seen.
    locked = {id: file for id, file in files.items() if lock(file.fd)}
    catalog.sweep()
    gaps = _gaps(catalog, set(locked))
    for id, file in locked.items():
        with _counted(counts):
            number = catalog.number(id)
            if number is None or number not in gaps:
                delete(folder.segment(id))
            else:
                file.cut(gaps[number].end)
                file.punch(gaps[number].ranges)
    for file in files.values():
        file.close()


@contextlib.contextmanager
def _counted(counts: StoreCounts) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        counts.add("punch", error=error)


class _File:
    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR)

    def punch(self, ranges: list[tuple[int, int]]) -> None:
        for offset, count in ranges:
            punch(self.fd, offset, count)

    def cut(self, end: int) -> None:
        # A file that is shorter than its objects stays so: it must not grow by zeros.
        if os.fstat(self.fd).st_size > end:
            os.ftruncate(self.fd, end)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class _Gaps:
    """Ranges of a segment between the objects that live in it, and where the last one ends."""

    end: int
    ranges: list[tuple[int, int]]


def _gaps(catalog: Catalog, ids: set[int]) -> dict[int, _Gaps]:
    """For segments by their number, if anything lives in them."""
    numbers = {catalog.number(id) for id in ids}
    table = catalog.table
    rows = catalog.of_segments(number for number in numbers if number is not None)
    rows = rows[np.lexsort((table.block[rows], table.segment[rows]))]
    segments, starts = table.segment[rows], table.block[rows].astype(np.int64)
    ends = starts + table.blocks(rows)
    is_first = np.append(True, segments[1:] != segments[:-1])[: len(rows)]
    before = np.where(is_first, 0, np.append(0, ends[:-1])[: len(rows)])
    lasts = ends[np.append(is_first[1:], True)[: len(rows)]]
    gaps = {
        number: _Gaps(last * BLOCK_BYTES, [])
        for number, last in zip(segments[is_first].tolist(), lasts.tolist(), strict=True)
    }
    for row in np.flatnonzero(before < starts).tolist():
        start, count = int(before[row]), int(starts[row] - before[row])
        gaps[int(segments[row])].ranges.append((start * BLOCK_BYTES, count * BLOCK_BYTES))
    return gaps
