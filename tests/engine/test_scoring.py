"""Scored prompts: every token gets its log-probability, and nothing kept is used for that."""

from __future__ import annotations

import random

import pytest
import torch

from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Finish, Request, RequestParams, SamplingParams
from tests.models.tiny import VOCABULARY, oracle, ours

PAGE = 16
FAMILIES = ("llama", "gemma3", "gpt_oss", "falcon_h1")


def engine_for(family: str, chunk_tokens: int = 64, tokens: int = 1024) -> Engine:
    model = ours(family, page_tokens=PAGE, deterministic=True)
    config = CacheConfig(Tokens(tokens), host_size=Ratio(2), tokens_per_checkpoint=64)
    return Engine(model, TieredCache(model.memory, config), chunk_tokens=chunk_tokens)


def serve(engine: Engine, *asks: RequestParams) -> list[Request]:
    requests = [engine.submit(ask) for ask in asks]
    while not engine.idle:
        engine.step()
        assert engine.cache.validate() == []
    return requests


def text(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCABULARY) for _ in range(count))


@pytest.mark.quick(family=["gpt_oss", "falcon_h1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own_whatever_the_chunks(family: str) -> None:
    tokens = text(1, 75)
    with torch.no_grad():
        logits = oracle(family)(torch.tensor([tokens])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1)[torch.arange(74), torch.tensor(tokens[1:])]
    found = []
    for chunk_tokens in (7, 64, 257):
        engine = engine_for(family, chunk_tokens)
        (request,) = serve(engine, RequestParams(tokens, 0, score=3))
        assert request.finish is Finish.LENGTH and request.output == []
        assert [sampled.token for sampled in request.scores] == list(tokens[1:])
        torch.testing.assert_close(
            torch.tensor([sampled.logprob for sampled in request.scores]), wanted, atol=2e-5, rtol=0
        )
        assert all(len(sampled.top) == 3 for sampled in request.scores)
        found.append(request.scores)
        engine.cache.close()
    assert found[0] == found[1] == found[2], "to the last bit"


@pytest.mark.quick(family=["gemma3", "falcon_h1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_scored_prompt_uses_nothing_and_leaves_nothing(family: str) -> None:
    engine = engine_for(family)
    tokens = text(2, 5 * PAGE + 2)
    (before,) = serve(engine, RequestParams(tokens, 4))
    (scored,) = serve(engine, RequestParams(tokens, 4, score=0))
    assert scored.by_tier == {} and scored.output == before.output
    assert engine.cache.drain(10)
    pages = engine.cache.stats().pages
    (after,) = serve(engine, RequestParams(tokens, 4))
    assert sum(after.by_tier.values()) == 5 * PAGE, "what was kept before still is"
    assert after.output == before.output
    assert engine.cache.drain(10) and engine.cache.stats().pages == pages
    engine.cache.close()


def test_a_scored_prompt_that_was_interrupted_is_scored_once() -> None:
    engine = engine_for("falcon_h1", chunk_tokens=16)
    tokens = text(3, 90)
    (wanted,) = serve(engine, RequestParams(tokens, 0, score=2))
    request = engine.submit(RequestParams(tokens, 0, score=2))
    for _ in range(3):
        engine.step()
    assert 0 < len(request.scores) < 89
    engine.scheduler.retract(request)
    while not engine.idle:
        engine.step()
    assert request.scores == wanted.scores
    engine.cache.close()


def test_a_request_for_no_token_warms_the_cache() -> None:
    engine = engine_for("llama")
    tokens = text(4, 3 * PAGE + 1)
    (nothing,) = serve(engine, RequestParams(tokens, 0))
    assert nothing.finish is Finish.LENGTH and nothing.output == []
    (warm,) = serve(engine, RequestParams(tokens, 2, SamplingParams(logprobs=1)))
    assert sum(warm.by_tier.values()) == 3 * PAGE
    engine.cache.close()


def test_recomputing_gives_the_same_answer_from_nothing() -> None:
    engine = engine_for("gemma3")
    tokens = text(5, 4 * PAGE + 1)
    (first,) = serve(engine, RequestParams(tokens, 5))
    (again,) = serve(engine, RequestParams(tokens, 5, recompute=True))
    assert again.by_tier == {} and again.output == first.output
    engine.cache.close()
