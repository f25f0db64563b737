"""Journals: what a process did, in 64-byte records, for itself when it returns and for the others.

`Journal`  this process's own: appended to, and locked while the process lives
`Tail`     another's: read as far as it goes, and on from there when it has grown

A journal that nobody holds the lock of is finished. `merging` makes one journal of finished ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.records import (
    MAGIC,
    RECORD,
    RECORD_BYTES,
    VERSION,
    RecordKind,
    Records,
    head,
    parsed,
    sealed,
)
from kvtide.storage.file.segments import allocate_ahead, lock
from kvtide.storage.store import StoreError

AHEAD_BYTES = 256 << 10
"""Allocated ahead, so that a disk that others filled still has room for records of removals."""


MAX_READ_BYTES = 1 << 30
HEAD_BYTES = 1 << 20
"""Where a merged journal names what it replaces."""


def nothing() -> Records:
    return np.zeros(0, RECORD)


class Journal:
    """Appended to by one thread at a time: the caller holds the store's lock."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, int(path.stem, 16)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.bytes = self._ahead = 0
        taken = lock(self._fd)
        assert taken, "a journal that was just made is locked by another"
        try:
            self.append(head())
        except OSError:
            os.unlink(path)
            os.close(self._fd)
            raise

    def append(self, records: Records) -> None:
        """All of them, or OSError and none of them."""
        data = sealed(records)
        if self.bytes + len(data) > self._ahead:
            self._reserve(len(data))
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self.bytes + written)
        except OSError:
            if written:
                os.ftruncate(self._fd, self.bytes)
            raise
        self.bytes += len(data)

    def is_there(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        """Give back what was allocated ahead, and the lock: the journal is finished."""
        try:
            os.ftruncate(self._fd, self.bytes)
        finally:
            os.close(self._fd)

    def _reserve(self, count: int) -> None:
        ahead = self.bytes + count + AHEAD_BYTES
        try:
            allocate_ahead(self._fd, self.bytes, ahead - self.bytes)
            self._ahead = ahead
        except OSError:
            pass  # The append itself will say whether there is room for what it needs.


class Tail:
    """A journal being read. `corrupt` counts records that are not as they were written."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, int(path.stem, 16)
        self.is_merged = path.suffix == ".merged"
        self._fd = os.open(path, os.O_RDONLY)
        self._at = self._passed = 0
        self.corrupt = 0

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Records:
        """What is new. A record at the very end that does not check may still be being written:
        it is waited for."""
        return self._read(MAX_READ_BYTES, waits=True)

    def read_whole(self) -> Records:
        """All the rest of a journal that nobody writes any more."""
        parts = [nothing()]
        while len(part := self._read(MAX_READ_BYTES, waits=False)) or self._passed:
            parts.append(part)
        return np.concatenate(parts) if len(parts) > 2 else parts[-1]

    def replaced(self) -> set[int]:
        """The journals that a merged one was made of, which it names first."""
        records, good = parsed(os.pread(self._fd, HEAD_BYTES, 0))
        named = good & (records["kind"] == RecordKind.REPLACES)
        return set(records["segment"][named].tolist())

    def _read(self, most: int, waits: bool) -> Records:
        size = min(os.fstat(self._fd).st_size - self._at, most)
        self._passed = 0
        if size < RECORD_BYTES:
            return nothing()
        records, good = parsed(os.pread(self._fd, size // RECORD_BYTES * RECORD_BYTES, self._at))
        if waits and len(good) and not good[-1]:
            records, good = records[:-1], good[:-1]
        if self._at == 0:
            self._check_head(records[:1], good[:1])
        self._passed = len(records)
        self._at += len(records) * RECORD_BYTES
        self.corrupt += int(len(good) - good.sum())
        return records if good.all() else records[good]

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _check_head(self, first: Records, good: NDArray[np.bool_]) -> None:
        """A head that does not check is one more corrupt record; one that does must be ours."""
        if len(first) and good[0] and first["kind"][0] == RecordKind.HEAD:
            version = int(first["length"][0])
            if first["key"][0].tobytes() == MAGIC and version != VERSION:
                raise StoreError(
                    f"{self.path}: written by another version of kvtide (format {version}, "
                    f"not {VERSION}); use that version, or another folder"
                )
