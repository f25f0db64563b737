"""Models that draft with their own next-token layer answer as without, from every tier."""

from __future__ import annotations

import pytest

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.spec import Tier
from tests.models.tiny import prompt
from tests.models.tiny_mtp import NAMES, pair

PROMPTS = [tuple(prompt(75, seed=1)), tuple(prompt(33, seed=3))]
ANSWER = 12
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def serve(engine: Engine, answer: int, *, speculate: bool = True) -> list[Request]:
    requests = [
        engine.submit(RequestParams(tokens, answer, SAMPLED, speculate=speculate))
        for tokens in PROMPTS
    ]
    while not engine.idle:
        engine.step()
    assert engine.cache.drain(10) and engine.cache.validate() == []
    return requests


@pytest.mark.quick(name=["deepseek_v4-mtp", "qwen3_next-mtp"])
@pytest.mark.parametrize("written", [True, False], ids=["drafted", "absent"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_without(name: str, written: bool) -> None:
    """`written`: the prefix was computed with the draft, or its draft pages are absent."""
    target, draft = pair(name, deterministic=True)
    size = Tokens(64 * target.memory.page_tokens)
    cache = TieredCache(target.memory, CacheConfig(size, host_size=size, device="cpu"))
    drafter = ModelDrafter(draft, draft.captures, cache, target.vocabulary)
    engine = Engine(
        target, cache, chunk_tokens=64, drafter=drafter, draft_tokens=3, fixed_drafts=True
    )
    wanted = [tuple(one.output) for one in serve(engine, ANSWER, speculate=False)]
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.flush(Tier.DEVICE)
        cache.flush(Tier.HOST)
        serve(engine, 1, speculate=written)
        if tier is Tier.HOST:
            cache.flush(Tier.DEVICE)
        requests = serve(engine, ANSWER)
        assert all(tier in one.by_tier for one in requests)
        assert [tuple(one.output) for one in requests] == wanted
    lengths = engine.accept_length_stats
    assert lengths is not None and lengths.accepted + lengths.rejected
    assert cache.close()
