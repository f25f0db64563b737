"""Sizes of tiers: any model by ratio, bytes or tokens; bad sizes name what would work."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse, catalog
from kvtide.spec.sizing import bytes_for, pages_for
from kvtide.tiers.arena import TierError
from kvtide.tiers.tier_size import Bytes, Ratio, TierSize, Tokens, capacity_pages, tier_bytes

GB = 10**9
ENTRY = Entry((Field("x", (16,), DType.UINT8),))
PLAIN = ModelMemory("plain", 16, (PoolSpec("kv", (0,), ENTRY, 16),), layers=1)
WINDOWED = ModelMemory(
    "windowed",
    16,
    (PoolSpec("kv", (0,), ENTRY, 16), PoolSpec("swa", (1,), ENTRY, 16, reuse=Reuse(17))),
    layers=2,
)
EMPTY = ModelMemory("empty", 16, (PoolSpec("kv", (), Entry(())),), layers=1)


def cost(memory: ModelMemory, pages: dict[str, int]) -> int:
    return sum(memory.slot_bytes(anchor) * count for anchor, count in pages.items())


# -- what fits ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.names())
def test_every_model_is_sized_alike_by_ratio_and_by_bytes(name: str) -> None:
    memory = catalog.resolve(name)
    by_bytes = capacity_pages(memory, Bytes(160 * GB))
    assert by_bytes == capacity_pages(memory, Ratio(2.0), device_bytes=80 * GB)
    assert 0.97 * 160 * GB < cost(memory, by_bytes) <= 160 * GB


def test_deepseek_v4_is_sized_by_bytes_for_all_its_anchors() -> None:
    memory = catalog.resolve("deepseek-v4-flash")
    pages = capacity_pages(memory, Bytes(80 * GB))
    assert pages.keys() == {anchor.name for anchor in memory.anchors}
    assert len(pages) > 1
    assert all(count > 1000 for count in pages.values())


@pytest.mark.parametrize("name", catalog.names())
def test_tokens_give_room_for_all_of_them_in_every_model(name: str) -> None:
    memory = catalog.resolve(name)
    pages = capacity_pages(memory, Tokens(500_000))
    wanted = math.ceil(500_000 / memory.page_tokens)
    history = memory.anchors[0].name
    assert pages[history] == wanted
    assert cost(memory, pages) == bytes_for(memory, wanted) == tier_bytes(memory, Tokens(500_000))


def test_a_page_begun_is_a_whole_page() -> None:
    assert capacity_pages(PLAIN, Tokens(16)) == {"kv": 1}
    assert capacity_pages(PLAIN, Tokens(17)) == {"kv": 2}
    assert capacity_pages(PLAIN, Tokens(32)) == {"kv": 2}


def test_a_ratio_is_of_the_device_tier_whole_or_in_part() -> None:
    assert capacity_pages(PLAIN, Ratio(2.0), device_bytes=160) == {"kv": 20}
    assert capacity_pages(PLAIN, Ratio(0.5), device_bytes=160) == {"kv": 5}


def test_a_ratio_is_not_cut_short_by_floating_point() -> None:
    # 0.29 * 1600 is 463.99999999999994.
    assert capacity_pages(PLAIN, Ratio(0.29), device_bytes=1600) == {"kv": 29}


@pytest.mark.parametrize("size", [Bytes(10**4), Tokens(4096), Ratio(1.5)])
def test_the_distance_of_checkpoints_reaches_every_kind_of_size(size: TierSize) -> None:
    near, far = (capacity_pages(WINDOWED, size, 10**4, distance) for distance in (32, 512))
    assert near["swa"] > far["swa"]
    assert far == pages_for(WINDOWED, tier_bytes(WINDOWED, size, 10**4, 512), 512)


# -- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (lambda: Ratio(0.0), r"0 times .* ratio above 0"),
        (lambda: Ratio(-1.5), r"-1\.5 times .* ratio above 0"),
        (lambda: Ratio(math.nan), r"nan times .* ratio above 0"),
        (lambda: Ratio(math.inf), r"inf times .* ratio above 0"),
        (lambda: Bytes(0), r"tier of 0 bytes; use at least"),
        (lambda: Bytes(-4096), r"-4,096 bytes; use at least"),
        (lambda: Tokens(0), r"tier of 0 tokens; use at least a page"),
        (lambda: Tokens(-1), r"-1 tokens; use at least a page"),
    ],
)
def test_sizes_of_nothing_are_refused_when_written_down(
    size: Callable[[], TierSize], words: str
) -> None:
    with pytest.raises(TierError, match=rf"{words}.*or leave the tier out"):
        size()


@pytest.mark.parametrize("device_bytes", [None, 0])
def test_a_ratio_without_a_device_tier_asks_for_one_or_another_size(
    device_bytes: int | None,
) -> None:
    with pytest.raises(
        TierError, match=r"2 times .* give the device tier's bytes, or size this tier in bytes or"
    ):
        capacity_pages(PLAIN, Ratio(2.0), device_bytes)


def test_tokens_that_fill_no_page_name_the_page() -> None:
    with pytest.raises(TierError, match=r"plain: a tier of 15 tokens .* use at least 16 tokens"):
        capacity_pages(PLAIN, Tokens(15))


def test_too_few_bytes_name_the_least_and_the_least_fits() -> None:
    with pytest.raises(TierError, match=r"111 bytes do not hold .* use at least 112"):
        capacity_pages(WINDOWED, Bytes(111))
    assert capacity_pages(WINDOWED, Bytes(112)) == {"kv": 1, "swa": 6}


def test_too_small_a_ratio_names_the_least_and_the_least_fits() -> None:
    with pytest.raises(
        TierError, match=r"0\.01 times the device tier's 3,000 bytes .* at least 0\.038$"
    ):
        capacity_pages(WINDOWED, Ratio(0.01), device_bytes=3000)
    assert capacity_pages(WINDOWED, Ratio(0.038), device_bytes=3000) == {"kv": 1, "swa": 6}


@pytest.mark.parametrize("size", [Bytes(100), Ratio(1.0), Tokens(100)])
def test_checkpoints_at_no_distance_are_refused_for_every_kind_of_size(size: TierSize) -> None:
    with pytest.raises(TierError, match="every 0 tokens; use a distance of at least 1"):
        capacity_pages(WINDOWED, size, 1000, tokens_per_checkpoint=0)


def test_a_memory_without_a_byte_has_no_size() -> None:
    with pytest.raises(TierError, match=r"no pool keeps a byte.*size a memory that has layers"):
        capacity_pages(EMPTY, Bytes(100))
