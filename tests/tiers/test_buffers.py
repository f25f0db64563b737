"""Buffers: what model code writes through a view is what lies in the row, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.spec import DType, ModelMemory, SpecError
from kvtide.tiers.buffers import TORCH_DTYPES, Buffers
from kvtide.tiers.layout import Arrangement, Layout
from tests.transfer.memories import MEMORIES, pick, random_bytes, slot_array, some_slots

every_layout = pytest.mark.parametrize("layout", list(Layout), ids=lambda one: one.value)
every_memory = pytest.mark.parametrize("name", list(MEMORIES))


def buffers(memory: ModelMemory, layout: Layout, device: torch.device, slots: int = 3) -> Buffers:
    """Of zeros, and part of a larger block: views must not begin where that one does."""
    arrangement = Arrangement(memory, some_slots(memory, slots), layout)
    whole = torch.zeros(arrangement.bytes + 64, dtype=torch.uint8, device=device)
    return Buffers(arrangement, whole[32:-32])


@pytest.mark.quick
@every_layout
@every_memory
def test_what_is_written_through_a_view_lies_in_its_row(
    name: str, layout: Layout, device: torch.device
) -> None:
    """One element per field, layer and pool, each in a random entry; everything else stays 0."""
    memory, rng = MEMORIES[name], np.random.default_rng(5)
    tier = buffers(memory, layout, device)
    for pool in memory.pools:
        entries = pool.entries_per_page(memory.page_tokens)
        for layer in pool.layers:
            offset = 0
            for field in pool.entry.fields:
                view = tier.view(pool.name, layer)[field.name]
                slots = tier.arrangement.slots[pool.follows or pool.name]
                assert view.shape == (slots, entries, *field.shape)
                assert view.dtype is TORCH_DTYPES[field.dtype]
                slot, entry = int(rng.integers(slots)), int(rng.integers(entries))
                # No exponent in these bytes is all ones: a NaN would not have to keep its bits.
                written = (random_bytes(rng, field.bytes) & 0x3F | 1).to(device)
                view[slot, entry] = written.view(view.dtype).view(field.shape)
                row = tier.rows(pool.name, layer)[slot]
                start = entry * pool.entry.bytes + offset
                assert torch.equal(row[start : start + field.bytes], written)
                assert int(torch.count_nonzero(tier.data)) == field.bytes
                row.zero_()
                offset += field.bytes


def test_the_memories_of_these_tests_hold_every_dtype() -> None:
    held = {
        field.dtype
        for memory in MEMORIES.values()
        for pool in memory.pools
        for field in pool.entry.fields
    }
    assert held == set(DType) == set(TORCH_DTYPES)


@every_memory
def test_rows_are_bytes_at_the_place_that_the_arrangement_says(
    name: str, device: torch.device
) -> None:
    memory = MEMORIES[name]
    for layout in Layout:
        tier = buffers(memory, layout, device)
        tier.data.copy_(random_bytes(np.random.default_rng(6), tier.data.numel()))
        for pool, layer in ((one, y) for one in memory.pools for y in one.layers):
            row = tier.arrangement.row(pool, layer)
            rows = tier.rows(pool.name, layer)
            assert rows.shape == (tier.arrangement.slots[pool.follows or pool.name], row.bytes)
            for slot, held in enumerate(rows):
                start = row.offset + slot * row.stride
                assert torch.equal(held, tier.data[start : start + row.bytes])


@every_memory
def test_pages_come_in_the_same_bytes_from_every_layout(name: str, device: torch.device) -> None:
    memory = MEMORIES[name]
    rng = np.random.default_rng(7)
    first, *others = (buffers(memory, layout, device, slots=4) for layout in Layout)
    first.data.copy_(random_bytes(rng, first.data.numel()))
    for pool in memory.pools:
        for layer in pool.layers:
            for other in others:
                other.rows(pool.name, layer).copy_(first.rows(pool.name, layer))
    for anchor in memory.anchors:
        slots = pick(rng, 4, 3)
        pages = first.pages(anchor.name, slots)
        assert pages.shape == (3, memory.slot_bytes(anchor.name))
        assert all(torch.equal(other.pages(anchor.name, slots), pages) for other in others)


def test_pages_are_a_copy_and_begin_with_the_first_layer(device: torch.device) -> None:
    tier = buffers(MEMORIES["llama"], Layout.LAYER_FIRST, device)
    tier.rows("kv", 0)[2] = 7
    page = tier.pages("kv", slot_array([2]))[0]
    size = tier.rows("kv", 0).shape[1]
    tier.data.zero_()
    assert page[:size].eq(7).all()
    assert not page[size:].any()


@every_layout
def test_a_slices_views_go_by_global_layer(layout: Layout, device: torch.device) -> None:
    stage = MEMORIES["glm_moe_dsa_stage"]
    tier = buffers(stage, layout, device)
    tier.view("kv", 3)["latent"].fill_(1)
    assert not tier.rows("kv", 2).any()
    assert tier.rows("kv", 3).any()
    for absent in (0, 1, 4):
        with pytest.raises(AssertionError, match=rf"pool kv has layers \(2, 3\), not {absent}"):
            tier.view("kv", absent)
        with pytest.raises(AssertionError, match=rf"pool kv has layers \(2, 3\), not {absent}"):
            tier.rows("kv", absent)
    with pytest.raises(AssertionError, match=r"pool index has layers \(3,\), not 2"):
        tier.view("index", 2)


def test_a_pool_that_the_model_lacks_is_refused_with_those_it_has(device: torch.device) -> None:
    tier = buffers(MEMORIES["gpt_oss"], Layout.PAGE_FIRST, device)
    with pytest.raises(SpecError, match="no pool named index; it has kv, swa"):
        tier.rows("index", 0)


def test_a_block_that_does_not_fit_is_refused(device: torch.device) -> None:
    arrangement = Arrangement(MEMORIES["llama"], {"kv": 2}, Layout.PAGE_FIRST)
    size = arrangement.bytes

    def block(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    Buffers(arrangement, block(size))
    with pytest.raises(AssertionError, match="too small"):
        Buffers(arrangement, block(size - 1))
    with pytest.raises(AssertionError, match="aligned"):
        Buffers(arrangement, block(size + 8)[8:])
    with pytest.raises(AssertionError):
        Buffers(arrangement, block(size, torch.int8))
    with pytest.raises(AssertionError):
        Buffers(arrangement, block(2 * size)[::2])


@every_layout
def test_views_of_a_block_within_a_larger_one_lie_inside_it(
    layout: Layout, device: torch.device
) -> None:
    memory = MEMORIES["deepseek_v4"]
    arrangement = Arrangement(memory, some_slots(memory, 3), layout)
    whole = torch.zeros(arrangement.bytes + 64, dtype=torch.uint8, device=device)
    tier = Buffers(arrangement, whole[32:-32])
    for pool in memory.pools:
        for layer in pool.layers:
            tier.rows(pool.name, layer).fill_(1)
    assert tier.data.all()
    assert not whole[:32].any()
    assert not whole[-32:].any()
    tier.data.zero_()
    tier.view("swa", 0)["rope"][0, 0] = 1.0
    assert tier.rows("swa", 0)[0].any()
