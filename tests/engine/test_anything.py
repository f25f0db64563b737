"""Anything at once: whatever is asked of a small engine ends, and its answers are right.

Priorities, sessions, aborts, retractions, scored and recomputed prompts, checks of restores and
flushes, random by a seed, on a device of a few pages; every other seed has drafts too. A run whose
requests neither speak nor end for a long time has lost one.
"""

from __future__ import annotations

import random
import time
from functools import cache as cached

import pytest

from kvtide.cache import CacheConfig, EveryPages, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams, SamplingParams
from kvtide.engine.restore_oracle import RestoreOracle
from kvtide.models import Model
from kvtide.spec import Tier
from tests.engine.speculation.drafting import ErringDrafter
from tests.models.tiny import VOCABULARY, ours

PAGE = 16
SHOWN = SamplingParams(logprobs=2)
SEEDS = range(8)
MAX_ANSWER = 20
FAMILIES = ("llama", "gemma3", "gpt_oss", "falcon_h1")
Words = tuple[int, ...]


@cached
def model_of(family: str) -> Model:
    return ours(family, page_tokens=PAGE, deterministic=True)


@cached
def reference(family: str) -> Engine:
    model = model_of(family)
    config = CacheConfig(Tokens(2048), host_size=None, tokens_per_checkpoint=64)
    return Engine(model, TieredCache(model.memory, config), chunk_tokens=2048)


def alone(family: str, ask: RequestParams) -> Request:
    """The same request to an engine that uses nothing it has kept."""
    engine = reference(family)
    request = engine.submit(
        RequestParams(ask.tokens, ask.max_tokens, SHOWN, recompute=True, score=ask.score)
    )
    while not engine.idle:
        engine.step()
    return request


class Answers(dict[Words, list[int]]):
    """Of any prompt, from the reference."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __missing__(self, tokens: Words) -> list[int]:
        answer = alone(self._family, RequestParams(tokens, MAX_ANSWER)).output
        return self.setdefault(tokens, [one.token for one in answer])


class Run:
    """One engine with settings of its own, and three conversations that branch."""

    def __init__(self, family: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.family = family
        pages = rng.choice((2, 3, 4, 6, 8, 12, 20))
        config = CacheConfig(
            Tokens(pages * PAGE),
            host_size=rng.choice((None, Ratio(1), Ratio(2), Ratio(8))),
            tokens_per_checkpoint=rng.choice((16, 64, 256, 1024)),
            write_policy=rng.choice(("write_through", "write_through_selective", "write_back")),
            session_fraction=rng.choice((0.25, 0.5, 1.0)),
        )
        memory = model_of(family).memory
        placement = rng.choice((None, None, EveryPages(1), EveryPages(3)))
        self.cache = TieredCache(memory, config, placement=placement)
        self.oracle = RestoreOracle(self.cache, rng.choice((0.0, 0.5, 1.0)), None)
        self.engine = Engine(
            model_of(family),
            self.cache,
            chunk_tokens=rng.choice((1, 5, 16, 37, 64, 257)),
            max_running=rng.choice((1, 2, 4, 16)),
            oracle=self.oracle,
            drafter=ErringDrafter(Answers(family), 0.2, seed) if seed % 2 else None,
            draft_tokens=1 + seed % 7,
            fixed_drafts=True,
        )
        self.patience = 400 + 32 * pages * PAGE // self.engine.scheduler.chunk_tokens
        self.talks = [self._words(rng.randrange(1, pages * PAGE)) for _ in range(3)]
        self.requests: list[tuple[int, Request]] = []

    def _words(self, count: int) -> Words:
        return tuple(self.rng.randrange(1, VOCABULARY) for _ in range(count))

    def submit(self) -> None:
        rng, max_tokens = self.rng, self.engine.max_sequence_tokens
        talk = rng.randrange(3)
        tokens = (self.talks[talk] + self._words(rng.randrange(20)))[:max_tokens]
        ask = RequestParams(
            tokens,
            min(rng.choice((0, 1, 3, 8, MAX_ANSWER)), max_tokens - len(tokens)),
            SHOWN,
            recompute=rng.random() < 0.1,
            score=rng.choice((*[None] * 6, 0, 2)),
            priority=rng.choice((0, 0, 0, 1, 2, 5)),
            session=rng.choice((None, None, "a", "b", "c")),
        )
        self.requests.append((talk, self.engine.submit(ask)))

    def disturb(self) -> None:
        rng, running = self.rng, self.engine.scheduler.running
        live = [request for _, request in self.requests if request.finish is None]
        if live and rng.random() < 0.03:
            self.engine.abort(rng.choice(live))
        if running and rng.random() < 0.02:
            self.engine.scheduler.retract(rng.choice(running))
        if rng.random() < 0.02:
            self.cache.flush(rng.choice((Tier.DEVICE, Tier.HOST)))

    def play(self, count: int) -> None:
        quiet = 0
        while len(self.requests) < count or not self.engine.idle:
            if len(self.requests) < count and (self.rng.random() < 0.25 or self.engine.idle):
                self.submit()
            updates = self.engine.step()
            assert self.cache.validate() == []
            for talk, request in self.requests:
                if any(update.request is request and update.finish for update in updates):
                    self.talks[talk] = tuple(request.tokens[: self.engine.max_sequence_tokens])
            self.disturb()
            quiet = 0 if updates else quiet + 1
            assert quiet < self.patience, "a request waits for ever"
            if not self.engine.computed:
                time.sleep(0.0002)  # Copies are on their way.

    def check(self) -> None:
        for _, request in self.requests:
            if request.finish is not None and request.finish.value != "abort":
                wanted = alone(self.family, request.params)
                assert (request.output, request.scores) == (wanted.output, wanted.scores)
        assert self.oracle.counts.diverged == 0
        self.cache.close()
        assert not self.cache.index.leases


@pytest.mark.quick(family=["falcon_h1"], seed=range(1))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_is_asked_ends_and_is_right(family: str, seed: int) -> None:
    run = Run(family, seed)
    run.play(run.rng.randrange(6, 14))
    run.check()
