"""How large the tiers are where pools are hot: their buffers, their host, the longest sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtide.cache import Alone, Bytes, CacheConfig, Hardware, Ratio, TieredCache, TierError, Tokens
from kvtide.cache.hardware import check_residency, hot_shapes
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Tier
from kvtide.spec.residency import HotShape, hot_queries, served_hot
from tests.cache.building import text
from tests.cache.memories import ALL_MEMORIES, HOT, PAGE

HOT_MEMORIES = {name: memory for name, memory in ALL_MEMORIES.items() if memory.hot_pools}
every_hot_memory = pytest.mark.parametrize("memory", HOT_MEMORIES.values(), ids=HOT_MEMORIES)
ROOMY = CacheConfig(
    Tokens(64 * PAGE), host_size=Tokens(64 * PAGE), hot_rows=3, tokens_per_checkpoint=4 * PAGE
)


def longest(cache: TieredCache) -> int:
    return cache.max_sequence_tokens // PAGE


# -- refusals -------------------------------------------------------------------------------


@every_hot_memory
def test_hot_pools_without_a_host_tier_are_refused(memory: ModelMemory) -> None:
    with pytest.raises(TierError, match="no host tier; use --resident all"):
        Hardware.open(memory, replace(ROOMY, host_size=None), Alone())


def test_hot_pools_without_a_row_are_refused() -> None:
    with pytest.raises(TierError, match="0 hot buffers of kv; use at least 1"):
        check_residency(HOT, replace(ROOMY, hot_rows=0))


def test_other_memories_need_neither() -> None:
    check_residency(ALL_MEMORIES["full"], replace(ROOMY, host_size=None, hot_rows=0))


@every_hot_memory
def test_hot_buffers_that_do_not_fit_the_device_are_refused(memory: ModelMemory) -> None:
    config = CacheConfig(Bytes(4000), host_size=Tokens(400 * PAGE), hot_rows=100)
    with pytest.raises(TierError, match=r"hot buffers of 100 requests take .* of 4,000 bytes"):
        Hardware.open(memory, config, Alone())


# -- what is allocated ----------------------------------------------------------------------


@every_hot_memory
def test_hot_pools_have_pages_on_the_host_alone(memory: ModelMemory) -> None:
    hardware = Hardware.open(memory, ROOMY, Alone())
    pages = hardware.capacity_pages
    for pool in memory.anchors:
        assert (pages[Tier.DEVICE][pool.name] == 0) == (pool.hot is not None)
        assert pages[Tier.HOST][pool.name] > 0
    assert set(hardware.hot) == {pool.name for pool in memory.hot_pools}
    hardware.close(1.0)


@every_hot_memory
def test_pages_and_hot_buffers_together_take_the_device_s_bytes(memory: ModelMemory) -> None:
    size = 200_000
    config = CacheConfig(Bytes(size), hot_rows=8, longest_tokens=40 * PAGE)
    hardware = Hardware.open(memory, config, Alone())
    hot = sum(one.shape.bytes for one in hardware.hot.values())
    pages = hardware.capacity_pages[Tier.DEVICE]
    held = sum(memory.slot_bytes(name) * count for name, count in pages.items())
    assert 0 < hot < size and 0.9 * size < held + hot <= size
    hardware.close(1.0)


@pytest.mark.parametrize("host", [Tokens(500 * PAGE), Ratio(0.5), Ratio(2.0), Ratio(8.0)])
@pytest.mark.parametrize("device", [Tokens(300 * PAGE), Bytes(400_000)])
@every_hot_memory
def test_the_buffers_that_were_counted_are_those_that_are_made(
    memory: ModelMemory, device: Tokens | Bytes, host: Tokens | Ratio
) -> None:
    config = CacheConfig(device, host_size=host, hot_rows=4, tokens_per_checkpoint=64)
    hardware = Hardware.open(memory, config, Alone())
    for one in hardware.hot.values():
        shape = one.shape
        assert len(one.pages) == shape.pages and one.arena.data.nbytes <= shape.bytes
        beside = (one.held, one.used, one.marks, one.wanted)
        exact = shape.pages * shape.page_bytes + sum(t.nbytes for t in beside)
        assert exact <= shape.bytes, "hot slots are counted in whole pages"
    pages = hardware.capacity_pages[Tier.DEVICE]
    held = sum(memory.slot_bytes(name) * count for name, count in pages.items())
    if isinstance(device, Bytes):
        assert held + sum(one.shape.bytes for one in hardware.hot.values()) <= device.bytes
    hardware.close(1.0)


def test_shapes_follow_rows_and_the_longest_sequence() -> None:
    pages = {Tier.DEVICE: {"index": 50, "kv": 0}, Tier.HOST: {"index": 9, "kv": 30}}
    shapes = hot_shapes(HOT, ROOMY, pages)
    assert shapes == {"kv": HotShape.of(HOT.pool("kv"), PAGE, 3, 30)}
    assert shapes["kv"].gather_pages == 30, "the host's pages, fewer than the device's"
    short = hot_shapes(HOT, replace(ROOMY, longest_tokens=10 * PAGE - 1), pages)
    assert short["kv"].gather_pages == 10
    assert hot_shapes(ALL_MEMORIES["full"], ROOMY, pages) == {}


# -- the longest sequence -------------------------------------------------------------------


@pytest.mark.parametrize("host", [10, 20, 40])
@every_hot_memory
def test_the_longest_sequence_follows_the_host(memory: ModelMemory, host: int) -> None:
    config = replace(ROOMY, host_size=Tokens(host * PAGE))
    cache = TieredCache(memory, config)
    assert longest(cache) == host
    lease = cache.reserve(cache.match(cache.prompt(text(1, host, 0))), tokens=host * PAGE)
    assert lease is not None
    cache.release(lease)
    assert cache.reserve(cache.match(cache.prompt(text(2, host + 1, 0)))) is None
    cache.close()


def test_the_longest_sequence_is_one_that_a_prefill_gathers() -> None:
    cache = TieredCache(HOT, replace(ROOMY, longest_tokens=12 * PAGE))
    assert longest(cache) == cache.hardware.hot["kv"].shape.gather_pages == 12
    cache.close()


def test_a_context_four_times_as_long_as_the_device_would_hold_is_leased() -> None:
    """In the same device memory, hot buffers and all."""
    entries = [Entry((Field("x", (size,), DType.UINT8),)) for size in (300, 4)]
    latents = PoolSpec("kv", tuple(range(8)), entries[0], selected=2)
    keys = PoolSpec("index", (0, 1), entries[1], follows="kv")
    resident = ModelMemory("latents", PAGE, (latents, keys), layers=8)
    size = Bytes(1 << 20)
    whole = TieredCache(resident, CacheConfig(size, host_size=Tokens(PAGE)))
    pages = 4 * longest(whole)
    whole.close()
    config = CacheConfig(size, host_size=Tokens(pages * PAGE), hot_rows=2)
    cache = TieredCache(served_hot(resident, entries=3), config)
    assert longest(cache) == pages
    lease = cache.reserve(cache.match(cache.prompt(text(1, pages, 0))))
    assert lease is not None and len(cache.page_table(lease, "kv")) == pages
    cache.commit(lease, pages * PAGE)
    assert cache.validate() == []
    cache.release(lease)
    cache.close()


def test_a_step_s_queries_fit_their_hot_row() -> None:
    for memory in HOT_MEMORIES.values():
        for pool in memory.hot_pools:
            assert 1 <= hot_queries(pool) == pool.hot // pool.selected
