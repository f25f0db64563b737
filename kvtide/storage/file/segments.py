"""Segments: the large files that objects lie in.

A segment holds objects of one space. The process that made it appends to it and holds its lock
(flock) while it does. Locations are whole blocks, allocated once. A removed object is punched out:
its blocks go back to the file system at once, and a reader finds a hole. That is how a reader
learns that another process removed the object that it has just read. A segment without live
objects, to which no process appends, is deleted.

`SegmentFile`  a file open for reading and punching; closed when the last to use it lets go
`Appender` the segment this process appends to
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
"""Locations and sizes on disk are whole blocks."""
CHUNK_BYTES = 64 << 20
"""Blocks are asked of the file system in steps of this: one call for many objects."""
MAX_OPEN = 256
"""Segments kept open for reading; others are opened again when needed."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS}


def blocks_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """How many blocks objects take; an empty one takes a block too, to have a location."""
    return np.maximum(-(-lengths.astype(np.int64) // BLOCK_BYTES), 1)


def allocate(fd: int, offset: int, count: int, keep_size: int = 0) -> None:
    """Have blocks of a file allocated, where the file system knows how to."""
    if _libc.fallocate(fd, keep_size, offset, count):
        number = ctypes.get_errno()
        if number not in _NOT_SUPPORTED:
            raise OSError(number, os.strerror(number))


def allocate_ahead(fd: int, offset: int, count: int) -> None:
    """The same behind the end of the file, which stays where it is."""
    allocate(fd, offset, count, _KEEP_SIZE)


def punch(fd: int, offset: int, count: int) -> None:
    """Give the blocks of a range back to the file system."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, count):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def lock(fd: int) -> bool:
    """Take a file's lock if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open past the page cache if the file system allows it; whether it does."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666), False


def delete(path: Path) -> None:
    """Delete a segment without live objects; processes that have it open keep no blocks of it."""
    with contextlib.suppress(PermissionError):
        os.truncate(path, 0)
    path.unlink()


class SegmentFile:
    def __init__(self, path: Path) -> None:
        self._fd = -1
        try:
            self._fd, self.direct = open_direct(path, os.O_RDWR)
        except (PermissionError, OSError) as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._fd, self.direct = open_direct(path, os.O_RDONLY)

    def fileno(self) -> int:
        return self._fd

    def is_whole(self, offset: int, count: int) -> bool:
        """Whether nothing of a range is a hole, or behind the end of the file."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_HOLE) >= offset + count
        except OSError as error:
            return error.errno == errno.EINVAL  # The file system does not know of holes.

    def punch(self, offset: int, count: int) -> None:
        punch(self._fd, offset, count)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class OpenSegments:
    """The segments that are open, by path; the longest unused are let go of."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, SegmentFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> SegmentFile:
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                self._open.move_to_end(path)
                return found
        opened = SegmentFile(path)
        with self._lock:
            found = self._open.setdefault(path, opened)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return found

    def forget(self, path: Path) -> None:
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        with self._lock:
            self._open.clear()


class Appender:
    """A segment that this process appends to. Its caller holds the store's lock.

    number     what the segment is called in this process's table
    in_flight  how many ranges were given out of which it is not yet known how they ended
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self.path, self._size = path, size_bytes
        self._fd, self.direct = open_direct(path, flags)
        self.number = -1
        self.in_flight = 0
        self._next = self._allocated = 0
        taken = lock(self._fd)
        assert taken, "a segment that was just made is locked by another"
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError:
            self.discard()
            raise

    def fileno(self) -> int:
        return self._fd

    def has_room(self, count: int) -> bool:
        return self._next + count <= self._size

    def ahead(self) -> int:
        """Bytes that are allocated and not given out."""
        return self._allocated - self._next

    def take(self, count: int, spare: int) -> int:
        """The offset of a range of whole blocks, allocated; OSError if there is no space.

        `spare`: how many bytes may be allocated beyond it, for what comes next.
        """
        assert self.has_room(count) and count % BLOCK_BYTES == 0
        start, end = self._next, self._next + count
        if end > self._allocated:
            ahead = min(self._allocated + CHUNK_BYTES, self._size, end + spare)
            ahead = max(end, ahead // BLOCK_BYTES * BLOCK_BYTES)
            allocate(self._fd, self._allocated, ahead - self._allocated)
            self._allocated = ahead
        self._next = end
        self.in_flight += 1
        return start

    def is_there(self) -> bool:
        """Whether the file still has a name, or was deleted."""
        return os.fstat(self._fd).st_nlink > 0

    def finish(self) -> None:
        """Nothing more will be appended: give back what was allocated ahead, and the lock."""
        assert not self.in_flight
        try:
            os.ftruncate(self._fd, self._next)
        finally:
            os.close(self._fd)

    def discard(self) -> None:
        os.unlink(self.path)
        os.close(self._fd)
