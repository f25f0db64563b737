"""What the table shows of an index, and in which order; and how it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from kvtide.index import Namespace
from kvtide.index.keys import pack
from kvtide.server.kv_events.block_hashes import BlockHashes, VllmHashes
from kvtide.server.kv_events.block_table import Appeared, BlockTable
from kvtide.server.kv_events.event_encoding import (
    EventEncoder,
    TokenPacker,
    WireEvent,
    encode_batch,
)
from kvtide.server.kv_events.index_feed import PagesRemoved, PagesStored
from kvtide.server.kv_events.kv_groups import KVGroup, kv_groups
from kvtide.spec.catalog import resolve
from tests.index.memories import (
    DRAFTED,
    FULL,
    HOT,
    OPTIONAL,
    PAGE,
    RECURRENT,
    TWO_HISTORIES,
    WINDOW,
)
from tests.server.kv_events.consuming import published

DEVICE, HOST = 0, 1
"""The cells of a memory with one anchor."""


def stored(
    cell: int, slots: list[int], tokens: list[int], above: tuple[int, int] | None = None
) -> PagesStored:
    namespace = Namespace() if above is None else None
    return PagesStored(cell, packed_slots(slots), pack(tokens), above, namespace)


def removed(cell: int, slots: list[int]) -> PagesRemoved:
    return PagesRemoved(cell, packed_slots(slots))


def packed_slots(slots: list[int]) -> bytes:
    return np.array(slots, np.int32).tobytes()


def table(
    groups: Mapping[str, KVGroup] | None = None, hashes: BlockHashes | None = None
) -> BlockTable:
    chosen = groups or kv_groups(FULL)
    return BlockTable(chosen, hashes or VllmHashes(), PAGE, TokenPacker(PAGE))


class Counted(VllmHashes):
    """Counts the blocks that are hashed."""

    blocks = 0

    def of(
        self, key: bytes, parent: bytes | None, tokens: tuple[int, ...], namespace: Namespace
    ) -> bytes:
        self.blocks += 1
        return super().of(key, parent, tokens, namespace)


def changes(made: BlockTable) -> list[tuple[str, str, int]]:
    """What changed, on which medium, and of how many blocks."""
    made.settle()
    return [
        ("appeared", change.cell.medium, len(change.blocks))
        if isinstance(change, Appeared)
        else ("left", change.cell.medium, len(change.digests))
        for change in made.take()
    ]


TEXT = list(range(4 * PAGE))


def test_pages_that_follow_each_other_are_one_change() -> None:
    made = table()
    made.hear(stored(DEVICE, [0, 1], TEXT[: 2 * PAGE]))
    made.hear(stored(DEVICE, [2], TEXT[2 * PAGE : 3 * PAGE], (DEVICE, 1)))
    made.hear(stored(HOST, [7], TEXT[:PAGE]))
    assert changes(made) == [("appeared", "GPU", 3), ("appeared", "CPU", 1)]
    made.hear(removed(DEVICE, [2]))
    made.hear(removed(DEVICE, [0, 1]))
    assert changes(made) == [("left", "GPU", 3)]
    assert len(made.blocks) == 1, "one is on the host"


def test_a_later_block_waits_on_the_gpu_for_the_one_before() -> None:
    made = table()
    made.hear(stored(HOST, [0, 1, 2], TEXT[: 3 * PAGE]))
    made.hear(stored(DEVICE, [5, 6], TEXT[PAGE : 3 * PAGE], (HOST, 0)))
    assert changes(made) == [("appeared", "CPU", 3)]
    made.hear(stored(DEVICE, [4], TEXT[:PAGE]))
    assert changes(made) == [("appeared", "GPU", 3)]


def test_a_block_that_waits_may_leave_unseen() -> None:
    made = table()
    made.hear(stored(HOST, [0], TEXT[:PAGE]))
    made.hear(stored(DEVICE, [5], TEXT[PAGE : 2 * PAGE], (HOST, 0)))
    made.hear(removed(DEVICE, [5]))
    made.hear(stored(DEVICE, [4], TEXT[:PAGE]))
    assert changes(made) == [("appeared", "CPU", 1), ("appeared", "GPU", 1)]


def test_blocks_leave_the_gpu_with_the_one_before_and_come_back_with_it() -> None:
    made = table()
    made.hear(stored(DEVICE, [0, 1, 2], TEXT[: 3 * PAGE]))
    made.take()
    made.hear(removed(DEVICE, [0]))
    assert changes(made) == [("left", "GPU", 3)]
    made.hear(stored(DEVICE, [9], TEXT[:PAGE]))
    assert changes(made) == [("appeared", "GPU", 3)]


def test_pages_with_one_hash_are_one_block_that_leaves_with_the_last() -> None:
    """They differ in the tokens after them."""
    made = table()
    for slot in (0, 1, 2):
        made.hear(stored(DEVICE, [slot], TEXT[:PAGE]))
    assert changes(made) == [("appeared", "GPU", 1)]
    made.hear(removed(DEVICE, [1]))
    made.hear(removed(DEVICE, [0]))
    assert changes(made) == []
    made.hear(removed(DEVICE, [2]))
    assert changes(made) == [("left", "GPU", 1)] and not made.blocks


def test_pages_that_no_tier_has_are_hashed_through() -> None:
    one, other = table(), table()
    one.hear(stored(HOST, [0, 1, 2], TEXT[: 3 * PAGE]))
    event = stored(HOST, [0], TEXT[2 * PAGE : 3 * PAGE])
    other.hear(event._replace(between=pack(TEXT[: 2 * PAGE])))
    (digest,) = other.blocks
    assert digest == list(one.blocks)[2]


def test_everything_lists_branches_after_what_they_branch_from() -> None:
    made = table()
    made.hear(stored(DEVICE, [0, 1, 2], TEXT[: 3 * PAGE]))
    made.hear(stored(DEVICE, [3, 4], [9] * (2 * PAGE), (DEVICE, 0)))
    seen: set[bytes | None] = {None}
    for run in made.everything():
        for block in run.blocks:
            assert block.parent in seen
            seen.add(block.digest)
    assert len(seen) == 6


# -- groups ---------------------------------------------------------------------------------------


def test_one_group_counts_prefixes_and_the_others_have_their_kind() -> None:
    def of(memory: object) -> list[tuple[str, int | None]]:
        return [(group.kind, group.window) for group in kv_groups(memory).values()]  # type: ignore[arg-type]

    assert of(FULL) == [("full_attention", None)]
    assert of(WINDOW) == [("full_attention", None), ("sliding_window", 2 * PAGE)]
    assert of(RECURRENT) == [("full_attention", None), ("mamba", None)]
    assert of(TWO_HISTORIES) == [("full_attention", None), ("unknown", None)]
    assert of(OPTIONAL) == [("full_attention", None), ("unknown", None)]
    assert of(DRAFTED) == [("full_attention", None), ("sliding_window", 2 * PAGE)]
    assert sum(group.history for group in kv_groups(HOT).values()) == 1


def test_latent_attention_is_named_as_such() -> None:
    kinds = {group.kind for group in kv_groups(resolve("deepseek-v3.2")).values()}
    assert kinds == {"mla_attention"}


# -- encoding -------------------------------------------------------------------------------------


def unpacked(events: Sequence[WireEvent]) -> dict[str, Any]:
    (event,) = events
    found: dict[str, Any] = msgpack.unpackb(event.packed)
    assert found["type"] == event.kind
    return found


def test_events_are_written_as_vllm_writes_them() -> None:
    made, hashes = table(), VllmHashes()
    encoder = EventEncoder(hashes, PAGE)
    made.hear(stored(DEVICE, [0, 1], TEXT[: 2 * PAGE]))
    one, two = (published(hashes, digest) for digest in made.blocks)
    event = unpacked(encoder.events(made.take()))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [one, two],
        "parent_block_hash": None,
        "token_ids": TEXT[: 2 * PAGE],
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    made.hear(removed(DEVICE, [1]))
    event = unpacked(encoder.events(made.take()))
    assert event == {
        "type": "BlockRemoved", "block_hashes": [two], "medium": "GPU", "group_idx": 0,
    }  # fmt: skip


def test_a_batch_has_the_time_its_events_and_the_rank() -> None:
    made, encoder = table(), EventEncoder(VllmHashes(), PAGE)
    for first in (0, 20):  # More events than the shortest array of msgpack has.
        made.hear(stored(DEVICE, [first], [first] * PAGE))
        made.hear(stored(HOST, list(range(first, first + 18)), [first] * (18 * PAGE)))
    changes = encoder.events(made.take())
    at, events, rank = msgpack.unpackb(encode_batch(changes))
    assert [event["medium"] for event in events] == ["GPU", "CPU"] * 2 and rank == 0 and at > 1e9
    assert [len(event["block_hashes"]) for event in events] == [1, 18] * 2
    at, events, rank = msgpack.unpackb(encode_batch(changes * 10))
    assert len(events) == 40


@pytest.mark.parametrize("size", [1, 15, 16, 64])
def test_tokens_of_any_size_and_count_are_written_as_msgpack_does(size: int) -> None:
    edges = [0, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1]
    tokens = tuple((edges * 8)[:size])
    packed = TokenPacker(size)(tokens)
    assert msgpack.packb(tokens).endswith(packed)
    assert len(packed) == sum(len(msgpack.packb(token)) for token in tokens)


# -- what it costs --------------------------------------------------------------------------------


def test_a_page_that_comes_to_another_medium_is_not_hashed_again() -> None:
    hashes = Counted()
    made = table(hashes=hashes)
    made.hear(stored(DEVICE, [0, 1, 2], TEXT[: 3 * PAGE]))
    made.hear(stored(HOST, [0, 1, 2], TEXT[: 3 * PAGE]))
    assert hashes.blocks == 3
    made.hear(removed(DEVICE, [0, 1, 2]))
    made.hear(removed(HOST, [0, 1, 2]))
    made.hear(stored(DEVICE, [0], TEXT[:PAGE]))
    assert hashes.blocks == 3
    assert changes(made)[-1] == ("appeared", "GPU", 1)


def test_a_window_is_written_in_tokens() -> None:
    group = KVGroup(1, "sliding_window", 128, history=False)
    made = table({"swa": group})
    made.hear(stored(HOST, [0], TEXT[:PAGE]))
    event = unpacked(EventEncoder(VllmHashes(), PAGE).events(made.take()))
    assert (event["medium"], event["group_idx"]) == ("CPU", 1)
    assert event["kv_cache_spec_sliding_window"] == 128
