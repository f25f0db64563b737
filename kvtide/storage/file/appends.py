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
class StoreState:
    """The shared state of an open store.

    `lock` guards the catalog, the writer and `closed`; files are read and written without it.
    """

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
        """Under the lock: take in other processes' changes; StoreError if the store was closed."""
        if self.closed:
            raise StoreError(f"storage {self.name}: it has been closed; open it again")
        self.catalog.refresh()


# ── capacity ──────────────────────────────────────────────────────────────────────────────────────


class Capacity:
    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._promised = 0

    def promise(self, need: int) -> bool:
        """Reserve so many bytes until `settle`, evicting if need be. False: there are none."""
        state = self._state
        with state.lock:
            held = state.catalog.blocks * BLOCK_BYTES
            over = held + self._promised + need - state.settings.cap_bytes
            short = self._short(need)
            if short > held:
                return False
            holes = self._evict(max(over, short))
            self._promised += need
        self.give_back(holes)
        with state.lock:
            if short > 0 and self._short(0) > 0:
                self._promised -= need
                return False
        return True

    def settle(self, need: int) -> None:
        with self._state.lock:
            self._promised -= need

    def spare(self) -> int:
        """Bytes that may be allocated ahead of need."""
        settings = self._state.settings
        return max(0, self._state.folder.free_bytes() - settings.floor_bytes - self._promised)

    def _short(self, need: int) -> int:
        """How many bytes the file system lacks to take so many and keep its floor."""
        new = max(0, self._promised + need - self._state.writer.ahead())
        return self._state.settings.floor_bytes + new - self._state.folder.free_bytes()

    def _evict(self, count: int) -> list[Hole]:
        """Remove the oldest; the holes to give back. OSError if the journal cannot be written."""
        catalog, holes = self._state.catalog, list[Hole]()
        blocks = -(-count // BLOCK_BYTES)
        while blocks > 0:
            self.give_back(holes)
            rows = catalog.victims(blocks, LAST_REMOVALS)
            if not len(rows):
                return []
            blocks -= int(catalog.table.blocks(rows).sum())
            holes = self._state.writer.remove(rows)
            self._state.counts.add("evicted", len(rows))
        return holes

    def give_back(self, holes: list[Hole]) -> None:
        """Return space to the file system: whole segments, or ranges of them."""
        if not holes:
            return
        ids = {int(path.stem, 16) for path in {hole.path for hole in holes}}
        with self._state.lock:
            numbers = map(self._state.catalog.number, sorted(ids))
            self._state.writer.delete_empty(n for n in numbers if n is not None)
        self._state.writer.punch(holes)


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
    def __init__(self, state: StoreState, capacity: Capacity, mover: Mover) -> None:
        self._state, self._capacity, self._mover = state, capacity, mover

    def slices(self, sources: Sequence[memoryview]) -> Iterator[list[int]]:
        """Numbers of objects that are written together; none of those that are too large."""
        cap = self._state.settings.cap_bytes
        some: list[int] = []
        held = 0
        for n, source in enumerate(sources):
            count = padded(len(source))
            if count > cap:
                self._state.counts.add("large")
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
            if not self._capacity.promise(need):
                self._state.counts.add("floor", len(each.sources))
                return [False] * len(each.sources)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._state.folder.refusal(error) from error
            self._state.counts.add("full", len(each.sources), error)
            return [False] * len(each.sources)
        try:
            return self._put(each)
        except OSError as error:
            raise self._state.folder.refusal(error) from error
        finally:
            self._capacity.settle(need)

    def _put(self, each: Slice) -> list[bool]:
        state = self._state
        with state.lock:
            places = self._take(each.sources)
        ranges = [
            FileRange(place.appender.fileno(), place.offset, source, len(source))
            for place, source in zip(places, each.sources, strict=False)
        ]
        try:
            outcomes = self._mover.write(ranges)
            if state.settings.sync is Sync.ALWAYS:
                paths = {place.appender.path for place in places}
                sync(paths | {state.folder.segments, state.folder.journals}, state.counts)
            with state.lock:
                done, holes = self._commit(each, places, outcomes)
                journal = state.writer.journal.path
        except BaseException:
            with state.lock:
                state.writer.give_up(places)
            raise
        state.writer.punch(holes)
        if state.settings.sync is Sync.ALWAYS:
            sync([journal], state.counts)
        return done

    def _take(self, sources: list[memoryview]) -> list[SegmentPlace]:
        """Locations for the first objects; fewer when the disk is full."""
        state, places = self._state, list[SegmentPlace]()
        spare = self._capacity.spare()
        state.writer.look()
        try:
            for source in sources:
                places.append(state.writer.take(len(source), state.settings.segment_bytes, spare))
        except OSError as error:
            if error.errno not in _FULL:
                state.writer.give_up(places)
                raise
            state.counts.add("full", len(sources) - len(places), error)
        return places

    def _commit(
        self, each: Slice, places: list[SegmentPlace], outcomes: Outcomes
    ) -> tuple[list[bool], list[Hole]]:
        """Publish what was written; which objects exist now, and the holes to punch."""
        state = self._state
        self._keep_journal()
        state.look()
        there = [False] * len(each.sources)
        if state.catalog.additions != each.seen:
            there = (state.catalog.table.find(each.keys, state.space) != NONE).tolist()
        gone = {each for each in {place.appender for place in places} if not each.is_there()}
        good = []
        for n, (place, outcome) in enumerate(zip(places, outcomes, strict=True)):
            if outcome is not None or place.appender in gone:
                state.counts.add(_reason(outcome), error=outcome)
            elif not there[n]:  # Otherwise another process wrote it meanwhile.
                good.append(n)
        try:
            lengths = [len(each.sources[n]) for n in good]
            chosen = [places[n] for n in good]
            state.writer.commit(chosen, each.keys[good], lengths, each.stamps[good])
            for n in good:
                there[n] = True
        except OSError as error:
            state.counts.add(_reason(error), len(good), error)
            good = []
        each.seen += 1 if good else 0
        kept = set(good)
        return there, state.writer.give_up([p for n, p in enumerate(places) if n not in kept])

    def _keep_journal(self) -> None:
        """Start another journal if ours was deleted; objects that only it named are lost."""
        state = self._state
        if not state.writer.journal.is_there():
            state.counts.add("journal")
            state.writer.renew_journal()
            with state.folder.adding():
                state.catalog.load()


def _reason(error: OSError | None) -> str:
    return "full" if error is not None and error.errno in _FULL else "write"
