"""Any store, with a codec: objects are encoded on the way in, and decoded on the way out.

    write:  encode n+1 on the coders  ┆  write n       coded objects lie in bounce buffers
    read:   read n+1                  ┆  decode n on the coders, into the caller's memory

A call is cut into slices, so that the coders work while the store reads or writes the next one.

Coded objects have a space of their own for every codec and version, beside that of plain objects.
So a reader of one never meets those of another, and a store of a lossy codec never serves a reader
that did not ask for it. Each is checked by its label all the same (`coded_object`). One that is not
what it should be is CORRUPT, for its reader to remove; the reason is logged and counted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from kvtide.byte_sizes import format_bytes
from kvtide.storage.bounce_buffers import BounceBuffers
from kvtide.storage.codec import coded_object
from kvtide.storage.codec.coder import Codec
from kvtide.storage.codec.coder_threads import CoderThreads
from kvtide.storage.objects import CorruptObjectError, ObjectFormat
from kvtide.storage.store import (
    CORRUPT,
    MISSING,
    LingeringError,
    Removed,
    Store,
    StoreError,
    StoreStatus,
)

log = logging.getLogger("kvtide")

CALL_BYTES = 64 << 20
"""Of bounce buffers per calling thread; longer batches take several turns."""
SLICE_BYTES = 8 << 20
JOB_BYTES = 1 << 20
"""Small objects are decoded several at a time."""


def coded_space(space: bytes, codec: Codec) -> bytes:
    """Where a codec's objects are kept, of those of `space`."""
    return hashlib.sha256(space + f"\0{codec.name} {codec.version}".encode()).digest()


