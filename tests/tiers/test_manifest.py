"""Manifests: what a rank says of its rows is where they are, and comes through JSON whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtide.spec import ModelMemory
from kvtide.spec.residency import served_hot
from kvtide.tiers.layout import Arrangement, Layout
from kvtide.tiers.manifest import (
    PAGES,
    RUNNING,
    TAIL,
    Area,
    ManifestError,
    MemoryKind,
    MemoryManifest,
    running_areas,
)
from tests.transfer.memories import MEMORIES, PAGE_TOKENS, family, some_slots

every_memory = pytest.mark.parametrize("name", list(MEMORIES))


def all_areas(memory: ModelMemory, layout: Layout) -> MemoryManifest:
    """The manifest of a rank that is a source and a target."""
    device = Arrangement(memory, some_slots(memory, 3), layout)
    host = Arrangement(memory.at_rest, some_slots(memory, 5), layout)
    areas = [
        *running_areas(device, host),
        Area.of(PAGES, host, MemoryKind.HOST, region=1, base=4096),
        Area.of(TAIL, Arrangement(memory, some_slots(memory, 2), layout), MemoryKind.HOST),
    ]
    return MemoryManifest.of(memory, areas, b"\x00weights", b"draft")


def hot_memory() -> ModelMemory:
    return served_hot(family("deepseek_v32", PAGE_TOKENS, index_topk=8), 8)


@every_memory
@pytest.mark.parametrize("layout", list(Layout))
def test_a_manifest_comes_through_json_whole(name: str, layout: Layout) -> None:
    manifest = all_areas(MEMORIES[name], layout)
    text = json.dumps(manifest.to_json())
    assert MemoryManifest.from_json(json.loads(text)) == manifest


@every_memory
def test_rows_and_fields_lie_where_the_arrangement_has_them(name: str) -> None:
    memory = MEMORIES[name]
    for layout in Layout:
        arrangement = Arrangement(memory, some_slots(memory, 3), layout)
        area = Area.of(TAIL, arrangement, MemoryKind.HOST)
        assert len(area.rows) == sum(len(pool.layers) for pool in memory.pools)
        for row in area.rows:
            pool = memory.pool(row.pool)
            place = arrangement.row(pool, row.layer)
            assert (row.offset, row.stride, row.shape.bytes) == (
                place.offset, place.stride, place.bytes,
            )  # fmt: skip
            assert row.anchor == (pool.follows or pool.name)
            assert row.slots == arrangement.slots[row.anchor]
            assert row.required == pool.reuse.required
            end = 0
            for field, spec in zip(row.shape.fields, pool.entry.fields, strict=True):
                assert (field.offset, field.bytes, field.name) == (end, spec.bytes, spec.name)
                assert field.units * field.unit_bytes == field.bytes
                end += field.bytes
            assert end == row.shape.entry_bytes
            assert row.shape.entries == pool.entries_per_page(memory.page_tokens)


def test_units_are_those_that_divide_over_ranks() -> None:
    rank = MEMORIES["nemotron_h_rank"]
    manifest = all_areas(rank, Layout.LAYER_FIRST)
    assert (manifest.tensor_rank, manifest.tensor_ranks) == (3, 4)
    rows = {row.pool: row for _, row in manifest.rows(RUNNING)}
    fields = {field.name: field for field in rows["state"].shape.fields}
    assert {name: field.units for name, field in fields.items()} == {
        "conv_x": 1, "conv_b": 1, "conv_c": 1, "ssm": 1,
    }  # fmt: skip
    assert fields["conv_x"].unit_shape == (6, 3)
    latent = Area.of(
        PAGES, Arrangement(MEMORIES["deepseek_v3"], {"kv": 1}, Layout.PAGE_FIRST), MemoryKind.HOST
    )
    assert [(field.sharded, field.units) for field in latent.rows[0].shape.fields] == [
        (False, 1), (False, 1),
    ]  # fmt: skip


def test_an_undivided_memory_is_the_first_of_one_tensor_rank() -> None:
    manifest = all_areas(MEMORIES["llama"], Layout.PAGE_FIRST)
    assert (manifest.tensor_rank, manifest.tensor_ranks) == (0, 1)
    assert manifest.page_tokens == PAGE_TOKENS


def test_whole_pages_keep_nothing_that_lives_within_a_page() -> None:
    memory = MEMORIES["deepseek_v4"]
    arrangement = Arrangement(memory, some_slots(memory, 3), Layout.LAYER_FIRST)
    within = {pool.name for pool in memory.pools if pool.reuse.reach == 0}
    assert within
    on_device = {row.pool for row in Area.of(PAGES, arrangement, MemoryKind.DEVICE).rows}
    assert not on_device & within
    tail = {row.pool for row in Area.of(TAIL, arrangement, MemoryKind.HOST).rows}
    assert tail == on_device | within


def test_a_source_has_hot_pools_on_the_host_and_all_others_on_the_device() -> None:
    memory = hot_memory()
    device = Arrangement(memory, {"index": 3, "kv": 0}, Layout.LAYER_FIRST)
    host = Arrangement(memory.at_rest, {"index": 4, "kv": 5}, Layout.PAGE_FIRST_DIRECT)
    areas = running_areas(device, host, regions=(6, 2))
    found = [(area.kind, area.region, {row.pool for row in area.rows}) for area in areas]
    assert found == [(MemoryKind.DEVICE, 6, {"index"}), (MemoryKind.HOST, 2, {"kv"})]
    assert {row.slots for row in areas[1].rows} == {5}
    with pytest.raises(AssertionError, match="kv are on the host"):
        running_areas(device)


def test_a_source_without_hot_pools_needs_no_host() -> None:
    memory = MEMORIES["gpt_oss"]
    device = Arrangement(memory, some_slots(memory, 3), Layout.LAYER_FIRST)
    (area,) = running_areas(device)
    assert {row.pool for row in area.rows} == {pool.name for pool in memory.pools}


def test_a_row_has_one_place_in_an_area() -> None:
    manifest = all_areas(MEMORIES["llama"], Layout.LAYER_FIRST)
    (pages,) = (area for area in manifest.areas if area.name == PAGES)
    with pytest.raises(ManifestError, match="area pages: pool kv, layer 0 has two places"):
        replace(manifest, areas=(*manifest.areas, replace(pages, region=9)))


def test_json_grows_with_layers_by_two_numbers() -> None:
    """What all rows of a pool have in common is written once."""
    sizes = []
    for layers in (8, 72):
        memory = family("llama", PAGE_TOKENS, num_hidden_layers=layers)
        sizes.append(len(json.dumps(all_areas(memory, Layout.PAGE_FIRST).to_json())))
    assert sizes[1] - sizes[0] < 64 * 3 * 24


Edit = Callable[[dict[str, Any]], object]


def _pool(values: dict[str, Any]) -> dict[str, Any]:
    pool: dict[str, Any] = values["areas"][0]["pools"][0]
    return pool


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.pop("fingerprint"), "manifest: `fingerprint` is missing"),
        (lambda v: v.update(fingerprint="xy"), "`fingerprint` is not hexadecimal"),
        (lambda v: v.update(page_tokens=0), "`page_tokens` is 0, not a number from 1"),
        (lambda v: v.update(page_tokens=True), "`page_tokens` is True, not a number"),
        (lambda v: v.update(tensor_rank=1), "`tensor_rank` is 1, not a number from 0 to 0"),
        (lambda v: v.update(areas={}), "`areas` is {}, not a list"),
        (lambda v: v.update(areas=[3]), "manifest, area: wanted an object, got a int"),
        (lambda v: v["areas"][0].update(kind="disk"), "`kind` is 'disk', and known are host"),
        (lambda v: v["areas"][0].update(name=7), "`name` is 7, not a name"),
        (lambda v: v["areas"][0].update(base=-16), "`base` is -16"),
        (lambda v: v["areas"][0].update(base=1 << 63), "`base` is 9223372036854775808"),
        (lambda v: _pool(v).update(encoding="zipped"), "pool kv: `encoding` is 'zipped'"),
        (lambda v: _pool(v).update(required=1), "pool kv: `required` is 1, neither"),
        (lambda v: _pool(v).update(row_bytes=16), "pool kv: a field exceeds its entry"),
        (lambda v: _pool(v).update(stride=16), "a row its slot"),
        (lambda v: _pool(v).update(entry_bytes=16), "a field exceeds its entry"),
        (lambda v: _pool(v)["layers"].pop(), "pool kv: 3 layers have 4 offsets"),
        (lambda v: _pool(v)["fields"][0].update(dtype="fp4"), "field k: `dtype` is 'fp4'"),
        (lambda v: _pool(v)["fields"][0].update(units=3), "a shape of (2, 8) does not divide"),
        (lambda v: _pool(v)["fields"][0].update(sharded=False), "field k: a shape of (2, 8)"),
        (lambda v: _pool(v)["fields"][0].update(shape=[]), "field k: a shape of ()"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(edit: Edit, message: str) -> None:
    values = json.loads(json.dumps(all_areas(MEMORIES["llama"], Layout.LAYER_FIRST).to_json()))
    edit(values)
    with pytest.raises(ManifestError) as raised:
        MemoryManifest.from_json(values)
    assert message in str(raised.value)
    assert str(raised.value).endswith("use the same version of kvtide on both sides")


def test_a_manifest_is_an_object() -> None:
    with pytest.raises(ManifestError, match="wanted an object, got a list"):
        MemoryManifest.from_json([])
