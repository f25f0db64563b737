"""Host pages are objects as they lie, or are put together: the same bytes either way."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.spec import ModelMemory
from kvtide.storage.bounce_buffers import BounceBuffers
from kvtide.storage.objects import DIRECT_ALIGN, DIRECT_BYTES
from kvtide.tiers.layout import Layout
from kvtide.transfer.host_pages import HostPages, tails
from tests.cache.memories import ALL_MEMORIES, STAGE
from tests.transfer.stores import GUARD_BYTE, LARGE, Clock, Desk


def _places(desk: Desk) -> HostPages:
    return HostPages(desk.host, desk.formats)


def test_only_large_pages_have_tails(desks) -> None:
    desk = desks(LARGE)
    assert set(tails(desk.formats)) == {"kv", "draft"}, "and the sidecars of large pages"
    for pool, one in desk.formats.items():
        assert (one.payload_bytes >= DIRECT_BYTES) == (pool == "kv")
        assert one.bytes % (DIRECT_ALIGN if pool == "kv" else 16) == 0
    stride = desk.host.arrangement.run("kv").stride
    assert stride % DIRECT_ALIGN == 0, "pages behind each other begin with a block"


@pytest.mark.parametrize("layout", Layout)
def test_a_page_is_an_object_as_it_lies_where_it_is_one_run_with_a_tail(layout, desks) -> None:
    desk = desks(LARGE, layout)
    there = {pool: _places(desk).in_place(one, 3) for pool, one in desk.formats.items()}
    for pool in ("kv", "draft"):
        assert (there[pool] is None) == (layout is not Layout.PAGE_FIRST_DIRECT)
    assert there["swa"] is None


def test_places_in_memory_do_not_overlap_and_stay_within_the_block(desks) -> None:
    desk = desks(LARGE)
    places, base = _places(desk), desk.host.address
    ends = [0]
    for slot in range(desk.slots):
        for pool in ("kv", "draft"):
            place = places.in_place(desk.formats[pool], slot)
            assert place is not None and len(place) == desk.formats[pool].bytes
            start = np.frombuffer(place, np.uint8).ctypes.data - base
            assert ends[-1] <= start and start % DIRECT_ALIGN == 0
            ends.append(start + len(place))
    swa = desk.host.arrangement.rows("swa")[0]
    assert ends[-1] <= swa.offset
    assert swa.offset + desk.slots * swa.stride <= desk.host.data.numel()


def test_a_label_does_not_touch_any_row(desks) -> None:
    desk = desks(LARGE)
    pages = [*desk.pages(desk.slots), *desk.pages(desk.slots, anchor="swa")]
    before = desk.fill(pages)
    places = _places(desk)
    for slot in range(desk.slots):
        for pool in ("kv", "draft"):
            place = places.in_place(desk.formats[pool], slot)
            assert place is not None
            desk.formats[pool].seal(place, bytes(32))
    assert desk.contents(pages) == before and desk.guarded()


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("memory", [LARGE, *ALL_MEMORIES.values()], ids=lambda m: m.model)
def test_gathered_pages_are_in_canonical_order_and_scatter_back(
    memory: ModelMemory, layout: Layout, desks
) -> None:
    desk = desks(memory, layout)
    places, staging = _places(desk), BounceBuffers()
    for anchor in memory.anchors:
        pages = desk.pages(5, 2, anchor.name)
        contents = desk.fill(pages)
        objects = [one for one in desk.formats.values() if one.anchor == anchor.name]
        parts = staging.parts([one.bytes for _ in pages for one in objects])
        pairs = [(page.slot, one) for page in pages for one in objects]
        for (slot, one), part in zip(pairs, parts, strict=True):
            places.gather(one.pool, slot, part)
        for number, content in enumerate(contents):
            mine = parts[number * len(objects) :][: len(objects)]
            payloads = zip(objects, mine, strict=True)
            assert b"".join(part[: one.payload_bytes] for one, part in payloads) == content
        desk.wipe()
        for (slot, one), part in zip(pairs, parts, strict=True):
            places.scatter(one.pool, slot, part)
        assert desk.contents(pages) == contents
        others = [*desk.pages(2, 0, anchor.name), *desk.pages(5, 7, anchor.name)]
        empty = bytes([GUARD_BYTE]) * memory.slot_bytes(anchor.name)
        assert desk.contents(others) == [empty] * 7
        desk.wipe()


def test_a_page_without_bytes_is_an_object_all_the_same(desks) -> None:
    desk = desks(STAGE)
    assert desk.formats["kv"].payload_bytes == 0
    assert _places(desk).in_place(desk.formats["kv"], 0) is None


def test_staging_gives_separate_aligned_places_and_grows() -> None:
    staging = BounceBuffers()
    for sizes in ([16], [5000, 1, 4096], [100] * 50, [16], []):
        parts = staging.parts(sizes)
        assert [len(part) for part in parts] == sizes
        for number, part in enumerate(parts):
            assert np.frombuffer(part, np.uint8).ctypes.data % DIRECT_ALIGN == 0
            part[:] = bytes([number]) * len(part)
        assert all(set(part) <= {number} for number, part in enumerate(parts))


def test_staging_that_lingers_is_kept_and_not_used_until_its_time_is_up() -> None:
    clock = Clock()
    staging = BounceBuffers(clock)
    addresses = []
    for _ in range(3):
        (part,) = staging.parts([64])
        addresses.append(np.frombuffer(part, np.uint8).ctypes.data)
        staging.linger(10.0)
    assert len(set(addresses)) == 3 and len(staging._lingering) == 3
    clock.now += 11
    staging.linger(1.0)
    assert staging._lingering == [], "nothing was in use since, and what was is over"
