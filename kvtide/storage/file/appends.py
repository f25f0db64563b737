"""The way of new objects into a segment: capacity, locations, bytes, records.

`Capacity` keeps all spaces and processes together within the cap, and the file system above the
floor. It evicts the least recently used objects first. Every process counts the objects of all, so
together they exceed the cap by no more than the bytes in flight. Where the file system has less
left than the floor, objects are evicted for it as for the cap. If all of them together were not
enough, none is evicted and the new ones are refused.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtide.storage.file.file_io import FileRange, Mover, Outcomes, padded
from kvtide.storage.file.file_settings import FileSettings, StoreCounts, Sync
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.journal import Words
from kvtide.storage.file.object_table import NONE
from kvtide.storage.file.recovery import LAST_REMOVALS
from kvtide.storage.file.segments import BLOCK_BYTES
from kvtide.storage.file.writer import Hole, SegmentPlace, Writer, sync
from kvtide.storage.store import StoreError

# ── the open store ────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Base:
    """`lock` guards the catalog, the writer and `closed`; files are read and written without it."""

    name: str
    folder: Folder
    settings: FileSettings
    catalog: Catalog
    writer: Writer
    counts: StoreCounts
    space: int
    """The number that the catalog has for the store's own space."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    closed: bool = False

    def look(self) -> None:
        """Under the lock: see what others did, or refuse because the store was closed."""
        if self.closed:
            raise StoreError(f"storage {self.name}: it has been closed; open it again")
        self.catalog.refresh()


# ── capacity ──────────────────────────────────────────────────────────────────────────────────────


class Capacity:
    def __init__(self, base: Base) -> None:
        self._base = base
        self._promised = 0

    def promise(self, need: int) -> bool:
        """Make room for so many bytes; it is theirs until `settle`. False: there is none."""
        base = self._base
        with base.lock:
            held = base.catalog.blocks * BLOCK_BYTES
            over = held + self._promised + need - base.settings.cap_bytes
            short = self._short(need)
            if short > held:
                return False
            holes = self._evict(max(over, short))
            self._promised += need
        self.give_back(holes)
        with base.lock:
            if short > 0 and self._short(0) > 0:
                self._promised -= need
                return False
        return True

    def settle(self, need: int) -> None:
        with self._base.lock:
            self._promised -= need

    def spare(self) -> int:
        """What may be allocated ahead of need."""
        settings = self._base.settings
        return max(0, self._base.folder.free_bytes() - settings.floor_bytes - self._promised)

    def _short(self, need: int) -> int:
        """How many bytes the file system lacks to take so many and keep its floor."""
        new = max(0, self._promised + need - self._base.writer.ahead())
        return self._base.settings.floor_bytes + new - self._base.folder.free_bytes()

    def _evict(self, count: int) -> list[Hole]:
        """Remove the oldest; what the caller has to give back. OSError if it cannot be noted."""
        catalog, holes = self._base.catalog, list[Hole]()
        blocks = -(-count // BLOCK_BYTES)
        while blocks > 0:
            self.give_back(holes)
            rows = catalog.victims(blocks, LAST_REMOVALS)
            if not len(rows):
                return []
            blocks -= int(catalog.table.blocks(rows).sum())
            holes = self._base.writer.remove(rows)
            self._base.counts.add("evicted", len(rows))
        return holes

    def give_back(self, holes: list[Hole]) -> None:
        """To the file system, what nothing lives in: whole segments, or ranges of them."""
        if not holes:
            return
        ids = {int(path.stem, 16) for path in {hole.path for hole in holes}}
        with self._base.lock:
            numbers = map(self._base.catalog.number, sorted(ids))
            self._base.writer.delete_empty(n for n in numbers if n is not None)
        self._base.writer.punch(holes)


# ── appends ───────────────────────────────────────────────────────────────────────────────────────

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
