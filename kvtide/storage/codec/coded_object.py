"""A coded object, byte for byte.

    ┌────────────────────────────────────────────────────────────┬───────────┬─────────┐
    │ label: magic, codec and its version, raw and coded length, │ what the  │ padding │
    │ key, checksum of all but itself and the padding            │ codec made│ zeros   │
    └────────────────────────────────────────────────────────────┴───────────┴─────────┘

The label stands in front, since the length is known only when the object is encoded. The raw bytes
have the label of `storage.objects`, which their reader checks once they are decoded.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from kvtide.storage.codec.coder import Codec
from kvtide.storage.objects import DIRECT_ALIGN, DIRECT_BYTES, CorruptObjectError
from kvtide.storage.store import KEY_BYTES

MAGIC = b"kvcoded\1"
_FIXED = struct.Struct(f"<8s16sIIQQ{KEY_BYTES}s")
"""Magic, codec, its version, zeros, raw bytes, coded bytes with the label, key."""
_CHECKSUM_BYTES = 16
LABEL_BYTES = _FIXED.size + _CHECKSUM_BYTES


def bound(codec: Codec, raw_bytes: int) -> int:
    """The most that an object of so many raw bytes takes in the store."""
    return _padded(LABEL_BYTES + codec.bound(raw_bytes))


def encode(codec: Codec, key: bytes, raw: memoryview, target: memoryview) -> int:
    """Write the coded object to a target of `bound` bytes; its length."""
    whole = np.frombuffer(target, np.uint8)
    end = LABEL_BYTES + codec.encode(np.frombuffer(raw, np.uint8), whole[LABEL_BYTES:])
    name = codec.name.encode()
    fixed = _FIXED.pack(MAGIC, name, codec.version, 0, len(raw), end, key)
    target[:LABEL_BYTES] = fixed + _checksum(fixed, target[LABEL_BYTES:end])
    size = _padded(end)
    whole[end:size] = 0
    return size


def decode(codec: Codec, key: bytes, coded: memoryview, target: memoryview) -> int | None:
    """Fill the target with the raw object; its length, or None if it is longer than the target.

    Raises `CorruptObjectError` if this is not the codec's object of that key, whole.
    """
    if len(coded) < LABEL_BYTES:
        raise CorruptObjectError(f"{len(coded)} bytes, without a codec's label")
    fixed = bytes(coded[: _FIXED.size])
    magic, name, version, _, raw_bytes, end, found_key = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise CorruptObjectError("no codec's label where one should be")
    if (kept := (name.rstrip(b"\0"), version)) != (codec.name.encode(), codec.version):
        raise CorruptObjectError(
            f"coded as {kept[0].decode(errors='replace')} {version}, "
            f"not {codec.name} {codec.version}"
        )
    if found_key != key:
        raise CorruptObjectError("the coded object of another key")
    if not LABEL_BYTES <= end <= len(coded) or len(coded) != _padded(end):
        raise CorruptObjectError(f"{len(coded):,} bytes, which do not hold {end:,} coded ones")
    if bytes(coded[_FIXED.size : LABEL_BYTES]) != _checksum(fixed, coded[LABEL_BYTES:end]):
        raise CorruptObjectError("the checksum of the coded bytes does not match")
    if raw_bytes > len(target):
        return None
    whole = np.frombuffer(coded, np.uint8)
    codec.decode(whole[LABEL_BYTES:end], np.frombuffer(target, np.uint8)[:raw_bytes])
    return int(raw_bytes)


def _padded(size: int) -> int:
    """Large objects are read and written in place by disks that want whole blocks."""
    return -(-size // DIRECT_ALIGN) * DIRECT_ALIGN if size >= DIRECT_BYTES else size


def _checksum(fixed: bytes, body: memoryview) -> bytes:
    found = xxhash.xxh3_128(fixed)
    found.update(body)
    return found.digest()
