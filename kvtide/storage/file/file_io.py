"""Bytes between memory and segments, past the page cache and in place wherever possible.

A batch is cut into pieces of at most PIECE_BYTES: larger objects into several, neighbours on disk
into one vectored call. `IoThreads` runs the pieces in parallel. Page-aligned memory of whole blocks
goes to and from the disk directly. Other memory goes through a page-aligned buffer of the thread.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from kvtide.storage.file.segments import BLOCK_BYTES, SegmentFile

# ── threads ───────────────────────────────────────────────────────────────────────────────────────

PARTS_PER_THREAD = 2
"""One thread is woken per so many parts: waking one costs as much as reading 256 KiB."""


class _Batch:
    """Parts 0 … count - 1; every free thread takes the next one."""

    def __init__(self, run: Callable[[int], None], threads: int, count: int) -> None:
        self._run, self._count = run, count
        self.to_wake = threads - 1
        self._next = itertools.count()
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.failures: list[BaseException] = []

    def work(self) -> None:
        begun = 0
        try:
            while (part := next(self._next)) < self._count:
                begun += 1
                try:
                    self._run(part)
                except Exception as error:
                    self.failures.append(error)
        except BaseException as error:  # Ctrl-C: no thread begins or awaits the remaining parts.
            self.failures.append(error)
            while next(self._next) < self._count:
                begun += 1
            raise
        finally:
            with self._lock:
                self._left -= begun
                if not self._left:
                    self._done.set()

    def wait(self) -> None:
        self._done.wait()


class IoThreads:
    def __init__(self, threads: int, name: str) -> None:
        """`threads` includes the calling thread."""
        self.count = threads
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name} {n}", daemon=True)
            for n in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()

    def each(self, run: Callable[[int], None], count: int) -> None:
        """Call `run` with 0 … count - 1, in any order; raise the first exception at the end."""
        if not count:
            return
        threads = min(-(-count // PARTS_PER_THREAD), len(self._threads) + 1)
        batch = _Batch(run, threads, count)
        self._wake(batch)
        try:
            batch.work()
            batch.wait()
        except BaseException:
            batch.wait()  # Interrupted, but the parts still use the caller's memory.
            raise
        if batch.failures:
            raise batch.failures[0]

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _wake(self, batch: _Batch) -> None:
        """Wake one more thread, which wakes the next: the caller starts its own part at once."""
        if batch.to_wake and self._threads:
            batch.to_wake -= 1
            self._queue.put(batch)

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._wake(batch)
            batch.work()


# ── ranges ────────────────────────────────────────────────────────────────────────────────────────

PIECE_BYTES = 512 << 10
MIN_PIECE_BYTES = 256 << 10
PIECES_PER_THREAD = 2
"""Measured: past 512 KiB a call gains nothing, and a batch ends later than it need."""
MAX_VECTORS = 256


@dataclass(slots=True)
class FileRange:
    """An object on its way: `count` bytes of memory at an offset of a file."""

    file: int
    offset: int
    memory: memoryview
    count: int
    segment: SegmentFile | None = None
    """Holds the file open while it is read, and finds its holes."""


class _Part(NamedTuple):
    owner: int
    memory: memoryview
    offset: int
    blocks_bytes: int


class _Piece:
    """Parts that are neighbours in one file, `offset` to `end`."""

    __slots__ = ("direct", "end", "file", "offset", "parts", "segment")

    def __init__(self, file: int, direct: bool, segment: SegmentFile | None, part: _Part) -> None:
        self.file, self.direct, self.segment = file, direct, segment
        self.offset, self.end = part.offset, part.offset + part.blocks_bytes
        self.parts = [part]

    def takes(self, part: _Part, file: int, direct: bool, max_bytes: int) -> bool:
        """Add a part if it belongs here."""
        if (
            part.offset != self.end
            or self.file != file
            or self.direct != direct
            or part.offset + part.blocks_bytes - self.offset > max_bytes
            or len(self.parts) >= MAX_VECTORS
        ):
            return False
        self.parts.append(part)
        self.end += part.blocks_bytes
        return True

    @property
    def count(self) -> int:
        return self.end - self.offset

    def offsets(self) -> Iterator[tuple[_Part, int]]:
        """Parts, and where each starts within the piece."""
        return ((part, part.offset - self.offset) for part in self.parts)


def padded(count: int) -> int:
    """Bytes an object takes on disk."""
    return max(-(-count // BLOCK_BYTES), 1) * BLOCK_BYTES


class ShortError(OSError):
    """A file that ends before the object does."""


class HoleError(OSError):
    """A range of which something was punched out, perhaps while it was being read."""


Outcomes = list[OSError | None]


class Mover:
    """Reads and writes ranges. The outcome of each range: None, or its error."""

    def __init__(self, workers: IoThreads) -> None:
        self._workers = workers
        self._own = threading.local()

    def read(self, ranges: Sequence[FileRange]) -> Outcomes:
        order = sorted(range(len(ranges)), key=lambda n: (ranges[n].file, ranges[n].offset))
        pieces = _cut(ranges, order, self._piece_bytes(ranges), reading=True)
        return self._each(pieces, len(ranges), self._read)

    def write(self, ranges: Sequence[FileRange]) -> Outcomes:
        pieces = _cut(ranges, range(len(ranges)), self._piece_bytes(ranges), reading=False)
        return self._each(pieces, len(ranges), self._write)

    def _piece_bytes(self, ranges: Sequence[FileRange]) -> int:
        """Large enough to be fast, small enough that all threads end together."""
        even_bytes = sum(each.count for each in ranges) // (self._workers.count * PIECES_PER_THREAD)
        return min(max(even_bytes // BLOCK_BYTES * BLOCK_BYTES, MIN_PIECE_BYTES), PIECE_BYTES)

    def _each(
        self, pieces: list[_Piece], count: int, move: Callable[[_Piece, Outcomes], None]
    ) -> Outcomes:
        outcomes: Outcomes = [None] * count

        def run(number: int) -> None:
            try:
                move(pieces[number], outcomes)
            except OSError as error:
                for part in pieces[number].parts:
                    outcomes[part.owner] = error

        self._workers.each(run, len(pieces))
        return outcomes

    def _read(self, piece: _Piece, outcomes: Outcomes) -> None:
        vectors = self._vectors(piece)
        _whole(os.preadv, piece.file, vectors, piece.offset)
        # Checked after reading, to find holes that were punched meanwhile.
        segment = piece.segment
        if segment is not None and not segment.is_whole(piece.offset, piece.count):
            for part in piece.parts:
                if not segment.is_whole(part.offset, part.blocks_bytes):
                    outcomes[part.owner] = HoleError()
        if not piece.direct:
            for part, at in piece.offsets():
                part.memory[:] = vectors[0][at : at + len(part.memory)]

    def _write(self, piece: _Piece, outcomes: Outcomes) -> None:
        vectors = self._vectors(piece)
        if not piece.direct:
            for part, at in piece.offsets():
                end = at + len(part.memory)
                vectors[0][at:end] = part.memory
                vectors[0][end : at + part.blocks_bytes] = bytes(at + part.blocks_bytes - end)
        _whole(os.pwritev, piece.file, vectors, piece.offset)

    def _vectors(self, piece: _Piece) -> list[memoryview]:
        if piece.direct:
            return [part.memory for part in piece.parts]
        return [self._bounce()[: piece.count]]

    def _bounce(self) -> memoryview:
        """This thread's buffer."""
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
        return buffer


