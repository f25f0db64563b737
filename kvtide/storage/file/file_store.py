"""The file store itself: the calls of the protocol, and the background work."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvtide.storage.file.appends import Capacity, Putter, Slice, StoreState
from kvtide.storage.file.file_io import FileRange, HoleError, IoThreads, Mover, ShortError
from kvtide.storage.file.file_settings import FileSettings, StoreCounts, Sync, folder_of
from kvtide.storage.file.folder import Folder
from kvtide.storage.file.folder_catalog import Catalog
from kvtide.storage.file.folder_follower import FolderSpace
from kvtide.storage.file.journal import RECORD_BYTES, Words, key_words
from kvtide.storage.file.object_table import NONE, ObjectPlaces, ObjectRows
from kvtide.storage.file.recovery import LAST_REMOVALS, enter, merge
from kvtide.storage.file.segments import BLOCK_BYTES, SegmentFile
from kvtide.storage.file.writer import Hole, Writer, sync
from kvtide.storage.store import MISSING, Removed, StoreError, StoreStatus
from kvtide.storage.url import StoreURL

SYNC_EVERY_S = 1.0
LOG_USES_EVERY_S = 60.0
LONGEST_JOURNAL_BYTES = 64 << 20
RECORDS_PER_OBJECT = 2
"""A journal is renewed when it exceeds both: these bytes, and so many records per object."""


class FileStore:
    def __init__(self, url: StoreURL, space: bytes) -> None:
        self.name = str(url)
        self.followed = FolderSpace(folder_of(url), space)
        """What another process follows to know what is stored."""
        counts, folder = StoreCounts(), Folder(folder_of(url))
        catalog = Catalog(folder, counts)
        journal = enter(folder, catalog, counts)
        _give_back_memory()
        try:
            settings = FileSettings.of(url, folder, catalog.blocks * BLOCK_BYTES)
        except StoreError:
            journal.close()
            raise
        writer = Writer(folder, space, catalog, journal, counts)
        number = catalog.space(space)
        self._state = StoreState(self.name, folder, settings, catalog, writer, counts, number)
        self._workers = IoThreads(settings.threads, "kvtide file store")
        self._mover = Mover(self._workers)
        self._capacity = Capacity(self._state)
        self._putter = Putter(self._state, self._capacity, self._mover)
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvtide file keeper", daemon=True)
        self._keeper.start()

    def lend(self, block: memoryview) -> None:
        """Nothing to register: any page-aligned memory is read and written in place."""

    # ── looking up and reading ────────────────────────────────────────────────────────────────

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._state.lock:
            found: list[bool] = (self._find(key_words(keys)) != NONE).tolist()
        return found

    def _find(self, words: Words) -> ObjectRows:
        """Rows of keys, after taking in other processes' changes. Under the lock."""
        self._state.look()
        return self._state.catalog.table.find(words, self._state.space)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        words = key_words(keys)
        views = [_flat(target) for target in targets]
        assert len(keys) == len(views)
        with self._state.lock:
            rows = self._find(words)
            table, asked = self._state.catalog.table, np.flatnonzero(rows != NONE)
            rows = rows[asked]
            at, lengths = table.places(rows), table.length[rows].tolist()
            self._state.catalog.use(rows)
        results = [MISSING] * len(views)
        fits = [n for n, i in enumerate(asked.tolist()) if lengths[n] <= len(views[i])]
        ranges, failures = self._ranges(at, lengths, [views[i] for i in asked.tolist()], fits)
        outcomes = self._mover.read([each for _, each in ranges])
        for (n, _), outcome in zip(ranges, outcomes, strict=True):
            if outcome is None:
                results[asked[n]] = lengths[n]
            else:
                failures[n] = outcome
        if failures:
            self._lost(words[asked], at, failures)
        return results

    def _ranges(
        self, at: ObjectPlaces, lengths: list[int], views: list[memoryview], chosen: list[int]
    ) -> tuple[list[tuple[int, FileRange]], dict[int, OSError]]:
        """The ranges to read, and the objects whose file cannot be opened."""
        ranges, failures = [], {}
        segments, blocks = at.segment.tolist(), at.block.tolist()
        files = {number: self._open(number) for number in set(segments)}
        for n in chosen:
            file = files[segments[n]]
            if isinstance(file, OSError):
                failures[n] = file
            else:
                offset = blocks[n] * BLOCK_BYTES
                each = FileRange(file.fileno(), offset, views[n], lengths[n], file)
                ranges.append((n, each))
        return ranges, failures

    def _open(self, number: int) -> SegmentFile | OSError:
        try:
            return self._state.writer.opened.get(self._state.catalog.segments[number].path)
        except OSError as error:
            return error

    def _lost(self, words: Words, at: ObjectPlaces, failures: dict[int, OSError]) -> None:
        """Count objects that could not be read, and drop those that are gone."""
        holes: list[Hole] = []
        with self._state.lock:
            self._state.look()
            table = self._state.catalog.table
            for n, error in failures.items():
                one = np.array([n])
                row = table.find_at(words[one], at[one])
                if row[0] == NONE:
                    continue  # Another process removed it meanwhile, as it may.
                self._state.counts.add(_why(error), error=error)
                if isinstance(error, HoleError | ShortError):
                    holes += self._remove(row)
                elif isinstance(error, FileNotFoundError | PermissionError):
                    self._state.catalog.drop(row)
        self._capacity.give_back(holes)

    # ── writing ───────────────────────────────────────────────────────────────────────────────

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        words = key_words(keys)
        views = [_flat(source) for source in sources]
        assert len(keys) == len(views)
        catalog = self._state.catalog
        with self._state.lock:
            rows = self._find(words)
            catalog.use(rows[rows != NONE])
            seen, stamps = catalog.additions, catalog.clock.stamps(len(keys))
        there = dict(zip(keys, (rows != NONE).tolist(), strict=True))
        new = {key: n for n, key in enumerate(keys) if not there[key]}
        chosen = list(new.values())
        slices = list(self._putter.slices([views[n] for n in chosen]))
        for some in slices:
            numbers = [chosen[n] for n in some]
            part = Slice(words[numbers], [views[n] for n in numbers], stamps[numbers], seen)
            for n, done in zip(numbers, self._putter.put(part), strict=True):
                there[keys[n]] = done
            seen = part.seen
        # A batch larger than the cap may have evicted its own end.
        return [there[key] for key in keys] if len(slices) < 2 else self.exists(keys)

    # ── removing ──────────────────────────────────────────────────────────────────────────────

    def remove(self, keys: Sequence[bytes]) -> int:
        words = key_words(list(dict.fromkeys(map(bytes, keys))))
        removed = np.zeros(len(words), np.bool_)
        while True:
            with self._state.lock:
                rows = self._find(words)
                removed |= rows != NONE
                rows = rows[rows != NONE][:LAST_REMOVALS]
                holes = self._remove(rows)
            if not len(rows):
                return int(removed.sum())
            self._capacity.give_back(holes)

    def clear(self) -> Removed:
        objects = count = 0
        while True:
            with self._state.lock:
                self._state.look()
                rows = self._state.catalog.of_space(self._state.space)[:LAST_REMOVALS]
                objects += len(rows)
                count += int(self._state.catalog.table.length[rows].sum())
                holes = self._remove(rows)
            if not len(rows):
                return Removed(objects, count)
            self._capacity.give_back(holes)

    def _remove(self, rows: ObjectRows) -> list[Hole]:
        try:
            return self._state.writer.remove(rows)
        except OSError as error:
            raise self._state.folder.refusal(error) from error

    # ── background work ───────────────────────────────────────────────────────────────────────

    def _keep(self) -> None:
        logged = time.monotonic()
        while not self._stop.wait(SYNC_EVERY_S):
            try:
                self._sync()
                if time.monotonic() - logged > LOG_USES_EVERY_S:
                    logged = time.monotonic()
                    self._log_uses()
                self._renew()
            except Exception as error:
                self._state.counts.add("keeping", error=error)

    def _sync(self) -> None:
        with self._state.lock:
            paths, self._state.writer.unsynced = self._state.writer.unsynced, set()
        if self._state.settings.sync is Sync.BATCH:
            sync(paths, self._state.counts)

    def _log_uses(self) -> None:
        with self._state.lock:
            self._state.look()
            self._state.writer.log_uses()
            self._state.writer.delete_empty(range(len(self._state.catalog.segments)))

    def _renew(self) -> None:
        described = len(self._state.catalog.table) * RECORD_BYTES * RECORDS_PER_OBJECT
        if self._state.writer.journal.bytes > max(LONGEST_JOURNAL_BYTES, described):
            with self._state.lock:
                self._state.writer.renew_journal()
            with self._state.folder.alone():
                merge(self._state.folder)

    def status(self) -> StoreStatus:
        with self._state.lock:
            self._state.look()
            space, segments = self._state.space, self._state.catalog.segments
            ours = [known for known in segments if known.space == space]
            buffered = "the file system refuses direct I/O, so the page cache is used"
            return StoreStatus(
                sum(known.objects for known in ours),
                sum(known.bytes for known in ours),
                self._state.catalog.blocks * BLOCK_BYTES,
                self._state.settings.cap_bytes,
                (() if self._state.writer.direct else (buffered,)) + self._state.counts.sentences(),
            )

    def close(self) -> None:
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
        self._stop.set()
        self._keeper.join()
        self._workers.close()
        try:
            with self._state.lock:
                self._state.writer.log_uses()
            self._sync()
        except OSError as error:
            self._state.counts.add("journal", error=error)
        finally:
            self._state.writer.close()


def _flat(memory: memoryview) -> memoryview:
    """The memory as one-dimensional bytes."""
    flat = memoryview(memory)
    return flat if flat.format == "B" and flat.ndim == 1 else flat.cast("B")


def _why(error: OSError) -> str:
    if isinstance(error, ShortError):
        return "short"
    if isinstance(error, HoleError):
        return "hole"
    if isinstance(error, FileNotFoundError | PermissionError):
        return "gone"
    return "read"


def _give_back_memory() -> None:
    """Return the memory that reading the journals took and freed; libc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
