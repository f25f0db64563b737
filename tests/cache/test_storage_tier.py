"""A store behind the host: what one cache stored, another one finds, byte for byte."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvtide.cache import CacheConfig, Namespace, TieredCache, Tokens
from kvtide.cache.fetching import Stage
from kvtide.spec import Tier
from kvtide.storage import Store, open_store
from kvtide.storage.objects import DIRECT_ALIGN
from kvtide.tiers import Layout
from tests.cache.building import Rig, text
from tests.cache.gated import Gated
from tests.cache.memories import ALL_MEMORIES, FULL, PAGE
from tests.cache.stores import MARKS, WAIT, fetched, keys_of, opened, settle, stored
from tests.transfer.stores import LARGE


@pytest.mark.quick
@pytest.mark.parametrize("name", ALL_MEMORIES)
@pytest.mark.parametrize("layout", Layout)
def test_what_one_cache_stored_another_reads(
    name: str, layout: Layout, url: str, rigs: list[Rig]
) -> None:
    memory = ALL_MEMORIES[name]
    first = opened(rigs, url, memory)
    stored(first, text(1, 9))
    again = opened(rigs, url, memory, layouts=(Layout.LAYER_FIRST, layout))
    assert again.found(text(1, 9)) == 0
    assert fetched(again, text(1, 9)).outcome == "fetched"
    assert again.found(text(1, 9)) == first.found(text(1, 9)) > 0
    lease = again.started(text(1, 9))
    again.settle()
    assert again.misread(lease) == []
    again.cache.release(lease)


def test_fetched_tokens_count_as_storage_s(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8))
    again = opened(rigs, url)
    prompt = again.cache.prompt(text(1, 8))
    again.cache.storage.fetch(prompt)
    settle(again)
    assert again.cache.match(prompt).by_tier == {Tier.STORAGE: 8 * PAGE}
    assert again.cache.match(again.cache.prompt(text(1, 8))).by_tier == {Tier.HOST: 8 * PAGE}


def test_namespaces_do_not_meet_in_a_store(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8), namespace=Namespace(cache_salt="a"))
    again = opened(rigs, url)
    assert fetched(again, text(1, 8), namespace=Namespace(cache_salt="b")).outcome == "nothing"
    assert fetched(again, text(1, 8), namespace=Namespace(cache_salt="a")).outcome == "fetched"


def test_other_weights_find_nothing(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url, fingerprint=b"one"), text(1, 8))
    assert fetched(opened(rigs, url, fingerprint=b"two"), text(1, 8)).outcome == "nothing"
    assert fetched(opened(rigs, url, fingerprint=b"one"), text(1, 8)).outcome == "fetched"


def test_two_prompts_with_the_same_pages_read_them_once(url: str, rigs: list[Rig]) -> None:
    stored(opened(rigs, url), text(1, 8))
    again = opened(rigs, url)
    fetches = [again.cache.storage.fetch(again.cache.prompt(text(1, 8))) for _ in range(3)]
    settle(again)
    assert sorted(f.outcome for f in fetches if f) == ["fetched", "nothing", "nothing"]
    stats = again.cache.storage.stats()
    assert stats is not None and stats.fetched_pages == 8


def test_a_lost_page_leaves_what_comes_before_it(url: str, rigs: list[Rig]) -> None:
    first = opened(rigs, url)
    stored(first, text(1, 9))
    store: Store = open_store(url, first.cache.storage.space)
    assert store.remove([keys_of(first, text(1, 9))[6]]) == 1
    again = opened(rigs, url)
    assert fetched(again, text(1, 9)).outcome == "fetched"
    assert again.found(text(1, 9)) == 6 * PAGE


def test_closing_has_an_end_whatever_the_store_does(url: str) -> None:
    rig = Rig(FULL, host=64, device=32, patience=WAIT)
    store = Gated(open_store(url, rig.cache.storage.space), ("write",))
    rig.cache.storage.attach(store)
    rig.remember(text(1, 8))
    rig.settle()
    began = time.monotonic()
    assert not rig.cache.close(0.2), "its memory is still in a store's hands"
    assert time.monotonic() - began < 30
    store.gate.set()
    assert rig.cache.close(5.0)


def test_a_lookup_that_no_request_waits_for_is_not_made(url: str, rigs: list[Rig]) -> None:
    rig = Rig(FULL, host=64, device=32, patience=WAIT)
    rigs.append(rig)
    store = Gated(open_store(url, rig.cache.storage.space), ("write",))
    rig.cache.storage.attach(store)
    rig.remember(text(1, 8))
    rig.settle()
    asked: list[str] = []
    first = rig.cache.storage.ask(lambda one: asked.append("first"))
    second = rig.cache.storage.ask(lambda one: asked.append("second"))
    assert first is not None and second is not None and first.cancel()
    store.gate.set()
    second.result(5.0)
    assert asked == ["second"]


def test_a_store_is_made_ready_beside_the_engine(url: str, rigs: list[Rig]) -> None:
    """Lending memory may take long: only `attach` itself is the engine's."""
    rig = Rig(FULL, host=64, device=32, patience=WAIT)
    rigs.append(rig)
    store = open_store(url, rig.cache.storage.space)
    with ThreadPoolExecutor(1) as other:
        link = other.submit(rig.cache.storage.link, store).result()
    assert rig.cache.storage.stats() is None
    rig.cache.storage.attach(link)
    stored(rig, text(1, 8))
    stats = rig.cache.storage.stats()
    assert stats is not None and stats.stored_pages == 8


