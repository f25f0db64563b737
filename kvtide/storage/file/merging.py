"""One journal out of those of finished processes.

Done by whoever opens the folder, and by a process whose own journal has grown too long, alone in
the folder. The new journal names those it replaces and comes into being by a rename: from then
on they do not count, even if a crash leaves their files behind.

Kept are the objects that live, in the order of their last use, and removals of objects that only
a living process's journal knows of. Everything else is left out, so a journal is as long as what
it describes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.folder import Folder, sync_folder
from kvtide.storage.file.journal import Tail, nothing
from kvtide.storage.file.records import RecordKind, Records, head, replaces, sealed
from kvtide.storage.file.segments import lock

LAST_REMOVALS = 4096
"""As many of a journal's last removals may not have been punched out when its process ended."""
MERGED_SHARE = 4
MAX_FINISHED = 8


@dataclass(slots=True)
class Merged:
    """What was found: segments whose process ended, its last removals, records that were bad."""

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
    """A long journal is not written anew for the sake of a few short ones."""
    new = sum(len(each.records) for each in recent)
    old = sum(len(each.records) for each in finished) - new
    return bool(recent) and (new * MERGED_SHARE > old or len(finished) > MAX_FINISHED)


def _finished(folder: Folder) -> tuple[list[_Finished], set[int] | None]:
    """Journals nobody holds the lock of, and the segments that the others name; None without."""
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
            pass  # Unreadable for us: left to who can read it.
        living = (living or set()) | set(named["segment"].tolist())
    return finished, living


def _of(records: Records, kind: RecordKind) -> Records:
    found: Records = records[records["kind"] == kind]
    return found


def _compact(journals: list[Records], segments: set[int], living: set[int] | None) -> list[Records]:
    """What is kept. Records are copied once only: there may be millions.

    Of a segment whose file is gone only removals are: who reads a journal that still speaks of its
    objects must not take them for alive.
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
