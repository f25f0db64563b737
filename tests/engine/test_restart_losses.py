"""Stored pages that are lost, broken or forged between two lives: no request gets a wrong bit.

A request resumes at the deepest boundary that is valid without them (checked at its admission, see
`restarting`), computes the rest, and what it computed takes their place in the store.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from functools import cache as cached
from itertools import count

import pytest

from kvtide.cache import CacheConfig, EveryPages, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.spec import ALL, Tier
from kvtide.testing.naive import NaiveIndex
from tests.engine.restarting import PATIENT, Life, Past, Stored, stored_page
from tests.engine.restoring import ALL_NAMES, NAMES, PAGE, memory_of, model_of, text

PAGES = 21
EVERY = 3
TOKENS = text(random.Random(13), PAGES * PAGE + 5)
DEEPEST = PAGES // EVERY * EVERY

_NUMBERS = count()


@cached
def first_life(family: str) -> tuple[Past, list[bytes], dict[bytes, bytes]]:
    """A prompt with a checkpoint at every third page, all of it stored; its keys and objects."""
    past = Past(f"memory:losses-{next(_NUMBERS)}")
    life = living(family, past)
    life.answer(TOKENS)
    keys = life.cache.naive.stored_keys(list(TOKENS))
    life.end()
    pages = [
        stored_page(life.cache, past, key, anchor)
        for anchor, kept in past.stored.items()
        for key in kept
    ]
    return past, keys, {page.key: bytes(page.read()) for page in pages}


def second_life(family: str, page: int, anchor: str) -> tuple[Life, Stored]:
    """A life over a store like that of the first one, and a page there that it may not find."""
    first, keys, objects = first_life(family)
    past = Past(f"memory:losses-{next(_NUMBERS)}", *deepcopy((first.ledger, first.stored)))
    past.lose(keys[page], anchor)
    life = living(family, past)
    written = past.open(life.cache).write(list(objects), list(map(memoryview, objects.values())))
    assert all(written)
    return life, stored_page(life.cache, past, keys[page], anchor)


def living(family: str, past: Past) -> Life:
    return Life(family, past, placement=EveryPages(EVERY), tokens_per_checkpoint=PAGE)


WITH_WINDOWS = {
    *("gpt_oss", "gpt_oss-plain-rope-tight-clamp", "gemma2", "gemma3", "gemma3-scaled-rope"),
    *("deepseek_v4", "mistral-windows"),
}
WITH_STATES = {
    *("falcon_h1", "falcon_h1-norm-first-no-conv", "lfm2", "kimi_linear", "bamba", "nemotron_h"),
    *("granitemoehybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
}
WITHOUT_HISTORY = {"mistral-windows"}
"""Families by their anchors. To collect tests their memories are not declared, for that takes the
configs of 30 families; every test compares them."""


def anchors_of(family: str) -> list[str]:
    """`kv` is the history."""
    history = [] if family in WITHOUT_HISTORY else ["kv"]
    return [*history, *["swa"] * (family in WITH_WINDOWS), *["state"] * (family in WITH_STATES)]


def lost_pages() -> Iterator[tuple[str, str, int, str]]:
    """Of a history a page in the middle; of windows and states what the deepest resume needs.

    Every family loses one of each; those that keep more than a history find them corrupt, too, if
    no other one has a memory of that form.
    """
    for name in ALL_NAMES:
        anchors = anchors_of(name)
        for anchor in anchors:
            page = PAGES // 2 if anchor == "kv" else DEEPEST - 1
            yield name, anchor, page, "remove"
            forms = name in NAMES and anchors != ["kv"]
            if name == NAMES[0] or forms:
                yield name, anchor, page, "corrupt"


@pytest.mark.quick(family=NAMES)
@pytest.mark.parametrize(("family", "anchor", "page", "harm"), list(lost_pages()))
def test_without_a_page_the_deepest_boundary_that_needs_it_not_is_found(
    family: str, anchor: str, page: int, harm: str
) -> None:
    histories = {one.name: one.reuse.reach is ALL for one in memory_of(family).anchors}
    assert histories == {name: name == "kv" for name in anchors_of(family)}
    life, stored = second_life(family, page, anchor)
    getattr(stored, harm)()
    request = life.answer(TOKENS)
    assert request.by_tier[Tier.STORAGE] == life.cache.there[request.prompt] < DEEPEST * PAGE
    stats = life.cache.storage.stats()
    assert stats is not None and stats.objects.get("corrupt", 0) == (harm == "corrupt")
    life.end()
    stored.format.check(memoryview(stored.read()), stored.key)


# -- pages that are not what was computed, and say that they are -------------------------------

SHOWN = SamplingParams(logprobs=2)
FORGED = [("llama", "kv"), ("gemma3", "kv"), ("gemma3", "swa"), ("falcon_h1", "state")]


def engine_over(family: str, past: Past, *, checked: bool = False) -> Engine:
    model = model_of(family)
    config = CacheConfig(
        Tokens(1024), host_size=Ratio(4), tokens_per_checkpoint=64, patience=PATIENT
    )
    cache = TieredCache(model.memory, config)
    cache.storage.attach(past.open(cache))
    oracle = RestoreOracle(cache, 1.0, None) if checked else None
    return Engine(model, cache, chunk_tokens=64, oracle=oracle)


def serve(engine: Engine, ask: RequestParams) -> Request:
    request = engine.submit(ask)
    while not engine.idle:
        engine.step()
        assert engine.cache.validate() == []
    assert engine.cache.drain(10)
    return request


@pytest.mark.parametrize(("family", "anchor"), FORGED)
def test_a_forged_page_is_found_by_the_oracle_and_never_given_out_again(
    family: str, anchor: str
) -> None:
    past = Past(f"memory:losses-{next(_NUMBERS)}")
    tokens = TOKENS[: 6 * PAGE + 3]
    engine = engine_over(family, past)
    first = serve(engine, RequestParams(tokens, 4, SHOWN))
    key = NaiveIndex(engine.cache.memory, engine.cache.storage.space).stored_keys(tokens)[5]
    stored = stored_page(engine.cache, past, key, anchor)
    assert engine.cache.close()
    computed = stored.read()
    stored.forge()
    assert stored.read() != computed
    stored.format.check(memoryview(stored.read()), stored.key)

    engine = engine_over(family, past, checked=True)
    misled = serve(engine, RequestParams(tokens, 40, SHOWN))
    assert misled.by_tier == {Tier.STORAGE: 6 * PAGE} and misled.admissions == 2
    assert misled.output[0] != first.output[0], "the forgery makes no difference"
    assert engine.oracle is not None and engine.oracle.counts.diverged == 1
    assert stored.read() == computed, "what was computed anew did not take its place"
    again = serve(engine, RequestParams(tokens, 4, SHOWN))
    assert again.output == first.output and again.by_tier == {Tier.DEVICE: 6 * PAGE}
    assert engine.oracle.counts.diverged == 1
    assert engine.cache.close()

    engine = engine_over(family, past, checked=True)
    restored = serve(engine, RequestParams(tokens, 4, SHOWN))
    assert restored.output == first.output and restored.by_tier == {Tier.STORAGE: 6 * PAGE}
    assert engine.oracle is not None
    assert (engine.oracle.counts.alike, engine.oracle.counts.diverged) == (1, 0)
    assert engine.cache.close()
