"""A model with a draft module that the engine does not run: its draft pages are absent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtide.cache import CacheConfig, Lease, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.index.tree.presence import SidecarSlots
from kvtide.models.deepseek_v4 import DeepSeekV4
from kvtide.spec import Tier
from tests.models.tiny_mtp import V4, pair

PROMPT = tuple(range(1, 70))


@pytest.fixture(scope="module")
def model() -> DeepSeekV4:
    return pair(V4)[0]


@pytest.fixture
def cache(model: DeepSeekV4) -> Iterator[TieredCache]:
    memory, size = model.memory, Tokens(32 * model.memory.page_tokens)
    cache = TieredCache(memory, CacheConfig(size, host_size=size, device="cpu"))
    engine = Engine(model, cache, chunk_tokens=32, max_running=2)
    engine.submit(RequestParams(PROMPT, 3))
    while not engine.idle:
        engine.step()
    assert cache.drain(10)
    yield cache
    assert cache.validate() == []
    cache.close()


def _resumed(cache: TieredCache) -> Lease:
    lease = cache.reserve(cache.match(cache.prompt(PROMPT)))
    assert lease is not None
    cache.load(lease)
    assert cache.drain(10)
    assert lease.cached_tokens > 0 and not lease.failed and not lease.loading
    return lease


def test_draft_pages_that_no_layer_wrote_are_absent(cache: TieredCache) -> None:
    lease = _resumed(cache)
    assert lease.by_tier == {Tier.DEVICE: lease.cached_tokens}
    assert not cache.carries(lease, "draft").any()
    cache.release(lease)


def test_draft_pages_stay_absent_on_the_host_and_after_a_load(cache: TieredCache) -> None:
    cache.flush(Tier.DEVICE)
    lease = _resumed(cache)
    assert lease.by_tier == {Tier.HOST: lease.cached_tokens}
    slots = np.arange(cache.index.capacity(Tier.HOST, "swa"), dtype=np.int32)
    on_host = SidecarSlots(Tier.HOST, "swa", "draft", slots)
    assert not cache.index.tree.presence.of(on_host).any()
    assert not cache.carries(lease, "draft").any()
    cache.release(lease)


def test_a_commit_with_the_draft_written_carries_it(cache: TieredCache) -> None:
    """The checks above can fail: the same pages, committed as written, carry the draft."""
    tokens = [token + 1 for token in PROMPT]
    lease = cache.reserve(cache.match(cache.prompt(tokens)))
    assert lease is not None
    cache.commit(lease, len(tokens))
    assert cache.carries(lease, "draft").any()
    cache.release(lease)


def test_only_a_draft_s_layers_write_its_sidecars(model: DeepSeekV4) -> None:
    assert model.memory.draft_sidecars == ("draft",)
    for stage in model.memory.stages(2):
        assert stage.draft_sidecars == ("draft",), "ranks agree on what a commit is without"
