"""What comes back from the host is what was computed: every logprob equal to the last bit.

Conversations with branches run interleaved on a device so small that their pages are moved to the
host and back many times; each answer is compared with that of an engine that never saw anything.
"""

from __future__ import annotations

import random
from functools import cache as cached

import pytest

from kvtide.cache import CacheConfig, EveryPages, Ratio, TieredCache, Tokens
from kvtide.engine import Ask, Chosen, Engine, Finish, Request, Sampling
from kvtide.models import Model
from kvtide.spec import Tier
from kvtide.tiers import Layout
from tests.models.tiny import VOCABULARY, ours

PAGE = 16
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "falcon_h1")
SAMPLING = Sampling(logprobs=3)


@cached
def model_of(family: str) -> Model:
    return ours(family, page_tokens=PAGE, deterministic=True)


def engine_for(model: Model, tokens: int, chunk_tokens: int = 64, **options: object) -> Engine:
    config = CacheConfig(
        Tokens(tokens), **{"host_size": Ratio(8), "tokens_per_checkpoint": 64, **options}
    )
    return Engine(model, TieredCache(model.memory, config), chunk_tokens=chunk_tokens)


def answer(engine: Engine, *asks: Ask) -> list[Request]:
    """Serve these together."""
    requests = [engine.submit(ask) for ask in asks]
    while not engine.idle:
        engine.step()
        assert engine.cache.validate() == []
    return requests


@cached
def alone(family: str, tokens: tuple[int, ...], count: int) -> tuple[Chosen, ...]:
    """The answer of an engine that has never seen anything, and computes the prompt at once."""
    engine = engine_for(model_of(family), 1024, chunk_tokens=1024, host_size=None)
    (request,) = answer(engine, Ask(tokens, count, SAMPLING))
    assert request.by_tier == {}
    engine.cache.close()
    return tuple(request.output)


def text(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCABULARY) for _ in range(count))


def converse(family: str, engine: Engine, turns: int = 2) -> list[Request]:
    """Three conversations of three branches each, turn by turn, three requests at a time."""
    rng = random.Random(7)
    roots = [text(rng, 70) for _ in range(3)]
    branches = [root + text(rng, 11) for root in roots for _ in range(3)]
    served = []
    for _ in range(turns):
        order = rng.sample(range(9), 9)
        for start in range(0, 9, 3):
            numbers = order[start : start + 3]
            requests = answer(engine, *(Ask(branches[n], 6, SAMPLING) for n in numbers))
            for number, request in zip(numbers, requests, strict=True):
                expected = alone(family, request.ask.tokens, 6)
                assert tuple(request.output) == expected, (family, number)
                branches[number] = tuple(request.tokens) + text(rng, 9)
            served += requests
    return served


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_an_engine_without_a_cache(family: str) -> None:
    engine = engine_for(model_of(family), 384)
    served = converse(family, engine)
    found = {tier: sum(r.by_tier.get(tier, 0) for r in served) for tier in Tier}
    assert found[Tier.HOST] > 0 and engine.cache.stats().moved_bytes["load"] > 0
    engine.cache.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "falcon_h1"])
@pytest.mark.parametrize("chunk_tokens", [64, 257])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_no_policy_layout_or_chunk_changes_a_bit(family, chunk_tokens, layout, policy) -> None:
    model = model_of(family)
    engine = engine_for(model, 384, chunk_tokens, write_policy=policy, layout=layout)
    converse(family, engine)
    engine.cache.close()


def test_aborts_and_retractions_change_nobody_elses_bits() -> None:
    rng = random.Random(3)
    for family in ("qwen3", "gemma3", "falcon_h1"):
        engine = engine_for(model_of(family), 512)
        shared = text(rng, 50)
        for _ in range(4):
            requests = [engine.submit(Ask(shared + text(rng, 20), 8, SAMPLING)) for _ in range(4)]
            steps = 0
            while not engine.idle:
                engine.step()
                steps += 1
                if steps == 3 and engine.scheduler.running:
                    engine.scheduler.retract(rng.choice(engine.scheduler.running))
                if steps == 4:
                    engine.abort(requests[1])
                assert engine.cache.validate() == []
            for request in requests:
                if request.finish is not Finish.ABORT:
                    assert tuple(request.output) == alone(family, request.ask.tokens, 8)
        assert engine.cache.drain(10)
        engine.cache.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_repeated_prompt_finds_its_whole_pages(family: str) -> None:
    engine = engine_for(model_of(family), 1024)
    tokens = text(random.Random(5), 5 * PAGE + 3)
    first, again = (answer(engine, Ask(tokens, 2, SAMPLING))[0] for _ in range(2))
    assert again.by_tier == {Tier.DEVICE: 5 * PAGE} and again.output == first.output
    assert engine.cache.drain(10)
    engine.cache.flush(Tier.DEVICE)
    (restored,) = answer(engine, Ask(tokens, 2, SAMPLING))
    assert restored.by_tier == {Tier.HOST: 5 * PAGE} and restored.output == first.output
    engine.cache.close()


@pytest.mark.parametrize("family", ["falcon_h1", "gemma3"])
def test_a_share_that_was_cut_short_goes_on_with_what_the_next_step_leaves_it(family) -> None:
    rng = random.Random(11)
    model = model_of(family)
    config = CacheConfig(Tokens(2048), host_size=Ratio(2), tokens_per_checkpoint=16)
    cache = TieredCache(model.memory, config, placement=EveryPages(3))
    engine = Engine(model, cache, chunk_tokens=90)
    requests = [engine.submit(Ask(text(rng, 150), 12, SAMPLING)) for _ in range(4)]
    while not engine.idle:
        engine.scheduler.chunk_tokens = rng.choice((9, 20, 90))
        engine.step()
        assert cache.validate() == []
    for request in requests:
        assert tuple(request.output) == alone(family, request.ask.tokens, 12)
    cache.close()