class CodedStore:
    """`inner` has the coded objects, and was opened for `coded_space`.

    coded_bytes  read ("fetch") and written ("store"), as the inner store has them
    """

    def __init__(self, inner: Store, codec: Codec, threads: int) -> None:
        self.inner = inner
        self.codec = codec
        self.name = f"{inner.name}?codec={codec.name}"
        self.forgets: bool = getattr(inner, "forgets", False)
        self._raw: Counter[str] = Counter()
        self._coded: Counter[str] = Counter()
        self._threads = CoderThreads(threads)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._corrupt = 0
        self._last_fault = ""

    def lend(self, block: memoryview) -> None:
        """The inner store never meets this memory."""

    def expect(self, formats: Sequence[ObjectFormat]) -> None:
        """Objects of these formats will be written."""
        self.codec.expect(formats)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.exists(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.inner.remove(keys)

    def clear(self) -> Removed:
        return self.inner.clear()

    def status(self) -> StoreStatus:
        status = self.inner.status()
        return replace(status, notes=(*status.notes, *self._notes()))

    def close(self) -> None:
        self._threads.close()
        self.inner.close()

    # -- reading ----------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        assert len(keys) == len(targets)
        views = [memoryview(target).cast("B") for target in targets]
        sizes = [coded_object.bound(self.codec, len(view)) for view in views]
        lengths: list[int] = []
        for turn in _runs(sizes, CALL_BYTES):
            lengths += self._read_turn(keys[turn], views[turn], sizes[turn])
        return lengths

    def _read_turn(
        self, keys: Sequence[bytes], targets: Sequence[memoryview], sizes: list[int]
    ) -> list[int]:
        memory = self._bounce.parts(sizes)
        decoded: list[Future[list[int]]] = []
        with self._threads.jobs() as jobs:
            for some in _runs(sizes, SLICE_BYTES):
                lengths = self._answers("read", keys[some], memory[some])
                decodings = [
                    partial(self._decode, key, coded[: max(0, length)], target, length)
                    for key, coded, target, length in zip(
                        keys[some], memory[some], targets[some], lengths, strict=True
                    )
                ]
                decoded += [jobs.begin(decodings[part]) for part in _runs(sizes[some], JOB_BYTES)]
            return [length for job in decoded for length in job.result()]

    def _decode(self, key: bytes, coded: memoryview, target: memoryview, length: int) -> int:
        if length < 0:
            return length
        try:
            raw = coded_object.decode(self.codec, key, coded, target)
        except CorruptObjectError as error:
            log.warning("%s: a coded object is corrupt (%s)", self.name, error)
            with self._lock:
                self._corrupt += 1
                self._last_fault = str(error)
            return CORRUPT
        if raw is None:
            return MISSING
        self._count("fetch", raw, length)
        return raw

    # -- writing ----------------------------------------------------------------------------

    def write(self, keys: Sequence[bytes], sources: Sequence[memoryview]) -> list[bool]:
        assert len(keys) == len(sources)
        views = [memoryview(source).cast("B") for source in sources]
        sizes = [coded_object.bound(self.codec, len(view)) for view in views]
        done: list[bool] = []
        for turn in _runs(sizes, CALL_BYTES):
            done += self._write_turn(keys[turn], views[turn], sizes[turn])
        return done

    def _write_turn(
        self, keys: Sequence[bytes], sources: Sequence[memoryview], sizes: list[int]
    ) -> list[bool]:
        memory = self._bounce.parts(sizes)
        done: list[bool] = []
        with self._threads.jobs() as jobs:
            encoded = [
                (some, jobs.begin(self._encodings(keys[some], sources[some], memory[some])))
                for some in _runs(sizes, JOB_BYTES)
            ]
            ready: list[tuple[int, memoryview]] = []
            for some, job in encoded:
                ready += zip(job.result(), memory[some], strict=True)
                if some.stop < len(keys) and sum(size for size, _ in ready) < SLICE_BYTES:
                    continue
                part = slice(len(done), len(done) + len(ready))
                coded = [place[:size] for size, place in ready]
                answers = self._answers("write", keys[part], coded)
                for raw, one, there in zip(sources[part], coded, answers, strict=True):
                    if there:
                        self._count("store", len(raw), len(one))
                done += answers
                ready = []
        return done

    def _encodings(
        self,
        keys: Sequence[bytes],
        sources: Sequence[memoryview],
        targets: Sequence[memoryview],
    ) -> list[partial[int]]:
        return [
            partial(coded_object.encode, self.codec, *each)
            for each in zip(keys, sources, targets, strict=True)
        ]

    # -- the steps --------------------------------------------------------------------------

    def _answers(self, call: str, keys: Sequence[bytes], memory: Sequence[memoryview]) -> list[Any]:
        """Call the inner store. What it may still touch after a failed call is a bounce buffer, and
        no memory of the caller's."""
        try:
            answers: list[Any] = getattr(self.inner, call)(keys, memory)
        except LingeringError as error:
            self._bounce.linger(error.lingers_s)
            raise StoreError(str(error)) from error
        if len(answers) != len(keys):
            raise StoreError(
                f"{self.inner.name}: {len(answers)} answers for {len(keys)} objects; mend the store"
            )
        return answers

    @property
    def _bounce(self) -> BounceBuffers:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = BounceBuffers()
        bounce: BounceBuffers = self._local.bounce
        return bounce

    @property
    def coded_bytes(self) -> dict[str, int]:
        with self._lock:
            return {way: self._coded[way] for way in ("fetch", "store")}

    def _count(self, way: str, raw: int, coded: int) -> None:
        with self._lock:
            self._raw[way] += raw
            self._coded[way] += coded

    def _notes(self) -> Iterator[str]:
        with self._lock:
            raw, coded, corrupt = self._raw["store"], self._coded["store"], self._corrupt
        if coded:
            sizes = f"{format_bytes(raw)} were written as {format_bytes(coded)}"
            yield f"{self.codec.name}: {sizes}, a ratio of {raw / coded:.2f}"
        if corrupt:
            yield f"{corrupt} coded objects were corrupt, the last one: {self._last_fault}"


def _runs(sizes: Sequence[int], max_bytes: int) -> Iterator[slice]:
    """Neighbours that have so many bytes together at most, or are alone."""
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > max_bytes:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
