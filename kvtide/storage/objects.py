"""A stored page, byte for byte.

    ┌────────────────────────────┬─────────────────────────────────────────────┬─────────┐
    │ payload                    │ label                                       │ padding │
    │ the anchor's rows and its  │ version, lengths, fingerprint, key, what is │ zeros   │
    │ sidecars', canonical order │ absent, pool table, checksum of all before  │         │
    └────────────────────────────┴─────────────────────────────────────────────┴─────────┘

The canonical order is by layer, then by pool, whatever the host's layout. All objects of an anchor
are equally long, and their length is known before one is read. So the label, which holds all that a
header holds, stands behind the payload. A host page with a gap for a label behind it is then
an object in place, and goes to and from a store without being copied.

An object is believed only if everything in its label is what the reader expects, its own key
included: a store that mixed up two objects, or wrote half of one, is found out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection

import xxhash

from kvtide.spec import ModelMemory
from kvtide.storage.store import KEY_BYTES, SPACE_BYTES

MAGIC = b"kvtide\0\1"
VERSION = 1
DIRECT_BYTES = 64 << 10
DIRECT_ALIGN = 4096
"""Objects of DIRECT_BYTES and more are padded so that disks can read and write them in place."""
SMALL_ALIGN = 16

_FIXED = struct.Struct(f"<8sIIQQ{SPACE_BYTES}s{KEY_BYTES}s")
"""Magic, version, absent sidecars (bits), payload bytes, label bytes, fingerprint, key."""
_CHECKSUM_BYTES = 16


class CorruptObjectError(ValueError):
    """Bytes that are not the expected object; the message names the difference."""


class ObjectFormat:
    """The objects of one anchor in one space.

    payload_bytes  what a slot of the anchor holds
    bytes          the whole object, padding included
    """

    def __init__(self, memory: ModelMemory, anchor: str, space: bytes) -> None:
        assert len(space) == SPACE_BYTES
        group = memory.group(anchor)
        self.anchor = anchor
        self.payload_bytes = memory.slot_bytes(anchor)
        self.optional = memory.optional_sidecars(anchor)
        self._space = space
        self._table = json.dumps(
            [[p.name, p.row_bytes(memory.page_tokens), list(p.layers)] for p in group],
            separators=(",", ":"),
        ).encode()
        self._label_bytes = _FIXED.size + len(self._table) + _CHECKSUM_BYTES
        align = DIRECT_ALIGN if self.payload_bytes >= DIRECT_BYTES else SMALL_ALIGN
        self.bytes = -(-(self.payload_bytes + self._label_bytes) // align) * align

    def seal(self, memory: memoryview, key: bytes, absent: Collection[str] = ()) -> None:
        """Write the label behind the payload. `absent`: optional sidecars that are not there."""
        assert len(memory) == self.bytes and set(absent) <= set(self.optional)
        payload, end = self.payload_bytes, self.payload_bytes + self._label_bytes
        bits = sum(1 << n for n, name in enumerate(self.optional) if name in absent)
        label = self._fixed(bits, key) + self._table
        memory[payload : end - _CHECKSUM_BYTES] = label
        memory[end - _CHECKSUM_BYTES : end] = _checksum(memory[: end - _CHECKSUM_BYTES])
        memory[end:] = bytes(self.bytes - end)

    def check(self, memory: memoryview, key: bytes) -> tuple[str, ...]:
        """Raise unless this is the object of that key, whole; what is absent from it."""
        assert len(memory) == self.bytes
        payload, end = self.payload_bytes, self.payload_bytes + self._label_bytes
        fixed = bytes(memory[payload : payload + _FIXED.size])
        magic, version, bits, *_, found_key = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise CorruptObjectError("no label where one should be")
        if version != VERSION:
            raise CorruptObjectError(f"version {version}, not {VERSION}")
        if found_key != key:
            raise CorruptObjectError("the object of another key")
        if fixed != self._fixed(bits, key) or bits >> len(self.optional):
            raise CorruptObjectError("lengths or fingerprint of another declaration")
        if memory[payload + _FIXED.size : end - _CHECKSUM_BYTES] != self._table:
            raise CorruptObjectError("the pool table of another declaration")
        if memory[end - _CHECKSUM_BYTES : end] != _checksum(memory[: end - _CHECKSUM_BYTES]):
            raise CorruptObjectError("the checksum does not match")
        return tuple(name for n, name in enumerate(self.optional) if bits >> n & 1)

    def _fixed(self, bits: int, key: bytes) -> bytes:
        payload, label = self.payload_bytes, self._label_bytes
        return _FIXED.pack(MAGIC, VERSION, bits, payload, label, self._space, key)


def _checksum(memory: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(memory)
