"""Journal records: 64 bytes each, each with its own checksum, so that a torn one harms no other.

    offset  0        4      8       16        24      28       32        64
            ┌────────┬──────┬───────┬─────────┬───────┬────────┬─────────┐
            │ check  │ kind │ stamp │ segment │ block │ length │ key     │
            └────────┴──────┴───────┴─────────┴───────┴────────┴─────────┘

| kind | says |
|---|---|
| HEAD | first of every journal: `key` is MAGIC, `length` the version |
| REPLACES | this journal was made of the journal `segment`, which no longer counts |
| SEGMENT | the segment `segment` holds objects of the space `key` |
| PUT | an object of `length` bytes lies whole at `block` of `segment`, under `key` |
| DEL | nothing lies at `block` of `segment` any more, nor ever will again |
| USE | the object at `block` of `segment` was used at `stamp` |

A location (segment, block) is given out once and never again. So what lives is PUTs less DELs,
in whatever order the journals of several processes are read, and however often.
Stamps are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4096
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


def blocks_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """How many blocks objects take; an empty one takes a block too, to have a location."""
    return np.maximum(-(-lengths.astype(np.int64) // BLOCK_BYTES), 1)
