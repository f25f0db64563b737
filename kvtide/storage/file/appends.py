"""The way of new objects into a segment: room, places, bytes, records."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtide.storage.file.base import Base
from kvtide.storage.file.capacity import Capacity
from kvtide.storage.file.file_io import FileRange, Mover, Outcomes, padded
from kvtide.storage.file.file_settings import Sync
from kvtide.storage.file.object_table import NONE
from kvtide.storage.file.records import Words
from kvtide.storage.file.writer import Hole, SegmentPlace, sync

SLICE_BYTES = 256 << 20
"""A batch is written in slices of this, or of a quarter of the cap if that is less."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class Slice:
    """New objects, no two of one key. `seen`: the catalog's additions when they were not there."""

    keys: Words
    sources: list[memoryview]
    stamps: Words
    seen: int

    def bytes(self) -> int:
        return sum(padded(len(source)) for source in self.sources)


class Putter:
    def __init__(self, base: Base, room: Capacity, mover: Mover) -> None:
        self._base, self._room, self._mover = base, room, mover

    def slices(self, sources: Sequence[memoryview]) -> Iterator[list[int]]:
        """Numbers of objects that are written together; none of those that are too large."""
        cap = self._base.settings.cap_bytes
        some: list[int] = []
        held = 0
        for n, source in enumerate(sources):
            count = padded(len(source))
            if count > cap:
                self._base.counts.add("large")
                continue
            if some and held + count > min(SLICE_BYTES, cap // 4):
                yield some
                some, held = [], 0
            some.append(n)
            held += count
        if some:
            yield some

    def put(self, each: Slice) -> list[bool]:
        """For each object, whether it is there now."""
        need = each.bytes()
        try:
            if not self._room.promise(need):
                self._base.counts.add("floor", len(each.sources))
                return [False] * len(each.sources)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._base.folder.refusal(error) from error
            self._base.counts.add("full", len(each.sources), error)
            return [False] * len(each.sources)
        try:
            return self._put(each)
        except OSError as error:
            raise self._base.folder.refusal(error) from error
        finally:
            self._room.settle(need)

    def _put(self, each: Slice) -> list[bool]:
        base = self._base
        with base.lock:
            places = self._take(each.sources)
        ranges = [
            FileRange(place.appender.fileno(), place.offset, source, len(source))
            for place, source in zip(places, each.sources, strict=False)
        ]
        try:
            outcomes = self._mover.write(ranges)
            if base.settings.sync is Sync.ALWAYS:
                paths = {place.appender.path for place in places}
                sync(paths | {base.folder.segments, base.folder.journals}, base.counts)
            with base.lock:
                done, holes = self._commit(each, places, outcomes)
                journal = base.writer.journal.path
        except BaseException:
            with base.lock:
                base.writer.give_up(places)
            raise
        base.writer.punch(holes)
        if base.settings.sync is Sync.ALWAYS:
            sync([journal], base.counts)
        return done

    def _take(self, sources: list[memoryview]) -> list[SegmentPlace]:
        """Places for the first so many; fewer when the disk is full."""
        base, places = self._base, list[SegmentPlace]()
        spare = self._room.spare()
        base.writer.look()
        try:
            for source in sources:
                places.append(base.writer.take(len(source), base.settings.segment_bytes, spare))
        except OSError as error:
            if error.errno not in _FULL:
                base.writer.give_up(places)
                raise
            base.counts.add("full", len(sources) - len(places), error)
        return places

    def _commit(
        self, each: Slice, places: list[SegmentPlace], outcomes: Outcomes
    ) -> tuple[list[bool], list[Hole]]:
        """Let live what was written; which are there now, and what is to be punched out again."""
        base = self._base
        self._keep_journal()
        base.look()
        there = [False] * len(each.sources)
        if base.catalog.additions != each.seen:
            there = (base.catalog.table.find(each.keys, base.space) != NONE).tolist()
        gone = {each for each in {place.appender for place in places} if not each.is_there()}
        good = []
        for n, (place, outcome) in enumerate(zip(places, outcomes, strict=True)):
            if outcome is not None or place.appender in gone:
                base.counts.add(_reason(outcome), error=outcome)
            elif not there[n]:  # Otherwise someone else wrote it meanwhile.
                good.append(n)
        try:
            lengths = [len(each.sources[n]) for n in good]
            chosen = [places[n] for n in good]
            base.writer.commit(chosen, each.keys[good], lengths, each.stamps[good])
            for n in good:
                there[n] = True
        except OSError as error:
            base.counts.add(_reason(error), len(good), error)
            good = []
        each.seen += 1 if good else 0
        kept = set(good)
        return there, base.writer.give_up([p for n, p in enumerate(places) if n not in kept])

    def _keep_journal(self) -> None:
        """Start another if someone deleted ours; what only it spoke of is lost."""
        base = self._base
        if not base.writer.journal.is_there():
            base.counts.add("journal")
            base.writer.renew_journal()
            with base.folder.adding():
                base.catalog.load()


def _reason(error: OSError | None) -> str:
    return "full" if error is not None and error.errno in _FULL else "write"
