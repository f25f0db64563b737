"""Changes of blocks as vLLM's events: maps in msgpack, in batches `[time, events, dp_rank]`.

Beyond vLLM's fields, a block of a salted prompt has `cache_salt`: Dynamo reads it, and vLLM's own
decoder skips it. Fields that vLLM leaves out where they are None are left out.

A block's tokens are written once, when it is first seen; hashes are bytes from the start. So an
event is put together from bytes, and costs the same per block whatever the page size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from kvtide.server.kv_events.block_hashes import BlockHashes, extra_keys
from kvtide.server.kv_events.block_table import Appeared, Change, Left

DP_RANK = 0
_MAX_FIXMAP = 15


class WireEvent(NamedTuple):
    """An event in msgpack."""

    kind: str
    packed: bytes


CLEARED = WireEvent("AllBlocksCleared", msgpack.packb({"type": "AllBlocksCleared"}))


class TokenPacker:
    """Writes a block's tokens as they stand within an array."""

    def __init__(self, block_tokens: int) -> None:
        self._packer = msgpack.Packer()
        self._header_bytes = len(self._packer.pack([0] * block_tokens)) - block_tokens

    def __call__(self, tokens: tuple[int, ...]) -> bytes:
        packed: bytes = self._packer.pack(tokens)
        return packed[self._header_bytes :]


class EventEncoder:
    """Writes events about blocks of `block_tokens` tokens."""

    def __init__(self, hashes: BlockHashes, block_tokens: int) -> None:
        self._published = hashes.published
        self._block_tokens = block_tokens

    def events(self, changes: Iterable[Change]) -> list[WireEvent]:
        return [
            self._stored(change) if isinstance(change, Appeared) else self._removed(change)
            for change in changes
        ]

    def _stored(self, change: Appeared) -> WireEvent:
        cell, blocks = change
        first, namespace = blocks[0], blocks[0].namespace
        fields: dict[str, Any] = {
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": cell.medium,
            "lora_name": namespace.adapter or None,
            "group_idx": cell.group.index,
            "kv_cache_spec_kind": cell.group.kind,
        }
        if cell.group.window is not None:
            fields["kv_cache_spec_sliding_window"] = cell.group.window
        if namespace.adapter or namespace.cache_salt:
            fields["extra_keys"] = [extra_keys(namespace, b.parent is None) for b in blocks]
        if namespace.cache_salt:
            fields["cache_salt"] = namespace.cache_salt
        parent = msgpack.packb(None) if first.parent is None else self._published(first.parent)
        written = {
            "block_hashes": self._hashes([block.digest for block in blocks]),
            "parent_block_hash": parent,
            "token_ids": _array(
                len(blocks) * self._block_tokens, b"".join([block.tokens for block in blocks])
            ),
        }
        return _event("BlockStored", fields, written)

    def _removed(self, change: Left) -> WireEvent:
        fields = {"medium": change.cell.medium, "group_idx": change.cell.group.index}
        return _event("BlockRemoved", fields, {"block_hashes": self._hashes(change.digests)})

    def _hashes(self, digests: Sequence[bytes]) -> bytes:
        return _array(len(digests), b"".join(map(self._published, digests)))


def _event(kind: str, fields: dict[str, Any], written: dict[str, bytes]) -> WireEvent:
    """A map of these fields; those that are `written` already come last."""
    count = 1 + len(fields) + len(written)
    assert count <= _MAX_FIXMAP
    parts = [bytes([0x80 | count]), msgpack.packb({"type": kind, **fields})[1:]]
    for name, value in written.items():
        parts += [msgpack.packb(name), value]
    return WireEvent(kind, b"".join(parts))


def _array(count: int, items: bytes) -> bytes:
    header: bytes = msgpack.Packer().pack_array_header(count)
    return header + items


def encode_batch(events: Sequence[WireEvent]) -> bytes:
    packed = _array(len(events), b"".join([event.packed for event in events]))
    return _array(3, msgpack.packb(time.time()) + packed + msgpack.packb(DP_RANK))
