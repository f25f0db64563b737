"""The link between the host and a store: thread pools that look up, read and write pages.

    look ──▶ [looker]   exists                   which of these pages the store has
    read ──▶ [readers]  read, check              objects become host pages, in the order asked
    write ─▶ [writer]   exists, seal, write      host pages become objects, if not there yet

`look_behind` and `read_behind` are what no request waits for: the writer does it, behind writes.

Workers are supervised: an exception of the store fails the storage request and is counted, and the
worker continues. A store whose calls fail repeatedly, or do not return, is left alone for a while
(`breaker`). A corrupt object is counted and removed from the store.

A page is an object for its anchor and one for each optional sidecar. It is whole with the anchor's;
a sidecar whose object is missing or corrupt is absent from it. A page that ranks of another shape
stored is several objects, each with some of the rows, and whole with all of them (`shapes`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvtide.spec import RankShape
from kvtide.storage.bounce_buffers import BounceBuffers
from kvtide.storage.codec import CodedStore
from kvtide.storage.objects import CorruptObjectError, ObjectFormat
from kvtide.storage.store import CORRUPT, MISSING, LingeringError, Store, StoreError
from kvtide.tiers.buffers import Buffers
from kvtide.transfer.breaker import Breaker
from kvtide.transfer.host_pages import HostPages
from kvtide.transfer.read_speed import ReadSpeed
from kvtide.transfer.shapes import OtherShapes, PagePart
from kvtide.transfer.storage_requests import (
    Lookup,
    PageBatch,
    Paging,
    Reading,
    SoughtPage,
    StoredPage,
    Writing,
)

T = TypeVar("T")

BATCH_BYTES = 32 << 20
READERS = 2
STUCK_S = 30.0
"""A call that takes longer counts as one that never returns."""

PAUSE_S = 0.5e-3
"""How long a read that may not begin yet leaves its worker to others."""

log = logging.getLogger("kvtide")


class _SparedError(StoreError):
    """A call that was not made, since the breaker is open."""


class PageObject(NamedTuple):
    """One object of page number `page` of a batch. `part`: how it lies in the host page, if ranks
    of another shape stored it."""

    page: int
    format: ObjectFormat
    slot: int
    key: bytes
    part: PagePart | None = None


class StoreLink:
    """Counters by name, `last_error` for reports, and the measured read speed.

    read, written, known    objects: restored, stored, there already
    combined                objects among those read that ranks of another shape stored
    missing, corrupt        objects that were expected and not there, or not what they should be
    draftless               pages that came without a sidecar's object
    refused                 objects the store would not take
    errors                  calls that failed
    spared                  calls that were not made, since others had failed

    `moved_bytes` counts what was read ("fetch") and written ("store").
    """

    def __init__(
        self,
        store: Store,
        formats: Mapping[str, ObjectFormat],
        host: Buffers,
        shapes: OtherShapes | None = None,
        *,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.last_error = ""
        self.read_speed = ReadSpeed(clock)
        self.breakers = {call: Breaker(clock) for call in ("exists", "read", "write", "remove")}
        self._objects_of = formats
        self._formats = {
            name: [one for one in formats.values() if one.anchor == name]
            for name in formats
            if not formats[name].is_sidecar
        }
        self._host_pages = HostPages(host, formats)
        self._shapes = shapes
        self._batch_bytes = batch_bytes
        self._clock = clock
        self._lock = threading.Lock()
        store.lend(self._host_pages.block)
        if isinstance(store, CodedStore):
            store.expect(list(formats.values()))
        self._looker = _ThreadPool("look", 1, clock)
        self._readers = _ThreadPool("read", READERS, clock)
        self._writer = _ThreadPool("write", 1, clock)

    # -- what can be asked ------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether calls may succeed now."""
        pools = (self._looker, self._readers, self._writer)
        failing = any(self.breakers[call].open for call in ("exists", "read"))
        return not failing and not any(pool.stuck for pool in pools)

    def look(self, pages: Callable[[], Sequence[SoughtPage]], timeout_s: float) -> Lookup:
        """Ask which pages the store has, stored by this shape or another. The worker computes their
        keys, too."""
        return self._asked(Lookup(pages, self._clock() + timeout_s, self._clock), self._looker)

    def look_behind(self, pages: Callable[[], Sequence[SoughtPage]], timeout_s: float) -> Lookup:
        """The same where no request waits."""
        return self._asked(Lookup(pages, self._clock() + timeout_s, self._clock), self._writer)

    def _asked(self, lookup: Lookup, workers: _ThreadPool) -> Lookup:
        if not self.available:
            self._count(spared=1)
            lookup.error = _SparedError(f"{self.store.name} does not answer")
            return lookup
        workers.put(lambda staging: self._look(lookup))
        return lookup

    def read(
        self,
        pages: Sequence[StoredPage],
        timeout_s: float,
        may_begin: Callable[[], bool] | None = None,
    ) -> Reading:
        """Read pages into their host slots, in this order.

        Nothing is written there before `may_begin` says so: the device may still use the slots.
        """
        reading = self._reading(pages, timeout_s)
        reading.may_begin = may_begin
        for _ in range(min(READERS, len(reading.batches))):
            self._readers.put(partial(self._reading_turn, reading))
        return reading

    def read_behind(self, pages: Sequence[StoredPage], timeout_s: float) -> Reading:
        """The same where no request waits. It says nothing of the store's speed."""
        reading = self._reading(pages, timeout_s)
        read = partial(self._read, reading, ReadSpeed(self._clock))
        self._writer.put(partial(self._turn, reading, read))
        return reading

    def _reading(self, pages: Sequence[StoredPage], timeout_s: float) -> Reading:
        deadline = self._clock() + timeout_s
        return Reading(pages, self._sizes(pages), self._batch_bytes, deadline, self._clock)

    def write(self, pages: Sequence[StoredPage], timeout_s: float) -> Writing:
        """Store pages from their host slots."""
        deadline = self._clock() + timeout_s
        writing = Writing(pages, self._sizes(pages), self._batch_bytes, deadline, self._clock)
        self._writer.put(partial(self._turn, writing, partial(self._write, writing)))
        return writing

    def remove(self, pages: Sequence[tuple[bytes, bytes]]) -> Future[int]:
        """Remove all objects of these pages, in all anchors, whatever shape stored them.

        A page is its key and the packed tokens of the holdback behind it.
        """
        formats = [one for of_anchor in self._formats.values() for one in of_anchor]

        def remove(store: Store) -> int:
            keys = [one.key(*page) for page in pages for one in formats]
            if self._shapes is not None:
                keys += self._shapes.object_keys(pages, store.exists)
            return store.remove(keys)

        return self.ask(remove)

    def read_bytes(
        self, anchor: str, shape: RankShape | None, without: Collection[str] = ()
    ) -> int:
        """The bytes of a page's objects, as this shape or another stored them."""
        parts = self._parts(anchor, shape)
        return sum(one.bytes for one, _ in parts if one.pool not in without)

    def ask(self, function: Callable[[Store], T]) -> Future[T]:
        """Run a function of the store on the writer, after the writes submitted so far."""
        answer: Future[T] = Future()

        def run(staging: BounceBuffers) -> bool:
            if not answer.set_running_or_notify_cancel():
                return False  # The caller has cancelled it.
            try:
                answer.set_result(function(self.store))
            except BaseException as error:  # The caller waits, even if the thread should end.
                self._note(error)
                answer.set_exception(error)
            return False

        self._writer.put(run)
        return answer

    def close(self, timeout_s: float) -> bool:
        """End the workers, then the store; False if a call did not return in time."""
        deadline = time.monotonic() + timeout_s
        pools = (self._looker, self._readers, self._writer)
        for pool in pools:
            pool.end()
        alive = [pool for pool in pools if not pool.join(deadline)]
        if alive:
            return False
        try:
            self.store.close()
        except BaseException as error:  # The store is not used any more, whatever it raises.
            self._note(error)
        return True

    # -- on the workers ---------------------------------------------------------------------

    def _look(self, lookup: Lookup) -> bool:
        if lookup.stopped:
            return False
        try:
            pages = lookup.pages()
            found = self._found(pages)
            if self._shapes is not None and not all(found):
                lookup.shapes = self._shapes.find(pages, found, self._answers)
                found = [there or n in lookup.shapes for n, there in enumerate(found)]
            lookup.found = found
        except BaseException as error:
            lookup.error = self._note(error)
        return False

    def _found(self, pages: Sequence[SoughtPage]) -> list[bool]:
        """Which of these objects the store has; one without a row on this rank counts as there."""
        known = [n for n, page in enumerate(pages) if page.pool in self._objects_of]
        keys = [self._objects_of[pages[n].pool].key(pages[n].key, pages[n].after) for n in known]
        found = [True] * len(pages)
        for number, there in zip(known, self._answers("exists", keys) if keys else (), strict=True):
            found[number] = there
        return found

    def _reading_turn(self, reading: Reading, staging: BounceBuffers) -> bool:
        """A turn of a read, or of waiting until it may begin."""
        if reading.waits:
            time.sleep(PAUSE_S)
            return True
        return self._turn(reading, partial(self._read, reading, self.read_speed), staging)

    def _turn(
        self,
        paging: Paging,
        do: Callable[[PageBatch, BounceBuffers], list[bool]],
        staging: BounceBuffers,
    ) -> bool:
        """Do one batch of a request; True if it wants another turn."""
        batch = paging.claim()
        if batch is None:
            return False
        try:
            paging.finish(batch, do(batch, staging))
        except BaseException as error:  # A batch that never ends would keep its slots for ever.
            if isinstance(error, LingeringError):
                paging.linger(error.lingers_s)
                staging.linger(error.lingers_s)
            paging.fail(batch, self._note(error))
        return True

    def _read(
        self, reading: Reading, speed: ReadSpeed, batch: PageBatch, staging: BounceBuffers
    ) -> list[bool]:
        objects = self._objects(reading.pages[batch.start : batch.end])
        targets, staged = self._memory(objects, staging)
        whole = [True] * (batch.end - batch.start)
        began, size, restored = speed.begin(), 0, 0
        try:
            keys = [one.key for one in objects]
            lengths: list[int] = self._answers("read", keys, targets) if keys else []
            for one, target, copied, length in zip(objects, targets, staged, lengths, strict=True):
                there = self._checked(one, target, length)
                restored += there
                if there and one.part is not None:
                    self._host_pages.fill(one.part, one.slot, target)
                    self._count(combined=1)
                elif there and copied:
                    self._host_pages.scatter(one.format.pool, one.slot, target)
                elif not there and one.format.is_sidecar:
                    absent = {*reading.absent[batch.start + one.page], one.format.pool}
                    reading.absent[batch.start + one.page] = tuple(absent)
                elif not there:
                    whole[one.page] = False
            size = sum(length for length in lengths if length > 0)
        finally:
            speed.end(began, size)
            self._moved("fetch", size)
        self._count(read=restored)
        return whole

    def _checked(self, one: PageObject, memory: memoryview, length: int) -> bool:
        """Whether the memory has the object; one that is corrupt is removed from the store."""
        if length == MISSING:
            self._count(**{"draftless" if one.format.is_sidecar else "missing": 1})
            return False
        try:
            if length == CORRUPT:
                raise CorruptObjectError("the store's warning names the reason")
            if length != one.format.bytes:
                raise CorruptObjectError(f"{length:,} bytes, not {one.format.bytes:,}")
            one.format.check(memory, one.key)
            return True
        except CorruptObjectError as error:
            self._count(corrupt=1)
            log.warning("%s: a corrupt object, to be removed (%s)", self.store.name, error)
        try:
            self._call("remove", [one.key])
        except Exception as error:  # The other objects of the batch are not affected.
            self._note(error)
        return False

    def _write(self, writing: Writing, batch: PageBatch, staging: BounceBuffers) -> list[bool]:
        pages = writing.pages[batch.start : batch.end]
        objects, stored = self._objects(pages), [True] * len(pages)
        marks = self._shapes.missing_marks(self._answers) if self._shapes is not None else {}
        known: list[bool] = self._answers("exists", [one.key for one in objects])
        self._count(known=sum(known))
        unwanted = [page.key in writing.unwanted for page in pages]
        missing = [one for one, there in zip(objects, known, strict=True) if not there]
        for one in missing:
            stored[one.page] = stored[one.page] and not unwanted[one.page]
        new = [one for one in missing if not unwanted[one.page]]
        if not new and not marks:
            return stored
        sources, staged = self._memory(new, staging)
        for one, source, copied in zip(new, sources, staged, strict=True):
            if copied:
                self._host_pages.gather(one.format.pool, one.slot, source)
            one.format.seal(source, one.key)
        keys, memory = [*(one.key for one in new), *marks], [*sources, *marks.values()]
        done: list[bool] = self._answers("write", keys, memory)[: len(new)]
        self._count(written=sum(done), refused=len(done) - sum(done))
        self._moved("store", sum(one.format.bytes for one, ok in zip(new, done, strict=True) if ok))
        for one, written in zip(new, done, strict=True):
            stored[one.page] = stored[one.page] and written
        return stored

    # -- the steps --------------------------------------------------------------------------

    def _objects(self, pages: Sequence[StoredPage]) -> list[PageObject]:
        """The objects of these pages, those of sidecars included."""
        return [
            PageObject(number, one, page.slot, one.key(page.key, page.after), part)
            for number, page in enumerate(pages)
            for one, part in self._parts(page.anchor, page.shape)
            if one.pool not in page.without
        ]

    def _parts(
        self, anchor: str, shape: RankShape | None
    ) -> list[tuple[ObjectFormat, PagePart | None]]:
        """The objects of a page: of this shape, or parts of another."""
        own = self._formats[anchor]
        if shape is None:
            return [(one, None) for one in own]
        assert self._shapes is not None, f"{anchor}: stored with {shape}, which is not looked for"
        return [(part.format, part) for one in own for part in self._shapes.parts(shape, one.pool)]

    def _memory(
        self, objects: Sequence[PageObject], staging: BounceBuffers
    ) -> tuple[list[memoryview], list[bool]]:
        """The memory of each object: its host page, or else the staging buffer."""
        found = [
            self._host_pages.in_place(one.format, one.slot) if one.part is None else None
            for one in objects
        ]
        staged = [place is None for place in found]
        sizes = [
            one.format.bytes for one, place in zip(objects, found, strict=True) if place is None
        ]
        parts = iter(staging.parts(sizes))
        return [next(parts) if place is None else place for place in found], staged

    def _call(self, call: str, *arguments: object) -> Any:
        """Each kind of call has a breaker: a store that answers `exists` may still fail reads."""
        breaker = self.breakers[call]
        if not breaker.allows():
            raise _SparedError(f"{self.store.name}: left alone for a while, since {call} failed")
        try:
            result = getattr(self.store, call)(*arguments)
        except BaseException:
            breaker.failed()
            raise
        breaker.succeeded()
        return result

    def _answers(self, call: str, keys: Sequence[bytes], *memory: Sequence[memoryview]) -> Any:
        """Make a call that answers for every key, and check that it did."""
        answers = self._call(call, keys, *memory)
        if len(answers) != len(keys):
            raise StoreError(
                f"{self.store.name}: {len(answers)} answers for {len(keys)} objects; mend the store"
            )
        return answers

    def _note(self, error: BaseException) -> BaseException:
        if isinstance(error, _SparedError):
            self._count(spared=1)
            return error
        self._count(errors=1)
        message = str(error) or type(error).__name__
        if message != self.last_error:
            log.warning("storage: %s", message)
        self.last_error = message
        return error

    def _count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def _moved(self, way: str, size: int) -> None:
        with self._lock:
            self.moved_bytes[way] += size

    def _sizes(self, pages: Sequence[StoredPage]) -> list[int]:
        kinds = {(page.anchor, page.shape, page.without) for page in pages}
        sizes = {kind: self.read_bytes(*kind) for kind in kinds}
        return [sizes[page.anchor, page.shape, page.without] for page in pages]


StoreTurn = Callable[[BounceBuffers], bool]


class _ThreadPool:
    """Threads that take turns from one queue; a turn that returns True is put back at its end."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: queue.SimpleQueue[StoreTurn | None] = queue.SimpleQueue()
        self._since: dict[int, float] = {}
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"kvtide-store-{name}-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stuck(self) -> bool:
        """Whether every thread has been in one turn for longer than STUCK_S."""
        since = list(self._since.values())
        return len(since) == len(self._threads) and self._clock() - max(since) > STUCK_S

    def put(self, turn: StoreTurn) -> None:
        self._turns.put(turn)

    def end(self) -> None:
        for _ in self._threads:
            self._turns.put(None)

    def join(self, deadline: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        staging = BounceBuffers(self._clock)
        while (turn := self._turns.get()) is not None:
            self._since[number] = self._clock()
            try:
                if turn(staging):
                    self._turns.put(turn)
            except BaseException:  # Whatever it is ends the turn, and not the worker.
                log.exception("storage: a worker's turn failed")
            finally:
                del self._since[number]