def test_what_is_on_its_way_to_the_host_is_stored_before_a_store_is_left(url: str) -> None:
    rig = Rig(FULL, host=64, device=32, patience=WAIT)
    rig.cache.storage.attach(open_store(url, rig.cache.storage.space))
    rig.remember(text(1, 8))
    assert rig.cache.busy, "nothing is on its way"
    rig.cache.storage.detach(5.0)
    rig.remember(text(2, 8))
    settle(rig)
    assert open_store(url, rig.cache.storage.space).status().objects == 8 + MARKS
    assert rig.problems() == []


def test_what_lands_when_the_time_is_up_is_not_stored(url: str) -> None:
    rig = Rig(FULL, host=64, device=32, patience=WAIT)
    rig.cache.storage.attach(open_store(url, rig.cache.storage.space))
    rig.remember(text(1, 8))
    rig.cache.storage.detach(0.0)
    time.sleep(0.01)
    while rig.cache.storage.stats() is not None:
        rig.cache.poll()
    settle(rig)
    assert open_store(url, rig.cache.storage.space).status().objects == 0
    assert rig.problems() == [] and rig.found(text(1, 8)) == 8 * PAGE


def test_large_pages_lie_on_the_host_as_they_lie_in_the_store(url: str) -> None:
    """With the hardware that a config opens: room for labels behind every page, and no copies."""
    text = list(range(16 * 8 + 1))
    config = CacheConfig(
        Tokens(16 * 24), host_size=Tokens(16 * 24), patience=WAIT, tokens_per_checkpoint=16
    )
    size = LARGE.slot_bytes("kv")
    for again in (False, True):
        cache = TieredCache(LARGE, config)
        cache.storage.attach(open_store(url, cache.storage.space))
        stride = cache.hardware.host.arrangement.run("kv").stride
        assert stride % DIRECT_ALIGN == 0 and stride > size
        prompt = cache.prompt(text)
        if again:
            assert cache.storage.fetch(prompt).stage is Stage.LOOKING
            assert cache.drain(10.0)
        lease = cache.reserve(cache.match(prompt))
        assert lease.by_tier == ({Tier.STORAGE: 128} if again else {})
        cache.load(lease)
        assert cache.drain(10.0)
        for pool, layer in ((p, layer) for p in LARGE.pools for layer in p.layers):
            rows = cache.hardware.device.rows(pool.name, layer)
            table = cache.page_table(lease, pool.follows or pool.name)[:8]
            for page, slot in enumerate(table.tolist()):
                row = np.random.default_rng([layer, page]).integers(0, 256, rows.shape[1], np.uint8)
                if again:
                    assert slot < 0 or rows[slot].numpy().tobytes() == row.tobytes()
                elif slot >= 0:
                    rows[slot] = torch.from_numpy(row)
        cache.commit(lease, 128)
        cache.release(lease)
        cache.close()
