"""Whatever an engine takes it serves: nothing that was admitted to the queue waits for ever."""

from __future__ import annotations

import random

import pytest

from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from tests.models.tiny import VOCABULARY, ours

PAGE = 16


@pytest.mark.quick
@pytest.mark.parametrize("pages", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "falcon_h1"])
def test_the_longest_sequence_is_served_alone_resumed_and_in_company(family, pages) -> None:
    model = ours(family, page_tokens=PAGE)
    cache = TieredCache(model.memory, CacheConfig(Tokens(pages * PAGE), host_size=Ratio(2)))
    engine = Engine(model, cache, chunk_tokens=37)
    assert engine.max_sequence_tokens == pages * PAGE
    rng = random.Random(1)
    longest = tuple(rng.randrange(1, VOCABULARY) for _ in range(engine.max_sequence_tokens - 3))
    for prompts in ([longest], [longest], [longest, longest[::-1], longest[: PAGE + 1]]):
        _answer(engine, prompts, 100 + 20 * pages)
    cache.close()


@pytest.mark.quick
@pytest.mark.parametrize("pages", [1, 8])
def test_windows_alone_bound_no_sequence(pages: int) -> None:
    """What a sequence has passed is given back: its positions are its only limit."""
    model = ours("mistral-windows", page_tokens=PAGE)
    cache = TieredCache(model.memory, CacheConfig(Tokens(pages * PAGE), host_size=Ratio(2)))
    engine = Engine(model, cache, chunk_tokens=37)
    assert engine.max_sequence_tokens == model.max_positions
    rng = random.Random(1)
    held = PAGE * sum(cache.index.capacity(a.home, a.name) for a in model.memory.anchors)
    long = tuple(rng.randrange(1, VOCABULARY) for _ in range(4 * held))
    for prompts in ([long], [long], [long, long[::-1], long[: PAGE + 1]]):
        _answer(engine, prompts, 200)
    cache.close()


def _answer(engine: Engine, prompts: list[tuple[int, ...]], steps: int) -> None:
    """Three tokens for each of these prompts, which run together, in so many steps at most."""
    requests = [engine.submit(RequestParams(prompt, 3)) for prompt in prompts]
    for _ in range(steps):
        if engine.idle:
            break
        engine.step()
        assert engine.cache.validate() == []
        engine.cache.drain(10)
    assert engine.idle, "it waits for ever"
    assert all(len(request.output) == 3 for request in requests)
