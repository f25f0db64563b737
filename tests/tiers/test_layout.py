"""Layouts: every row has its own place, places leave no gap, and pieces are all of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.spec import ModelMemory
from kvtide.tiers.layout import (
    Arrangement,
    Layout,
    Piece,
    Row,
    pieces,
)
from tests.transfer.memories import LAYOUT_PAIRS, MEMORIES, some_slots

every_memory = pytest.mark.parametrize("name", list(MEMORIES))
every_layout = pytest.mark.parametrize("layout", list(Layout), ids=lambda one: one.value)
every_pair = pytest.mark.parametrize(
    ("source", "target"), LAYOUT_PAIRS, ids=lambda layout: layout.value
)
# One example is a slot count per anchor; the memories and layouts are gone through one by one.
few = settings(max_examples=6, deadline=None)
slot_counts = st.lists(st.integers(0, 6), min_size=4, max_size=4)

Copy = tuple[int, int, int]


def arranged(memory: ModelMemory, counts: Iterable[int], layout: Layout) -> Arrangement:
    names = [anchor.name for anchor in memory.anchors]
    return Arrangement(memory, dict(zip(names, counts, strict=False)), layout)


def all_rows(arrangement: Arrangement) -> Iterator[tuple[str, Row]]:
    for anchor in arrangement.memory.anchors:
        yield from ((anchor.name, row) for row in arrangement.rows(anchor.name))


# -- where rows lie -------------------------------------------------------------------------


def in_order(memory: ModelMemory, slots: dict[str, int], layout: Layout) -> Iterator[object]:
    """Rows as (pool, layer, slot), in the order that the layout's name promises."""
    for anchor, count in slots.items():
        group = memory.group(anchor)
        layers = sorted({layer for pool in group for layer in pool.layers})
        if layout is Layout.LAYER_FIRST:
            yield from ((p.name, y, s) for p in group for y in p.layers for s in range(count))
        elif layout is Layout.PAGE_FIRST:
            yield from ((p.name, y, s) for p in group for s in range(count) for y in p.layers)
        else:
            rows = [(y, p) for y in layers for p in group if y in p.layers]
            rows.sort(key=lambda row: row[1].reuse.reach == 0)
            yield from ((p.name, y, s) for s in range(count) for y, p in rows)


@every_memory
@few
@given(counts=slot_counts)
def test_rows_lie_side_by_side_in_the_order_of_the_layout_and_cover_the_tier(
    name: str, counts: list[int]
) -> None:
    memory = MEMORIES[name]
    for layout in Layout:
        arrangement = arranged(memory, counts, layout)
        found = sorted(
            (row.offset + slot * row.stride, row.bytes, (row.pool, row.layer, slot))
            for anchor, row in all_rows(arrangement)
            for slot in range(arrangement.slots[anchor])
        )
        wanted = list(in_order(memory, arrangement.slots, layout))
        assert [place for _, _, place in found] == wanted
        end = 0
        for start, size, _ in found:
            assert start == end
            assert size > 0
            end += size
        assert end == arrangement.bytes


@every_memory
def test_rows_are_aligned_and_strides_too(name: str) -> None:
    memory = MEMORIES[name]
    for layout in Layout:
        for _, row in all_rows(Arrangement(memory, some_slots(memory, 3), layout)):
            assert row.offset % 16 == row.stride % 16 == row.bytes % 16 == 0, row
            assert row.bytes == memory.pool(row.pool).row_bytes(memory.page_tokens)


@every_memory
def test_the_canonical_order_is_by_layer_then_pool_whatever_the_layout(name: str) -> None:
    memory = MEMORIES[name]
    for anchor in memory.anchors:
        group = memory.group(anchor.name)
        layers = sorted({layer for pool in group for layer in pool.layers})
        wanted = [(y, p.name) for y in layers for p in group if y in p.layers]
        for layout in Layout:
            rows = Arrangement(memory, some_slots(memory, 2), layout).rows(anchor.name)
            assert [(row.layer, row.pool) for row in rows] == wanted


@every_layout
def test_rows_are_found_by_global_layer_number(layout: Layout) -> None:
    stage = MEMORIES["glm_moe_dsa_stage"]
    arrangement = Arrangement(stage, {"kv": 3}, layout)
    assert [arrangement.row(stage.pool("kv"), layer).layer for layer in (2, 3)] == [2, 3]
    assert arrangement.row(stage.pool("index"), 3).pool == "index"
    with pytest.raises(AssertionError, match=r"pool kv has layers \(2, 3\), not 0"):
        arrangement.row(stage.pool("kv"), 0)
    with pytest.raises(AssertionError, match=r"pool index has layers \(3,\), not 2"):
        arrangement.row(stage.pool("index"), 2)


def test_an_anchor_without_a_slot_count_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="swa"):
        Arrangement(MEMORIES["gpt_oss"], {"kv": 3}, Layout.LAYER_FIRST)


# -- pieces ---------------------------------------------------------------------------------


def bytes_copied(copies: Iterable[Copy]) -> dict[int, int]:
    """Target byte → source byte; no byte is written twice."""
    origin: dict[int, int] = {}
    for source, target, size in copies:
        where = range(target, target + size)
        assert not any(byte in origin for byte in where)
        origin.update(zip(where, range(source, source + size), strict=True))
    return origin


