"""Pools on the host, with few entries of each request on the device: no bit of an answer changes.

What is compared with are engines whose memory is all resident (`restoring.alone`). That pages come
and go meanwhile is tried in the tests of restoring and restarting, which serve hot pools too.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from functools import cache as cached
from typing import NamedTuple

import pytest
import torch

from kvtide.bench.step_cost import Idle
from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Tier
from kvtide.spec.residency import Residency, served_hot
from kvtide.tiers import Bytes
from tests.cache.building import POISON
from tests.engine.restoring import (
    PAGE,
    SAMPLING,
    alone,
    check_hot_row,
    model_of,
    text,
)
from tests.models.tiny import ours

TOPK = {"deepseek_v4": 6, "deepseek_v32": 24, "glm_moe_dsa": 24, "glm_moe_dsa-shared": 24}
ANSWER = 7


def engine_of(family: str, *, rows: int = 6, chunk_tokens: int = 64, tokens: int = 768) -> Engine:
    """An engine over memory that is poison where nothing was written."""
    config = CacheConfig(
        Tokens(tokens), host_size=Tokens(4 * tokens), tokens_per_checkpoint=PAGE, hot_rows=rows
    )
    cache = TieredCache(model_of(family).memory, config)
    for hot in cache.hardware.hot.values():
        hot.pages.fill_(POISON)
    cache.hardware.host.data.fill_(POISON)
    return Engine(model_of(family), cache, chunk_tokens=chunk_tokens, max_running=rows)


def step(engine: Engine) -> None:
    """One step. Behind it the pages that only a step may read are spoiled."""
    engine.step()
    for name, hot in engine.cache.hardware.hot.items():
        for request in engine.scheduler.running:
            if request.computed > request.held.cached_tokens:
                check_hot_row(engine.cache, request, name)
        hot.pages[hot.shape.first_ring :] = POISON


def finish(engine: Engine) -> None:
    while not engine.idle:
        step(engine)
    assert engine.cache.drain(10) and engine.cache.validate() == []


def serve(engine: Engine, *prompts: tuple[int, ...], answer: int = ANSWER) -> list[Request]:
    requests = [engine.submit(RequestParams(prompt, answer, SAMPLING)) for prompt in prompts]
    finish(engine)
    return requests


def check_answers(family: str, requests: Sequence[Request]) -> None:
    for request in requests:
        wanted = alone(family, request.params.tokens, request.params.max_tokens)
        assert tuple(request.output) == wanted, request.number


def close(engine: Engine) -> None:
    """Nothing is held, and what is flushed leaves nothing behind."""
    cache = engine.cache
    assert cache.drain(10) and cache.validate() == [] and cache.index.hot_rows[0] == 0
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.flush(tier)
    for where, count in cache.stats().pages.items():
        assert (count.resident, count.free) == (0, count.capacity), where
    assert cache.close()


class Counted(NamedTuple):
    """Selected entries, over layers and pools."""

    hits: int
    misses: int
    gathered: int


def counted(engine: Engine) -> Counted:
    return Counted(*sum(hot.counts.sum(0) for hot in engine.cache.hardware.hot.values()).tolist())


# -- the same answers ------------------------------------------------------------------------------


SIZES = [
    (model, entries) for model, topk in TOPK.items() for entries in (topk, topk + 1, 3 * topk, 4096)
]
QUICK_SIZES = [("deepseek_v4", 7), ("deepseek_v32", 24), ("glm_moe_dsa-shared", 25)]


@pytest.mark.parametrize(
    ("model", "entries"),
    [pytest.param(*size, marks=() if size in QUICK_SIZES else pytest.mark.full) for size in SIZES],
)
def test_answers_are_those_of_resident_pools(model: str, entries: int) -> None:
    """Requests come at random steps, share prefixes, and are cut into chunks of random sizes."""
    rng = random.Random(entries)
    engine = engine_of(f"{model} hot:{entries}")
    roots = [text(rng, length) for length in (45, 3)]
    prompts = [root + text(rng, length) for length in (30, 5) for root in roots]
    requests: list[Request] = []
    while prompts or not engine.idle:
        engine.scheduler.chunk_tokens = rng.choice((3, 17, 64, 257))
        if prompts and rng.random() < 0.5:
            requests.append(engine.submit(RequestParams(prompts.pop(0), ANSWER, SAMPLING)))
        step(engine)
        assert engine.cache.validate() == []
    (again,) = serve(engine, requests[0].params.tokens)
    assert sum(again.by_tier.values()) >= 3 * PAGE and counted(engine).hits > 0
    check_answers(model, [*requests, again])
    close(engine)


def test_a_context_of_four_times_the_device_tier_is_served() -> None:
    """The device tier holds so many tokens if all pools are resident. The model has one indexer
    for eight layers, so that little stays there. Both engines cut the prompt alike."""
    name, size = "glm_moe_dsa-one-indexer", Bytes(300_000)
    resident = ours(name)
    all_of_it = TieredCache(resident.memory, CacheConfig(size, host_size=None))
    longest = all_of_it.max_sequence_tokens
    assert all_of_it.close() and longest > 6 * PAGE
    prompt = text(random.Random(1), 4 * longest)
    hot = ours(name, resident=Residency(24))
    tokens = len(prompt) + 2 * PAGE
    config = CacheConfig(size, Tokens(2 * tokens), hot_rows=1, longest_tokens=tokens)
    answers = []
    for model, how in ((resident, CacheConfig(Tokens(tokens), None)), (hot, config)):
        engine = Engine(model, TieredCache(model.memory, how), chunk_tokens=256)
        (request,) = serve(engine, prompt, answer=6)
        answers.append(request.output)
        arenas = [engine.cache.hardware.device.arrangement.bytes]
        arenas += [each.shape.bytes for each in engine.cache.hardware.hot.values()]
        assert sum(arenas) <= size.bytes or model is resident
        assert engine.cache.close()
    assert answers[0] == answers[1]


# -- what is read from the host --------------------------------------------------------------------


@pytest.mark.quick(model=["deepseek_v32"])
@pytest.mark.parametrize("model", TOPK)
def test_nothing_is_read_from_the_host_while_all_entries_fit(model: str) -> None:
    """Neither with prompts in several chunks, nor where a decode step crosses pages."""
    prompts = [text(random.Random(seed), length) for seed, length in ((1, 60), (2, 30))]
    read = {}
    for entries in (TOPK[model], 128):
        engine = engine_of(f"{model} hot:{entries}", chunk_tokens=40)
        requests = serve(engine, *prompts, answer=PAGE + 4)
        check_answers(model, requests)
        found = counted(engine)
        assert found.hits > 0
        read[entries] = found.misses + found.gathered
        close(engine)
    assert read[128] == 0 < read[TOPK[model]]


@pytest.mark.quick(model=["glm_moe_dsa-shared"])
@pytest.mark.parametrize("model", TOPK)
def test_an_entry_of_a_found_prefix_is_read_once_while_all_fit(model: str) -> None:
    """By prefill chunks that are gathered or not, and by decode steps."""
    engine, rng = engine_of(f"{model} hot:192"), random.Random(3)
    root = text(rng, 5 * PAGE)
    serve(engine, root, answer=1)
    before, tokens = counted(engine), root + text(rng, 70)
    request = engine.submit(RequestParams(tokens, PAGE, SAMPLING))
    for chunk in (25, 3, 17):
        engine.scheduler.chunk_tokens = chunk
        step(engine)
    engine.scheduler.chunk_tokens = 64
    finish(engine)
    assert sum(request.by_tier.values()) == 5 * PAGE
    check_answers(model, [request])
    found = counted(engine)
    read = found.misses + found.gathered - before.misses - before.gathered
    (pool,) = engine.cache.memory.hot_pools
    assert 0 < read <= len(pool.layers) * 5 * PAGE // pool.tokens_per_entry
    close(engine)


def test_requests_that_run_at_once_share_host_pages_and_no_hot_row() -> None:
    family = "deepseek_v32 hot:25"
    engine, rng = engine_of(family), random.Random(4)
    root = text(rng, 5 * PAGE)
    serve(engine, root + text(rng, 3), answer=1)
    prompts = [root + text(rng, length) for length in (4, 9, 30)]
    requests = [engine.submit(RequestParams(tokens, ANSWER, SAMPLING)) for tokens in prompts]
    while any(not request.output for request in requests):
        step(engine)
    leases = [request.held for request in requests]
    tables = [engine.cache.page_table(lease, "kv")[:5].tolist() for lease in leases]
    assert tables[0] == tables[1] == tables[2] and len(set(tables[0])) == 5
    assert len({engine.cache.hot_row(lease) for lease in leases}) == 3
    finish(engine)
    assert all(sum(request.by_tier.values()) == 5 * PAGE for request in requests)
    check_answers(family, requests)
    assert counted(engine).misses > 0
    close(engine)


@pytest.mark.parametrize("again", [False, True], ids=["ended", "retracted"])
def test_a_hot_row_has_nothing_of_the_request_before(again: bool) -> None:
    """There is one row. A request that finds its prefix takes it over from another."""
    family, rng = "deepseek_v32 hot:64", random.Random(6)
    engine = engine_of(family, rows=1)
    tokens, other = text(rng, 5 * PAGE + 2), text(rng, 5 * PAGE + 2)
    serve(engine, tokens, other)
    if again:
        retracted = engine.submit(RequestParams(other + text(rng, 9), ANSWER, SAMPLING))
        while not retracted.output:
            step(engine)
        engine.scheduler.retract(retracted)
        first = engine.submit(RequestParams(tokens, ANSWER, SAMPLING, priority=1))
        finish(engine)
        assert retracted.admissions == 2
        check_answers(family, [first, retracted])
    (found,) = serve(engine, tokens)
    assert sum(found.by_tier.values()) == 5 * PAGE
    check_answers(family, [found])
    close(engine)


def test_a_prefix_on_the_host_is_not_loaded_whole() -> None:
    """Of latents nothing, of index keys everything; entries that are selected are swapped in."""
    family = "deepseek_v32 hot:24"
    engine, tokens = engine_of(family), text(random.Random(4), 8 * PAGE + 1)
    (first,) = serve(engine, tokens)
    engine.cache.flush(Tier.DEVICE)
    moved = engine.cache.stats().moved_bytes["load"]
    before = counted(engine)
    (again,) = serve(engine, tokens)
    assert again.by_tier == {Tier.HOST: 8 * PAGE} and again.output == first.output
    index = engine.cache.memory.slot_bytes("index")
    assert engine.cache.stats().moved_bytes["load"] - moved == 8 * index
    assert counted(engine).misses > before.misses
    close(engine)


# -- pages that close ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("deepseek_v32", 9),
        *(
            pytest.param(model, count, marks=pytest.mark.full)
            for model in ("deepseek_v32", "deepseek_v4")
            for count in (63, 64, 65)
        ),
    ],
)
def test_all_entries_are_on_the_host_when_many_requests_cross_a_page_at_once(
    model: str, count: int
) -> None:
    """The pages of hot pools on the host are those of a resident pool on the device, by byte."""
    tokens = [text(random.Random(number), 3 * PAGE - 3) for number in range(count)]
    engines = [
        engine_of(family, rows=count, chunk_tokens=8192, tokens=80 * count)
        for family in (f"{model} hot:{TOPK[model]}", model)
    ]
    asked = [
        [engine.submit(RequestParams(prompt, 8, SAMPLING)) for prompt in tokens]
        for engine in engines
    ]
    for end in range(3 * PAGE - 3, 3 * PAGE + 4):
        for engine, requests in zip(engines, asked, strict=True):
            while any(request.computed < end for request in requests):
                step(engine)
            assert len(engine.scheduler.running) == count
            assert all(request.computed == end for request in requests), "not in the same step"
        check_same_pages(*engines, *asked)
    for engine in engines:
        finish(engine)
    assert [one.output for one in asked[0]] == [one.output for one in asked[1]]
    for engine in engines:
        close(engine)


def check_same_pages(
    engine: Engine, resident: Engine, requests: Sequence[Request], others: Sequence[Request]
) -> None:
    """Of all entries that requests have computed."""
    for pool in engine.cache.memory.hot_pools:
        size = pool.entries_per_page(PAGE)
        entries = torch.arange(requests[0].computed // pool.tokens_per_entry)
        for layer in pool.layers:
            kept = [one.cache.home_view(pool.name, layer) for one in (engine, resident)]
            for one, other in zip(requests, others, strict=True):
                tables = [
                    torch.from_numpy(side.cache.page_table(request.held, pool.name).astype("int64"))
                    for side, request in ((engine, one), (resident, other))
                ]
                slots = [table[entries // size] for table in tables]
                for field in kept[0]:
                    ours, theirs = (
                        view[field][at, entries % size]
                        for view, at in zip(kept, slots, strict=True)
                    )
                    assert torch.equal(ours, theirs), (field, layer, one.number)


# -- the gather region -----------------------------------------------------------------------------


def test_long_prompts_wait_for_the_gather_region() -> None:
    """It has place for one of them, and the step's token budget for all."""
    family, rng = "deepseek_v32 hot:24", random.Random(2)
    prompts = [text(rng, length) for length in (100, 90, 110)]
    model = model_of(family)
    config = CacheConfig(Tokens(800), Tokens(1600), hot_rows=3, longest_tokens=128)
    engine = Engine(model, TieredCache(model.memory, config), chunk_tokens=2048)
    requests = [engine.submit(RequestParams(tokens, 4, SAMPLING)) for tokens in prompts]
    steps = []
    while not engine.idle:
        before = [request.computed for request in requests]
        step(engine)
        moves = zip(requests, before, strict=True)
        steps.append([request.computed - past for request, past in moves])
    prefilled = [[count for count in counts if count > 1] for counts in steps]
    assert [counts for counts in prefilled if counts] == [[100], [90], [110]]
    assert steps[1][0] == 1, "who decodes does not wait"
    check_answers(family, requests)
    close(engine)


