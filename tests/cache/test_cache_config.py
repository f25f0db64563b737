"""What cannot work is refused at the start, saying what would."""

from __future__ import annotations

import math

import pytest
import torch

from kvtide.cache import (
    Bytes,
    CacheConfig,
    Layout,
    Ratio,
    Tier,
    TieredCache,
    TierError,
    Tokens,
    hardware,
)
from kvtide.cache.write_policies import POLICIES
from kvtide.index import POLICIES as EVICTIONS
from kvtide.transfer.backends import CELLS
from tests.cache.memories import FULL, PAGE, WINDOW, every_memory


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({"write_policy": "write_around"}, POLICIES),
        ({"eviction": "random"}, EVICTIONS),
        ({"headroom": -0.1}, ["from 0 to below 1"]),
        ({"headroom": 1.0}, ["from 0 to below 1"]),
        ({"session_fraction": 1.5}, ["0 to 1"]),
        ({"session_fraction": -1}, ["0 to 1"]),
        ({"transfer_timeout_s": 0}, ["seconds above 0, like 30"]),
        ({"transfer_timeout_s": math.inf}, ["seconds above 0, like 30"]),
        ({"backend": "kernel"}, ["use reference"]),
        ({"backend": "direct"}, ["use reference"]),
        ({"backend": "auto"}, ["use reference"]),
        ({"backend": "tape"}, ["use reference"]),
        ({"device": "cuda", "backend": "reference"}, ["kernel", "direct", "auto"]),
        ({"device": "meta"}, ["use cpu or cuda"]),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_with_those_that_do(options, remedies):
    with pytest.raises(TierError) as refusal:
        CacheConfig(Tokens(64), **options)
    value = list(options.values())[-1]
    shown = value if isinstance(value, str) else f"{value:g}"
    assert all(words in str(refusal.value) for words in (shown, *remedies))


@pytest.mark.parametrize(
    ("kind", "backend", "layout"),
    [(*cell, layout) for cell, layouts in CELLS.items() for layout in Layout if layout in layouts],
)
def test_every_cell_of_the_table_is_accepted(kind, backend, layout):
    config = CacheConfig(Tokens(64), device=kind, backend=backend, host_layout=layout)
    assert config.backend_name == backend and config.torch_device == torch.device(kind)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "reference"), ("cuda:1", "auto")])
def test_a_device_has_a_backend_by_default(device, backend):
    assert CacheConfig(Tokens(64), device=device).backend_name == backend


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"device_size": Ratio(2.0)}, "size this tier in bytes or tokens"),
        ({"device_size": Tokens(PAGE - 1)}, f"use at least {PAGE} tokens"),
        ({"device_size": Bytes(1)}, "use at least"),
        ({"host_size": Ratio(0.001)}, "use a ratio of at least"),
        ({"host_size": Bytes(1)}, "use at least"),
        ({"tokens_per_checkpoint": 0}, "use a distance of at least 1"),
        ({"host_size": Bytes(1 << 60)}, "use a host size of at most"),
        ({"device_size": Bytes(1 << 60)}, "use a device size of at most"),
    ],
    ids=str,
)
def test_a_size_that_cannot_be_had_is_refused_with_one_that_can(options, remedy):
    with pytest.raises(TierError, match=remedy):
        TieredCache(WINDOW, CacheConfig(**{"device_size": Tokens(64), **options}))


@pytest.mark.parametrize("make", [lambda: Ratio(0), lambda: Bytes(0), lambda: Tokens(0)])
def test_an_empty_tier_is_refused(make):
    with pytest.raises(TierError, match="leave the tier out"):
        make()


@every_memory
def test_the_host_has_twice_the_bytes_of_the_device_by_default(memory):
    cache = TieredCache(memory, CacheConfig(Tokens(4096), tokens_per_checkpoint=64))
    pages = cache.stats().pages
    held = {
        tier: sum(pages[tier, a.name].capacity * memory.slot_bytes(a.name) for a in memory.anchors)
        for tier in (Tier.DEVICE, Tier.HOST)
    }
    beside = sum(hot.shape.bytes for hot in cache.hardware.hot.values())
    device = held[Tier.DEVICE] + beside
    assert 1.9 * device < held[Tier.HOST] <= 2 * device
    cache.close()


def test_a_tier_in_tokens_holds_their_history():
    cache = TieredCache(FULL, CacheConfig(Tokens(10 * PAGE), host_size=Tokens(15 * PAGE)))
    pages = cache.stats().pages
    assert pages[Tier.DEVICE, "kv"].capacity == 10
    assert pages[Tier.HOST, "kv"].capacity == 15
    cache.close()


def test_memory_that_was_taken_is_given_back_when_the_rest_is_refused(monkeypatch):
    taken = []

    def device_arena(*args):
        taken.append(real(*args))
        return taken[-1]

    real = hardware.device_arena
    monkeypatch.setattr(hardware, "device_arena", device_arena)
    with pytest.raises(TierError, match="host memory"):
        TieredCache(FULL, CacheConfig(Tokens(64), host_size=Bytes(1 << 60)))
    assert [arena.closed for arena in taken] == [True]


def test_closing_gives_the_memory_back():
    cache = TieredCache(FULL, CacheConfig(Tokens(64)))
    cache.close()
    assert all(arena.closed for arena in cache.hardware.arenas)


@pytest.mark.parametrize("device", ["tpu", "cuda:x"])
def test_a_device_that_torch_does_not_know_is_refused_with_those_that_work(device):
    with pytest.raises(TierError, match="use cpu or cuda"):
        CacheConfig(Tokens(64), device=device)