def placed(piece: Piece, here: int, there: int) -> Copy:
    return (
        piece.source_offset + here * piece.source_stride,
        piece.target_offset + there * piece.target_stride,
        piece.bytes,
    )


@every_pair
@pytest.mark.parametrize(
    "name", ["llama", "gpt_oss_draft", "nemotron_h", "glm_moe_dsa_stage", "deepseek_v4_bf16"]
)
@few
@given(first=st.integers(0, 6), count=st.integers(0, 7), here=st.integers(0, 2))
def test_pieces_are_the_rows_of_the_asked_layers_and_nothing_else(
    name: str, source: Layout, target: Layout, first: int, count: int, here: int
) -> None:
    memory, layers = MEMORIES[name], range(first, first + count)
    a = Arrangement(memory, some_slots(memory, 3), source)
    b = Arrangement(memory, some_slots(memory, 2), target)
    for anchor in memory.anchors:
        found = pieces(a, b, anchor.name, layers)
        row_by_row = [
            (old.offset + here * old.stride, new.offset + new.stride, old.bytes)
            for old, new in zip(a.rows(anchor.name), b.rows(anchor.name), strict=True)
            if old.layer in layers
        ]
        assert bytes_copied(placed(piece, here, 1) for piece in found) == bytes_copied(row_by_row)


@every_pair
def test_pieces_of_a_sidecar_are_its_rows_alone(source: Layout, target: Layout) -> None:
    memory = MEMORIES["gpt_oss_draft"]
    a, b = (Arrangement(memory, some_slots(memory, 3), layout) for layout in (source, target))
    (sidecar,) = memory.draft_sidecars
    anchor = memory.pool(sidecar).follows
    assert anchor is not None
    found = pieces(a, b, anchor, range(memory.end_layer), sidecar)
    rows = zip(a.rows(anchor), b.rows(anchor), strict=True)
    own = [(old.offset, new.offset, old.bytes) for old, new in rows if old.pool == sidecar]
    assert bytes_copied(placed(piece, 0, 0) for piece in found) == bytes_copied(own) != {}


def test_an_optional_sidecar_lies_behind_the_rest_of_its_page_each_with_its_tail() -> None:
    memory = MEMORIES["gpt_oss_draft"]
    (sidecar,) = memory.draft_sidecars
    anchor = memory.pool(sidecar).follows
    assert anchor is not None
    tails = {anchor: 48, sidecar: 16}
    found = Arrangement(memory, some_slots(memory, 3), Layout.PAGE_FIRST_DIRECT, tails)
    first, behind = found.run(anchor), found.run(sidecar)
    assert first is not None and behind is not None
    assert first.stride == behind.stride == memory.slot_bytes(anchor) + 64
    assert first.bytes + behind.bytes == first.stride
    for row in found.rows(anchor):
        run = behind if row.pool == sidecar else first
        end = run.offset + run.bytes - tails[sidecar if run is behind else anchor]
        assert run.offset <= row.offset and row.offset + row.bytes <= end
    plain = Arrangement(memory.without_draft, some_slots(memory, 3), Layout.PAGE_FIRST_DIRECT)
    alike = zip(plain.rows(anchor), found.rows(anchor), strict=False)
    assert all((a.pool, a.layer, a.bytes) == (b.pool, b.layer, b.bytes) for a, b in alike)


@every_memory
def test_direct_on_both_sides_is_one_piece_for_any_range_of_layers(name: str) -> None:
    """Whatever the device keeps beside what moves."""
    memory, layout = MEMORIES[name], Layout.PAGE_FIRST_DIRECT
    a = Arrangement(memory, some_slots(memory, 3), layout)
    b = Arrangement(memory.at_rest, some_slots(memory, 5), layout)
    for anchor in memory.anchors:
        rows = b.rows(anchor.name)
        for first in range(memory.end_layer):
            for end in range(first + 1, memory.end_layer + 1):
                wanted = sum(row.bytes for row in rows if first <= row.layer < end)
                found = pieces(a, b, anchor.name, range(first, end))
                assert [piece.bytes for piece in found] == ([wanted] if wanted else [])


@every_memory
def test_page_first_on_both_sides_is_one_piece_for_a_page_of_a_pool(name: str) -> None:
    memory = MEMORIES[name]
    a = Arrangement(memory, some_slots(memory, 3), Layout.PAGE_FIRST)
    for anchor in memory.anchors:
        found = pieces(a, a, anchor.name, range(memory.end_layer))
        pages = [pool.page_bytes(memory.page_tokens) for pool in memory.group(anchor.name)]
        assert [piece.bytes for piece in found] == [size for size in pages if size]


@every_memory
def test_layer_first_on_both_sides_is_a_piece_per_row_that_fills_its_stride(name: str) -> None:
    memory = MEMORIES[name]
    a = Arrangement(memory, some_slots(memory, 3), Layout.LAYER_FIRST)
    for anchor in memory.anchors:
        found = pieces(a, a, anchor.name, range(memory.end_layer))
        assert len(found) == len(a.rows(anchor.name))
        assert all(p.bytes == p.source_stride == p.target_stride for p in found)
