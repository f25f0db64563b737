"""`fp8`: keys and values are rounded to eight bits, all else is `lossless`.

    object   │ rows of kv │ rows of a state │ label │
    staged   │ bases, fp8 │ as it is        │ label │ ──planes──▶ coded

Rounded are pools whose fields attention reads as keys and values, in bf16, fp16 or fp32. Index keys
select entries, and states sum over all tokens: these stay as they are, as do packed pools, objects
that the codec knows no rows of, and an object with a number that is infinite or none.

The label within is sealed anew over the rounded numbers. So the reader's own check covers what it
gets, and a coded object says of itself which of its bytes are rounded: a reader decodes objects of
ranks of any shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.spec import Encoding, PoolSpec
from kvtide.storage.codec import fp8_rows, planes
from kvtide.storage.codec.fp8_rows import KINDS, Kind
from kvtide.storage.codec.planes import ByteArray
from kvtide.storage.objects import CorruptObjectError, ObjectFormat

ATTENDED = frozenset({"k", "v", "kv", "latent", "rope"})
"""Fields that attention reads as keys and values."""
MIN_ELEMENTS = 8
"""Shorter vectors would spend too much on their bases."""

_COUNT = struct.Struct("<I")
_RUN = struct.Struct("<QII")
"""Bytes of the object, kind, elements of a vector."""


class ByteRun(NamedTuple):
    """Neighbouring bytes of an object of one kind."""

    bytes: int
    kind: Kind
    elements: int

    @property
    def staged_bytes(self) -> int:
        if self.kind is Kind.PLAIN:
            return self.bytes
        return fp8_rows.rounded_bytes(self.bytes, self.kind, self.elements)


class Fp8:
    name, version, lossy = "fp8", 1, True

    def __init__(self) -> None:
        self._known: list[tuple[ObjectFormat, tuple[ByteRun, ...]]] = []

    def expect(self, formats: Sequence[ObjectFormat]) -> None:
        self._known = [(one, byte_runs(one)) for one in formats]

    def bound(self, raw_bytes: int) -> int:
        return _COUNT.size + planes.bound(raw_bytes)

    def encode(self, raw: ByteArray, target: ByteArray) -> int:
        rounded, parts = self._rounded(raw)
        head = _COUNT.pack(len(parts)) + b"".join(_RUN.pack(*part) for part in parts)
        target[: len(head)] = np.frombuffer(head, np.uint8)
        return len(head) + planes.encode(_staged(rounded, parts), target[len(head) :])

    def decode(self, coded: ByteArray, target: ByteArray) -> None:
        parts, body = _head(coded)
        if not parts:
            planes.decode(body, target)
            return
        if sum(part.bytes for part in parts) != len(target):
            raise CorruptObjectError(f"runs that are not {len(target):,} bytes together")
        staged = np.empty(sum(part.staged_bytes for part in parts), np.uint8)
        planes.decode(body, staged)
        _unstaged(staged, parts, target)

    def _rounded(self, raw: ByteArray) -> tuple[ByteArray, Sequence[ByteRun]]:
        """The object with rounded numbers and a new seal, and its runs; as it is, and none, if
        there is nothing to round."""
        known = (known for known in self._known if known[0].labels(raw.data))
        one, parts = next(known, (None, ()))
        if one is None or not _worth_it(parts) or not _all_finite(raw, parts):
            return raw, ()
        rounded = np.empty_like(raw)
        _unstaged(_staged(raw, parts), parts, rounded)
        one.seal_anew(rounded.data)
        return rounded, parts


def byte_runs(one: ObjectFormat) -> tuple[ByteRun, ...]:
    """The runs of an object, its label included."""
    found: list[ByteRun] = []
    for pool, size in one.rows:
        for part in _of_row(pool, size):
            _append(found, part)
    _append(found, ByteRun(one.bytes - one.payload_bytes, Kind.PLAIN, 0))
    return tuple(found)


def rounded_vector(pool: PoolSpec) -> tuple[Kind, int] | None:
    """Kind and elements of the vectors that are rounded; None for a pool that is not."""
    fields, entry = pool.entry.fields, pool.entry
    dtypes = {field.dtype for field in fields}
    if entry.encoding is not Encoding.PLAIN or pool.tail_entries is not None or len(dtypes) != 1:
        return None
    elements = math.gcd(*(field.shape[-1] for field in fields))
    if not {field.name for field in fields} <= ATTENDED or elements < MIN_ELEMENTS:
        return None
    kind = KINDS.get(dtypes.pop())
    return None if kind is None else (kind, elements)


def _of_row(pool: PoolSpec, size: int) -> Iterator[ByteRun]:
    """A row's whole vectors, and the padding behind them."""
    vector = rounded_vector(pool)
    if vector is None:
        yield ByteRun(size, Kind.PLAIN, 0)
        return
    kind, elements = vector
    padding = size % (kind.size_bytes * elements)
    yield ByteRun(size - padding, kind, elements)
    yield ByteRun(padding, Kind.PLAIN, 0)


