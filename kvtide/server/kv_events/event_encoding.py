"""Changes of blocks as vLLM's events: maps in msgpack, in batches `[time, events, dp_rank]`.

Beyond vLLM's fields, a block of a salted prompt has `cache_salt`: Dynamo reads it, and vLLM's own
decoder skips it. Fields that vLLM leaves out where they are None are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import numpy as np

from kvtide.server.kv_events.block_hashes import BlockHashes, extra_keys
from kvtide.server.kv_events.block_table import Appeared, Block, Change, Left

WireEvent = dict[str, Any]
CLEARED: WireEvent = {"type": "AllBlocksCleared"}
DP_RANK = 0


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
        event: WireEvent = {
            "type": "BlockStored",
            "block_hashes": [self._published(block.digest) for block in blocks],
            "parent_block_hash": None if first.parent is None else self._published(first.parent),
            "token_ids": _token_ids(blocks),
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": cell.medium,
            "lora_name": namespace.adapter or None,
            "group_idx": cell.group.index,
            "kv_cache_spec_kind": cell.group.kind,
        }
        if cell.group.window is not None:
            event["kv_cache_spec_sliding_window"] = cell.group.window
        if namespace.adapter or namespace.cache_salt:
            event["extra_keys"] = [extra_keys(namespace, b.parent is None) for b in blocks]
        if namespace.cache_salt:
            event["cache_salt"] = namespace.cache_salt
        return event

    def _removed(self, change: Left) -> WireEvent:
        return {
            "type": "BlockRemoved",
            "block_hashes": [self._published(digest) for digest in change.digests],
            "medium": change.cell.medium,
            "group_idx": change.cell.group.index,
        }


def _token_ids(blocks: Sequence[Block]) -> list[int]:
    joined = b"".join([block.tokens for block in blocks])
    numbers: list[int] = np.frombuffer(joined, "<i4").tolist()
    return numbers


def encode_batch(events: Sequence[WireEvent]) -> bytes:
    packed: bytes = msgpack.packb([time.time(), events, DP_RANK])
    return packed
