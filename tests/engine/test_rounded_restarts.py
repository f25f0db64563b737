"""A store with `?codec=fp8`: restored pages are near, never served as exact, and still verified."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtide.cache import CacheConfig, TieredCache, TierError, Tokens
from kvtide.cache.hardware import formats, space
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.handoff.own_memory import _manifest
from kvtide.engine.restore_oracle import RestoreOracle, bounds_of
from kvtide.server.setting_values import SettingsError
from kvtide.server.settings import Settings
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.storage.codec.fp8_codec import rounded_vector
from kvtide.testing.naive import NaiveIndex
from tests.engine.restarting import PATIENT, object_key
from tests.engine.restoring import PAGE, memory_of, model_of, text

TOKENS = text(random.Random(31), 8 * PAGE + 3)
SHOWN = SamplingParams(logprobs=3)
FAMILIES = [
    pytest.param("llama"),
    pytest.param("gpt_oss", marks=pytest.mark.full),
    pytest.param("falcon_h1"),
    pytest.param("glm_moe_dsa-shared", marks=pytest.mark.full),
]


def config(family: str, *, lossy: bool = True) -> CacheConfig:
    return CacheConfig(
        Tokens(1024), tokens_per_checkpoint=PAGE, patience=PATIENT, lossy_pages=lossy
    )


def url(folder: Path, codec: str = "fp8") -> str:
    return f"file://{folder}?cap=1GB&floor=1MB&sync=never&codec={codec}"


def serving(family: str, store: str, *, lossy: bool = True, checked: bool = False) -> Engine:
    model = model_of(family)
    cache = TieredCache(model.memory, config(family, lossy=lossy))
    cache.storage.attach(open_store(store, cache.storage.space))
    bounds = bounds_of(model.memory, torch.float32, rounded_pages=True)
    oracle = RestoreOracle(cache, 1.0, bounds) if checked else None
    return Engine(model, cache, chunk_tokens=64, oracle=oracle)


def answer(engine: Engine, tokens: tuple[int, ...] = TOKENS) -> Request:
    request = engine.submit(RequestParams(tokens, 4, SHOWN))
    while not engine.idle:
        engine.step()
    assert engine.cache.drain(10) and engine.cache.validate() == []
    return request


def stored_anew(family: str, store: str) -> Request:
    engine = serving(family, store)
    first = answer(engine)
    assert first.by_tier == {} and engine.cache.close()
    return first


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_pages_are_near_and_the_oracle_finds_them_alike(
    family: str, tmp_path: Path
) -> None:
    assert any(rounded_vector(pool) for pool in memory_of(family).pools)
    first = stored_anew(family, url(tmp_path))
    engine = serving(family, url(tmp_path), checked=True)
    again = answer(engine)
    assert again.by_tier == {Tier.STORAGE: 8 * PAGE}
    counts = engine.oracle.counts
    assert (counts.alike, counts.diverged, counts.logits_only) == (1, 0, 0)
    ours, theirs = (request.output[0].logprob for request in (first, again))
    assert ours != theirs and abs(ours - theirs) < 0.2, "the pages are exact, or far off"
    assert engine.cache.close()


def test_a_forged_page_among_rounded_ones_is_found(tmp_path: Path) -> None:
    """It is sealed, rounded and coded like any other, and one vector has another sign."""
    stored_anew("llama", url(tmp_path))
    engine = serving("llama", url(tmp_path), checked=True)
    cache = engine.cache
    one = formats(cache.memory, cache.config)["kv"]
    key = object_key(NaiveIndex(cache.memory, cache.storage.space).stored_keys(TOKENS)[5], "kv")
    store = open_store(url(tmp_path), cache.storage.space)
    store.expect([one])
    found = bytearray(one.bytes)
    assert store.read([key], [memoryview(found)]) == [one.bytes]
    numbers = torch.frombuffer(found, dtype=torch.float32)
    numbers[:24] *= -1
    one.seal(memoryview(found), key)
    store.remove([key])
    assert store.write([key], [memoryview(found)]) == [True]
    store.close()
    assert answer(engine).by_tier == {Tier.STORAGE: 8 * PAGE}
    assert engine.oracle.counts.diverged == 1
    assert engine.cache.close()


def test_an_exact_cache_neither_attaches_nor_finds_rounded_pages(tmp_path: Path) -> None:
    stored_anew("llama", url(tmp_path))
    model = model_of("llama")
    cache = TieredCache(model.memory, config("llama", lossy=False))
    with pytest.raises(TierError, match="rounds pages, and those of this cache are exact"):
        cache.storage.attach(open_store(url(tmp_path), cache.storage.space))
    assert cache.storage.stats() is None and cache.close()
    for codec in ("none", "lossless"):
        engine = serving("llama", url(tmp_path, codec), lossy=False)
        assert answer(engine).by_tier == {}
        assert engine.cache.close()


def test_pages_computed_on_rounded_ones_are_not_given_to_exact_caches_by_any_store(
    tmp_path: Path,
) -> None:
    """Such a cache may attach another store at run time. Its pages keep their own keys there."""
    stored_anew("llama", url(tmp_path))
    engine = serving("llama", url(tmp_path))
    cache = engine.cache
    assert answer(engine).by_tier == {Tier.STORAGE: 8 * PAGE}
    cache.storage.attach(open_store(url(tmp_path, "none"), cache.storage.space))
    longer = (*TOKENS, *text(random.Random(5), 4 * PAGE))
    assert answer(engine, longer).by_tier[Tier.DEVICE] == 8 * PAGE
    assert cache.storage.stats().stored_pages > 0 and cache.close()
    exact = serving("llama", url(tmp_path, "none"), lossy=False)
    assert answer(exact, longer).by_tier == {}
    assert exact.cache.close()


def test_a_handoff_pairs_no_exact_cache_with_a_lossy_one() -> None:
    memory, exact = memory_of("llama"), config("llama", lossy=False)
    lossy = replace(exact, lossy_pages=True)
    assert space(memory, exact) != space(memory, lossy)
    prints = set()
    for one in (exact, lossy):
        cache = TieredCache(memory, one)
        prints.add(_manifest(cache, ()).fingerprint)
        cache.close()
    assert len(prints) == 2


def test_settings_say_whether_pages_are_rounded_and_refuse_what_contradicts_it() -> None:
    assert Settings(storage="redis://h?codec=fp8").lossy_storage
    for exact in (None, "none", "redis://h", "redis://h?codec=lossless"):
        assert not Settings(storage=exact).lossy_storage
    with pytest.raises(SettingsError, match="use codec=lossless, or drop --deterministic"):
        Settings(storage="redis://h?codec=fp8", deterministic=True)
    Settings(storage="redis://h?codec=lossless", deterministic=True)
    with pytest.raises(SettingsError, match="codec=zip is not known; use lossless, fp8, none"):
        Settings(storage="redis://h?codec=zip")