def _append(found: list[ByteRun], part: ByteRun) -> None:
    """Neighbours of a kind are one."""
    if found and found[-1][1:] == part[1:]:
        found[-1] = found[-1]._replace(bytes=found[-1].bytes + part.bytes)
    elif part.bytes:
        found.append(part)


def _worth_it(parts: Sequence[ByteRun]) -> bool:
    """Whether the runs save more than naming them takes."""
    return sum(part.bytes - part.staged_bytes for part in parts) > len(parts) * _RUN.size


def _all_finite(raw: ByteArray, parts: Sequence[ByteRun]) -> bool:
    at = 0
    for part in parts:
        here = raw[at : at + part.bytes]
        if part.kind is not Kind.PLAIN and not fp8_rows.is_finite(here, part.kind):
            return False
        at += part.bytes
    return True


def _staged(raw: ByteArray, parts: Sequence[ByteRun]) -> ByteArray:
    if not parts:
        return raw
    staged = np.empty(sum(part.staged_bytes for part in parts), np.uint8)
    at = there = 0
    for part in parts:
        source, target = raw[at : at + part.bytes], staged[there : there + part.staged_bytes]
        if part.kind is Kind.PLAIN:
            target[:] = source
        else:
            fp8_rows.encode(source, part.kind, part.elements, target)
        at, there = at + part.bytes, there + part.staged_bytes
    return staged


def _unstaged(staged: ByteArray, parts: Sequence[ByteRun], target: ByteArray) -> None:
    at = there = 0
    for part in parts:
        source, place = staged[there : there + part.staged_bytes], target[at : at + part.bytes]
        if part.kind is Kind.PLAIN:
            place[:] = source
        else:
            fp8_rows.decode(source, part.kind, part.elements, place)
        at, there = at + part.bytes, there + part.staged_bytes


def _head(coded: ByteArray) -> tuple[list[ByteRun], ByteArray]:
    """The runs, and what stands behind them."""
    (count,) = _COUNT.unpack(coded[: _COUNT.size].tobytes().ljust(_COUNT.size, b"\0"))
    end = _COUNT.size + count * _RUN.size
    if end > len(coded):
        raise CorruptObjectError(f"{count} runs in {len(coded):,} bytes")
    records = _RUN.iter_unpack(coded[_COUNT.size : end].tobytes())
    parts = []
    for size, kind, elements in records:
        if not _is_run(size, kind, elements):
            raise CorruptObjectError(f"a run of {size:,} bytes, kind {kind}, {elements} each")
        parts.append(ByteRun(size, Kind(kind), elements))
    return parts, coded[end:]


def _is_run(size: int, kind: int, elements: int) -> bool:
    if kind not in list(Kind):
        return False
    return kind == Kind.PLAIN or (elements > 0 and size % (elements * Kind(kind).size_bytes) == 0)
