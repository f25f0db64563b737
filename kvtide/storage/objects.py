"""A stored page, byte for byte.

    ┌────────────────────────────┬─────────────────────────────────────────────┬─────────┐
    │ payload                    │ label                                       │ padding │
    │ the anchor's rows and its  │ version, lengths, fingerprint, key,         │ zeros   │
    │ sidecars', canonical order │ pool table, checksum of all before          │         │
    └────────────────────────────┴─────────────────────────────────────────────┴─────────┘

The canonical order is by layer, then by pool, whatever the host's layout. All objects of an anchor
are equally long, and their length is known before one is read. So the label, which holds all that a
header holds, stands behind the payload. A host page with a gap for a label behind it is then
an object in place, and goes to and from a store without being copied.

An optional sidecar (a draft's KV) is an object of its own: the anchor's is the same whether there
is a draft or not. The sidecar's fingerprint covers the draft's weights, and its key the tokens
after the page, on which its last entry depends.

A rank's object has the rows of its slice of the model. The slice is part of the object's
fingerprint and key, so that one space has the objects of ranks of any shape side by side. The
objects of a model that one rank serves have no slice in their keys.

An object is believed only if everything in its label is what the reader expects, its own key
included: a store that mixed up two objects, or wrote half of one, is found out. Such an object
raises `CorruptObjectError`; `StoreLink` catches it and removes the object (`transfer/store_link`).
"""

from __future__ import annotations

import hashlib
import json
import struct

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
"""Magic, version, zeros, payload bytes, label bytes, fingerprint, key."""
_CHECKSUM_BYTES = 16


class CorruptObjectError(ValueError):
    """Bytes that are not the expected object; the message names the difference."""


def object_key(page_key: bytes, suffix: bytes) -> bytes:
    """The key of that object of a page which has this suffix (`ObjectFormat`)."""
    return hashlib.sha256(page_key + suffix).digest()


class LabelledFormat:
    """Objects of one length in one space: how their labels are written and checked.

    payload_bytes  what the caller keeps in an object
    bytes          the whole object, padding included
    table          describes the payload; an object with another one is not believed
    """

    def __init__(self, payload_bytes: int, table: bytes, space: bytes) -> None:
        assert len(space) == SPACE_BYTES
        self.payload_bytes = payload_bytes
        self._space = space
        self._table = table
        self._label_bytes = _FIXED.size + len(table) + _CHECKSUM_BYTES
        align = DIRECT_ALIGN if payload_bytes >= DIRECT_BYTES else SMALL_ALIGN
        self.bytes = -(-(payload_bytes + self._label_bytes) // align) * align

    def seal(self, memory: memoryview, key: bytes) -> None:
        """Write the label behind the payload."""
        assert len(memory) == self.bytes
        payload, end = self.payload_bytes, self.payload_bytes + self._label_bytes
        memory[payload : end - _CHECKSUM_BYTES] = self._fixed(key) + self._table
        memory[end - _CHECKSUM_BYTES : end] = _checksum(memory[: end - _CHECKSUM_BYTES])
        memory[end:] = bytes(self.bytes - end)

    def seal_anew(self, memory: memoryview) -> None:
        """Write the checksum of an object whose payload has changed. Its label stays."""
        end = self.payload_bytes + self._label_bytes
        memory[end - _CHECKSUM_BYTES : end] = _checksum(memory[: end - _CHECKSUM_BYTES])

    def labels(self, memory: memoryview) -> bool:
        """Whether this looks like an object of this format, of whatever key."""
        if len(memory) != self.bytes:
            return False
        at, end = self.payload_bytes, self.payload_bytes + _FIXED.size
        found_key = bytes(memory[end - KEY_BYTES : end])
        return memory[at : end + len(self._table)] == self._fixed(found_key) + self._table

    def check(self, memory: memoryview, key: bytes) -> None:
        """Raise unless this is the object of that key, whole."""
        assert len(memory) == self.bytes
        payload, end = self.payload_bytes, self.payload_bytes + self._label_bytes
        fixed = bytes(memory[payload : payload + _FIXED.size])
        magic, version, *_, found_key = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise CorruptObjectError("no label where one should be")
        if version != VERSION:
            raise CorruptObjectError(f"version {version}, not {VERSION}")
        if found_key != key:
            raise CorruptObjectError("the object of another key")
        if fixed != self._fixed(key):
            raise CorruptObjectError("lengths or fingerprint of another declaration")
        if memory[payload + _FIXED.size : end - _CHECKSUM_BYTES] != self._table:
            raise CorruptObjectError("the pool table of another declaration")
        if memory[end - _CHECKSUM_BYTES : end] != _checksum(memory[: end - _CHECKSUM_BYTES]):
            raise CorruptObjectError("the checksum does not match")

    def _fixed(self, key: bytes) -> bytes:
        payload, label = self.payload_bytes, self._label_bytes
        return _FIXED.pack(MAGIC, VERSION, 0, payload, label, self._space, key)


class ObjectFormat(LabelledFormat):
    """The objects of one anchor, or of one optional sidecar, in one space.

    pool           the anchor, or the sidecar; `anchor` owns the slots
    payload_bytes  what a slot holds of it
    rows           pool and bytes of every row, in canonical order
    """

    def __init__(
        self, memory: ModelMemory, pool: str, space: bytes, draft_fingerprint: bytes = b""
    ) -> None:
        spec, pools = memory.pool(pool), memory.object_pools(pool)
        self.pool = pool
        self.anchor = spec.follows or pool
        self.pools = tuple(p.name for p in pools)
        self._is_slice = memory.part is not None
        if self._is_slice:
            space = hashlib.sha256(space + memory.without_draft.schema_digest()).digest()
        if self.is_sidecar:
            parts = (space, hashlib.sha256(draft_fingerprint).digest(), repr(spec).encode())
            space = hashlib.sha256(b"".join(parts)).digest()
        table = json.dumps(
            [[p.name, p.row_bytes(memory.page_tokens), list(p.layers)] for p in pools],
            separators=(",", ":"),
        )
        order = sorted((layer, n) for n, p in enumerate(pools) for layer in p.layers)
        self.rows = [(pools[n], pools[n].row_bytes(memory.page_tokens)) for _, n in order]
        super().__init__(sum(size for _, size in self.rows), table.encode(), space)

    @property
    def is_sidecar(self) -> bool:
        return self.pool != self.anchor

    @property
    def suffix(self) -> bytes:
        """What follows the page's key where the keys of its objects are computed."""
        return self.pool.encode() + (self._space if self.is_sidecar or self._is_slice else b"")

    def key(self, page_key: bytes, after: bytes = b"") -> bytes:
        """The key of a page's object. `after`: the packed tokens of the holdback behind it."""
        return object_key(page_key, self.suffix + (after if self.is_sidecar else b""))


def object_formats(
    memory: ModelMemory, space: bytes, draft_fingerprint: bytes = b""
) -> dict[str, ObjectFormat]:
    """The objects of a page, by pool: of anchors, and of optional sidecars with layers.

    Sidecars come behind their anchor.
    """
    return {
        name: ObjectFormat(memory, name, space, draft_fingerprint)
        for anchor in memory.anchors
        for name in (anchor.name, *memory.optional_sidecars(anchor.name))
        if name == anchor.name or memory.pool(name).layers
    }


def _checksum(memory: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(memory)
