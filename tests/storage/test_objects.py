"""Stored pages: what is believed of one, and everything that is not."""

from __future__ import annotations

import itertools

import pytest

from kvtide.spec import ModelMemory, catalog, with_draft
from kvtide.storage import CorruptObjectError, ObjectFormat, object_formats
from kvtide.storage.objects import DIRECT_ALIGN, DIRECT_BYTES, SMALL_ALIGN
from tests.cache.memories import ALL_MEMORIES, DRAFTED, FULL, V4, V4_DRAFTED, WINDOW

SPACE, KEY = b"s" * 32, b"k" * 32


def sealed(one: ObjectFormat, key: bytes = KEY) -> bytearray:
    memory = bytearray(one.bytes)
    memory[: one.payload_bytes] = bytes(n * 7 % 256 for n in range(one.payload_bytes))
    one.seal(memoryview(memory), key)
    return memory


def formats(memory: ModelMemory) -> list[ObjectFormat]:
    return list(object_formats(memory, SPACE).values())


@pytest.mark.parametrize("name", ALL_MEMORIES)
def test_what_was_sealed_is_believed_and_its_payload_is_untouched(name: str) -> None:
    for one in formats(ALL_MEMORIES[name]):
        memory = sealed(one)
        one.check(memoryview(memory), KEY)
        assert memory[: one.payload_bytes] == bytes(n * 7 % 256 for n in range(one.payload_bytes))


def test_any_changed_byte_before_the_padding_is_found() -> None:
    (one,) = formats(FULL)
    memory = sealed(one)
    end = len(bytes(memory).rstrip(b"\0"))
    for at in range(end):
        changed = memory.copy()
        changed[at] ^= 1
        with pytest.raises(CorruptObjectError):
            one.check(memoryview(changed), KEY)


def test_half_an_object_is_not_one() -> None:
    (one,) = formats(FULL)
    memory = sealed(one)
    for kept in range(0, len(bytes(memory).rstrip(b"\0")), 7):
        half = memory[:kept] + bytes(one.bytes - kept)
        with pytest.raises(CorruptObjectError):
            one.check(memoryview(half), KEY)


def test_an_object_is_believed_under_its_own_key_only() -> None:
    (one,) = formats(FULL)
    with pytest.raises(CorruptObjectError, match="another key"):
        one.check(memoryview(sealed(one)), b"x" * 32)


def test_other_declarations_and_weights_do_not_believe_it() -> None:
    for a, b in itertools.permutations(("qwen3-8b", "deepseek-v4-flash"), 2):
        ours, other = (catalog.resolve(name) for name in (a, b))
        mine = ObjectFormat(ours, ours.anchors[0].name, SPACE)
        theirs = ObjectFormat(other, other.anchors[0].name, SPACE)
        memory = sealed(mine)[: theirs.bytes]
        memory += bytes(theirs.bytes - len(memory))
        with pytest.raises(CorruptObjectError):
            theirs.check(memoryview(memory), KEY)
    (one,) = formats(FULL)
    with pytest.raises(CorruptObjectError, match="another declaration"):
        ObjectFormat(FULL, "kv", b"t" * 32).check(memoryview(sealed(one)), KEY)


def test_a_draft_changes_nothing_of_the_target_s_objects() -> None:
    for drafted, plain in ((DRAFTED, WINDOW), (V4_DRAFTED, V4)):
        ours, theirs = object_formats(drafted, SPACE, b"d"), object_formats(plain, SPACE)
        assert ours.keys() - theirs.keys() == {"draft"}
        for anchor, one in theirs.items():
            assert sealed(ours[anchor]) == sealed(one)
            assert ours[anchor].key(KEY, b"after") == one.key(KEY)


def test_a_sidecar_s_object_is_known_by_its_draft_and_by_the_tokens_after_the_page() -> None:
    other = with_draft(WINDOW, FULL)
    kinds = [
        object_formats(memory, space, fingerprint)["draft"]
        for memory, space, fingerprint in (
            (DRAFTED, SPACE, b""),
            (DRAFTED, SPACE, b"d"),
            (DRAFTED, SPACE, b"e"),
            (DRAFTED, b"t" * 32, b"d"),
            (other, SPACE, b"d"),
        )
    ]
    keys = {one.key(KEY, after) for one in kinds for after in (b"", b"1234", b"4321")}
    assert len(keys) == 3 * len(kinds) and kinds[0].is_sidecar and kinds[0].anchor == "kv"
    for mine, its in itertools.permutations(kinds[:4], 2):
        with pytest.raises(CorruptObjectError, match="another declaration"):
            its.check(memoryview(sealed(mine)), KEY)


def test_a_sidecar_without_layers_has_no_object() -> None:
    first, last = V4_DRAFTED.stages(2)
    assert "draft" not in object_formats(first, SPACE) and "draft" in object_formats(last, SPACE)


def test_large_objects_are_whole_blocks_of_a_disk_and_small_ones_are_not_blown_up() -> None:
    for name in ("qwen3-8b", "deepseek-v4-flash"):
        for one in formats(catalog.resolve(name)):
            assert one.payload_bytes >= DIRECT_BYTES and one.bytes % DIRECT_ALIGN == 0
            assert one.bytes - one.payload_bytes < 2 * DIRECT_ALIGN
    (small,) = formats(FULL)
    assert small.bytes % SMALL_ALIGN == 0 and small.bytes - small.payload_bytes < 512