def _whole(
    move: Callable[[int, list[memoryview], int], int],
    file: int,
    vectors: list[memoryview],
    offset: int,
) -> None:
    """Move all of it, though the system may stop in between."""
    left = sum(map(len, vectors))
    while True:
        moved = move(file, vectors, offset)
        if moved == left:
            return
        if moved % BLOCK_BYTES or not moved:
            raise ShortError()
        left, offset = left - moved, offset + moved
        while moved >= len(vectors[0]):
            moved -= len(vectors[0])
            vectors = vectors[1:]
        vectors = [vectors[0][moved:], *vectors[1:]]


def _cut(
    ranges: Sequence[FileRange], order: Iterable[int], max_bytes: int, reading: bool
) -> list[_Piece]:
    pieces: list[_Piece] = []
    piece: _Piece | None = None
    for owner in order:
        each = ranges[owner]
        file, count, whole = each.file, each.count, padded(each.count)
        direct = _is_direct(each, whole, reading)
        for start in range(0, whole, max_bytes):
            end = min(start + max_bytes, whole)
            memory = each.memory[start : end if direct else min(end, count)]
            part = _Part(owner, memory, each.offset + start, end - start)
            if piece is None or not piece.takes(part, file, direct, max_bytes):
                piece = _Piece(file, direct, each.segment, part)
                pieces.append(piece)
    return pieces


def _is_direct(each: FileRange, whole: int, reading: bool) -> bool:
    """Whether memory is used in place. A target may be overwritten behind the object."""
    enough = len(each.memory) >= whole if reading else each.count == whole
    return enough and address(each.memory) % BLOCK_BYTES == 0


def address(memory: memoryview) -> int:
    if not len(memory):
        return 1
    if not memory.readonly:  # Ten times as fast as through numpy.
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    assert isinstance(found, int)
    return found