# -- nothing is left behind ------------------------------------------------------------------------


FLAT_BYTES = 100_000
"""What memory may grow by: requests that are there at the moment. A leaked lease has a kilobyte."""


@cached
def small_memory() -> ModelMemory:
    """A pool that is selected from, and index keys."""
    entry = Entry((Field("x", (4,), DType.FP32),))
    selected = PoolSpec("kv", (0,), entry, selected=8)
    index = PoolSpec("index", (1,), entry, follows="kv")
    memory = ModelMemory("hot", PAGE, (selected, index), layers=2)
    return served_hot(memory, 16)


@pytest.mark.parametrize("requests", [50, pytest.param(10_000, marks=pytest.mark.full)])
def test_nothing_leaks(requests: int) -> None:
    """Requests that end, are aborted and retracted: no row, no slot, and no memory."""
    rng = random.Random(requests)
    memory = small_memory()
    config = CacheConfig(
        Tokens(PAGE * 100), host_size=Tokens(PAGE * 300), hot_rows=12, eviction="lru"
    )
    cache = TieredCache(memory, config)
    engine = Engine(Idle(memory), cache, chunk_tokens=256, max_running=16)
    asked = ended = aborted = max_running = 0
    memories = []
    tracemalloc.start()
    while asked < requests or not engine.idle:
        while asked < requests and engine.scheduler.waiting < 8:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6 * PAGE)))
            engine.submit(RequestParams(tokens, rng.randrange(1, 30), priority=rng.randrange(2)))
            asked += 1
            if asked % (requests // 5) == 0:
                for tier in (Tier.DEVICE, Tier.HOST):  # What is cached grows, and may.
                    cache.flush(tier)
                gc.collect()
                memories.append(tracemalloc.get_traced_memory()[0])
        ended += sum(update.finish is not None for update in engine.step())
        running = engine.scheduler.running
        max_running = max(max_running, len(running))
        assert cache.index.hot_rows[0] == len(running) <= 12
        if running and rng.random() < 0.1:
            engine.abort(rng.choice(running))
            aborted += 1
        elif running and rng.random() < 0.1:
            engine.scheduler.retract(rng.choice(running))
        if rng.random() < 0.05:
            assert cache.validate() == []
    tracemalloc.stop()
    assert ended + aborted == requests and aborted and max_running == 12
    assert memories[-1] - memories[1] < FLAT_BYTES, memories
    gc.collect()
    known = engine._runner._hot
    assert len(known._rows_in_use) <= 12 and len(known._tables._known) <= 12  # Of the last steps.
    close(engine)


def test_a_higher_priority_preempts_beyond_the_longest_sequence() -> None:
    """Rows are taken, and the histories of all together are longer than a sequence may be."""
    config = CacheConfig(Tokens(768), Tokens(4096), hot_rows=3, longest_tokens=128)
    cache = TieredCache(model_of("deepseek_v32 hot:24").memory, config)
    engine = Engine(model_of("deepseek_v32 hot:24"), cache, chunk_tokens=64, max_running=3)
    rng = random.Random(1)

    def ask(priority: int, answer: int = 40) -> Request:
        return engine.submit(RequestParams(text(rng, 60), answer, priority=priority))

    low, *_ = ask(0), ask(1), ask(1)
    while not low.output:
        engine.step()
    high = ask(1, 2)
    while high.finish is None:
        engine.step()
    assert low.finish is None and low.admissions >= 1 and len(low.output) < 40
    assert cache.validate() == []
    cache.close()
