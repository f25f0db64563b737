"""Opening a folder: merge finished journals, and clear away the left-overs of a crash.

Merging makes one journal out of those of finished processes. It runs alone in the folder, when a
process opens it and when a journal has grown too long. The merged journal names those it replaces
and appears by a rename: from then on they do not count, even if a crash leaves their files behind.

It keeps the live objects in the order of their last use, and the removals of objects that only a
living process's journal names. So a journal is as long as what it describes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.file_settings import StoreCounts
from kvtide.storage.file.folder import Folder, sync_folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.journal import (
    Journal,
    RecordKind,
    Records,
    Tail,
    head,
    nothing,
    replaces,
    sealed,
)
from kvtide.storage.file.segments import BLOCK_BYTES, delete, lock, punch

# ── merging journals ──────────────────────────────────────────────────────────────────────────────

LAST_REMOVALS = 4096
"""So many of a journal's last removals may lack their holes when its process ended."""
MERGE_DIVISOR = 4
MAX_FINISHED = 8


@dataclass(slots=True)
class Merged:
    """Segments of finished processes, their last removals, and the number of damaged records."""

    segments: set[int] = field(default_factory=set)
    removals: list[tuple[int, int, int]] = field(default_factory=list)
    corrupt: int = 0


@dataclass(slots=True)
class _Finished:
    tail: Tail
    records: Records


def merge(folder: Folder) -> Merged:
    """The caller is alone in the folder."""
    for path in folder.journals.glob("*.tmp"):
        path.unlink()
    finished, living = _finished(folder)
    replaced = {
        int(id) for each in finished for id in _of(each.records, RecordKind.REPLACES)["segment"]
    }
    for each in finished:
        if each.tail.id in replaced:
            each.tail.path.unlink(missing_ok=True)
    finished = [each for each in finished if each.tail.id not in replaced]
    recent = [each for each in finished if not each.tail.is_merged]
    merged = Merged(corrupt=sum(each.tail.corrupt for each in finished))
    for each in recent:
        merged.segments.update(map(int, _of(each.records, RecordKind.SEGMENT)["segment"]))
        last = _of(each.records, RecordKind.DEL)[-LAST_REMOVALS:]
        merged.removals += zip(
            last["segment"].tolist(), last["block"].tolist(), last["length"].tolist(), strict=True
        )
    if _is_due(finished, recent):
        records = _compact([each.records for each in finished], folder.segment_ids(), living)
        _replace(folder, [each.tail for each in finished], records)
    return merged


def _is_due(finished: list[_Finished], recent: list[_Finished]) -> bool:
    """A long journal is not rewritten for a few short ones."""
    new = sum(len(each.records) for each in recent)
    old = sum(len(each.records) for each in finished) - new
    return bool(recent) and (new * MERGE_DIVISOR > old or len(finished) > MAX_FINISHED)


def _finished(folder: Folder) -> tuple[list[_Finished], set[int] | None]:
    """Journals whose lock is free, and the segments that the others name; None without others."""
    finished: list[_Finished] = []
    living: set[int] | None = None
    for path in folder.journal_paths():
        named = nothing()
        try:
            tail = Tail(path)
            if lock(tail.fileno()):
                finished.append(_Finished(tail, tail.read_whole()))
                continue
            named = _of(tail.read(), RecordKind.SEGMENT)
        except OSError:
            pass  # Unreadable for this process: left to one that can read it.
        living = (living or set()) | set(named["segment"].tolist())
    return finished, living


def _of(records: Records, kind: RecordKind) -> Records:
    found: Records = records[records["kind"] == kind]
    return found


def _compact(journals: list[Records], segments: set[int], living: set[int] | None) -> list[Records]:
    """The records to keep. They are copied once only: there may be millions.

    Of a segment whose file is gone only removals are kept: a reader of a journal that still names
    its objects must not take them for alive.
    """
    records = np.concatenate(journals) if len(journals) > 1 else journals[0]
    named = segments | (living or set())
    ids = np.append(np.sort(np.fromiter(named, np.uint64, len(named))), np.uint64(0))
    is_there = np.array([id in segments for id in ids.tolist()])
    numbers = np.searchsorted(ids[:-1], records["segment"])
    kinds = np.where(ids[numbers] == records["segment"], records["kind"], 0)
    kinds[(kinds != RecordKind.DEL) & ~is_there[numbers]] = 0
    codes = numbers.astype(np.uint64) << np.uint64(32) | records["block"]

    of_segments = records[kinds == RecordKind.SEGMENT]
    of_segments = of_segments[np.unique(of_segments["segment"], return_index=True)[1]]
    puts = np.flatnonzero(kinds == RecordKind.PUT)
    put_codes = codes[puts]
    if (put_codes[1:] <= put_codes[:-1]).any():
        put_codes, first = np.unique(put_codes, return_index=True)
        puts = puts[first]
    dels, uses = np.flatnonzero(kinds == RecordKind.DEL), np.flatnonzero(kinds == RecordKind.USE)
    stamps = _latest(records["stamp"], puts, put_codes, uses, codes[uses])
    alive = ~np.isin(put_codes, codes[dels])
    order = np.argsort(stamps[alive], kind="stable")
    kept = records[puts[alive][order]]
    kept["stamp"] = stamps[alive][order]
    unmatched = dels[~np.isin(codes[dels], put_codes)] if living is not None else dels[:0]
    return [of_segments, kept, records[unmatched]]


def _latest(
    stamps: NDArray[np.uint64],
    puts: NDArray[np.int64],
    put_codes: NDArray[np.uint64],
    uses: NDArray[np.int64],
    use_codes: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """When each object was last used. `put_codes` are sorted."""
    latest = stamps[puts]
    if len(puts) and len(uses):
        at = np.minimum(np.searchsorted(put_codes, use_codes), len(puts) - 1)
        found = put_codes[at] == use_codes
        np.maximum.at(latest, at[found], stamps[uses[found]])
    return latest


def _replace(folder: Folder, tails: list[Tail], records: list[Records]) -> None:
    path = folder.new_journal(".merged")
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for part in [head(), replaces([tail.id for tail in tails]), *records]:
            file.write(sealed(part))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(folder.journals)
    for tail in tails:
        Path(tail.path).unlink(missing_ok=True)


# ── clearing away ─────────────────────────────────────────────────────────────────────────────────

TOGETHER = 128
"""Segments that are cleared together, and open at the same time."""


def enter(folder: Folder, catalog: Catalog, counts: StoreCounts) -> Journal:
    """Read all journals, and start one for this process."""
    try:
        with folder.alone():
            merged = merge(folder)
            counts.add("corrupt", merged.corrupt)
            journal = Journal(folder.new_journal())
            catalog.own.add(journal.id)
            catalog.load()
            # Objects of an unreadable journal must not be taken for left-overs.
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
    """Give back all but the live objects of segments that no process appends to."""
    files: dict[int, _File] = {}
    for id in ids:
        with _counted(counts):
            files[id] = _File(folder.segment(id))
    # Under a segment's lock nothing is added to it, and the sweep sees all earlier additions.
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
