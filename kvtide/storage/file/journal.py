"""Journals: what a process did, in 64-byte records, for its next start and for other processes.

`Journal`  this process's own: appended to, and locked while the process lives
`Tail`     another's: read to its end, and on from there when it has grown

A journal whose lock is free is finished. `recovery` merges finished journals into one.

Each record has a checksum of its own, so that a torn record harms no other:

    offset  0        4      8       16        24      28       32        64
            ┌────────┬──────┬───────┬─────────┬───────┬────────┬─────────┐
            │ check  │ kind │ stamp │ segment │ block │ length │ key     │
            └────────┴──────┴───────┴─────────┴───────┴────────┴─────────┘

| kind | meaning |
|---|---|
| HEAD | first of every journal: `key` is MAGIC, `length` the version |
| REPLACES | this journal was merged from the journal `segment`, which no longer counts |
| SEGMENT | the segment `segment` holds objects of the space `key` |
| PUT | an object of `length` bytes lies whole at `block` of `segment`, under `key` |
| DEL | the location `block` of `segment` is empty for ever |
| USE | the object at `block` of `segment` was used at `stamp` |

A location (segment, block) is allocated once. So the live objects are PUTs less DELs, in whatever
order the journals of several processes are read, and however often. Stamps are microseconds since
1970.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtide.storage.file.segments import allocate_ahead, lock
from kvtide.storage.store import StoreError

# ── records ───────────────────────────────────────────────────────────────────────────────────────

RECORD_BYTES = 64
VERSION = 1
MAGIC = b"kvtide file store journal".ljust(32, b"\0")

RECORD = np.dtype(
    [
        ("check", "<u4"),
        ("kind", "<u4"),
        ("stamp", "<u8"),
        ("segment", "<u8"),
        ("block", "<u4"),
        ("length", "<u4"),
        ("key", "<u8", 4),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

Records = NDArray[Any]
Words = NDArray[np.uint64]


class RecordKind(IntEnum):
    HEAD = 1
    REPLACES = 2
    SEGMENT = 3
    PUT = 4
    DEL = 5
    USE = 6


def blank(count: int, kind: RecordKind) -> Records:
    records = np.zeros(count, RECORD)
    records["kind"] = kind
    return records


def head() -> Records:
    record = blank(1, RecordKind.HEAD)
    record["key"] = np.frombuffer(MAGIC, "<u8")
    record["length"] = VERSION
    return record


def replaces(journals: list[int]) -> Records:
    records = blank(len(journals), RecordKind.REPLACES)
    records["segment"] = journals
    return records


def segment_of(segment: int, space: bytes) -> Records:
    record = blank(1, RecordKind.SEGMENT)
    record["segment"] = segment
    record["key"] = np.frombuffer(space, "<u8")
    return record


def sealed(records: Records) -> bytes:
    """The records as they are written, with their checksums."""
    records["check"] = checksums(records)
    return records.tobytes()


def checksums(records: Records) -> NDArray[np.uint32]:
    """Of each record, over all of it but the checksum itself.

    Every step is a bijection of each word, so no two records that differ in one word only agree
    before the last step, which keeps 32 of 64 bits. Zeros are not a record.
    """
    words = np.ascontiguousarray(records).view("<u8").reshape(-1, RECORD_BYTES // 8)
    mixed = (words[:, 0] >> np.uint64(32)) ^ np.uint64(0x6B7674696465)
    for column in range(1, words.shape[1]):
        mixed ^= words[:, column]
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    return mixed.astype(np.uint32)


def parsed(data: bytes) -> tuple[Records, NDArray[np.bool_]]:
    """Whole records of some bytes, and which of them are as they were written."""
    records = np.frombuffer(data, RECORD, len(data) // RECORD_BYTES)
    return records, checksums(records) == records["check"]


def key_words(keys: Sequence[bytes]) -> Words:
    """Keys of 32 bytes as rows of four words."""
    joined = b"".join(keys)
    assert len(joined) == 32 * len(keys), "keys are 32 bytes long"
    return np.frombuffer(joined, "<u8").reshape(-1, 4)


# ── journals ──────────────────────────────────────────────────────────────────────────────────────

AHEAD_BYTES = 256 << 10
"""Allocated ahead, so that removals can be recorded when the disk is full."""


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
            pass  # The append itself fails if the disk is full.


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
        """New records. A last record with a wrong checksum may still be being written: it is left
        for the next read."""
        return self._read(MAX_READ_BYTES, waits=True)

    def read_whole(self) -> Records:
        """All the rest of a finished journal."""
        parts = [nothing()]
        while len(part := self._read(MAX_READ_BYTES, waits=False)) or self._passed:
            parts.append(part)
        return np.concatenate(parts) if len(parts) > 2 else parts[-1]

    def replaced(self) -> set[int]:
        """The journals that a merged one was made of, which it names first."""
        records, good = parsed(os.pread(self._fd, HEAD_BYTES, 0))
        named = good & (records["kind"] == RecordKind.REPLACES)
        return set(records["segment"][named].tolist())

    def _read(self, max_bytes: int, waits: bool) -> Records:
        size = min(os.fstat(self._fd).st_size - self._at, max_bytes)
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
