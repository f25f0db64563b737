"""Thousands of requests that draft, end, are aborted and retracted leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvtide.bench.step_cost import MEMORIES, Idle
from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from kvtide.spec import ModelMemory, Tier

PAGE, TOKEN = 16, 7
"""`Idle` says nothing but this token."""


class GuessingDrafter(TokenDrafter):
    """Right in four of five drafts."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [tuple(self._guess() for _ in range(wish.limit)) for wish in wishes]

    def _guess(self) -> int:
        return TOKEN if self._random.random() < 0.8 else TOKEN + 1


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        *((name, 300) for name in MEMORIES),
        pytest.param("recurrent", 10_000, marks=pytest.mark.full),
    ],
)
def test_nothing_leaks(name: str, requests: int) -> None:
    rng = random.Random(requests)
    memory = ModelMemory(name, PAGE, MEMORIES[name], layers=len(MEMORIES[name]))
    config = CacheConfig(Tokens(PAGE * 400), host_size=Ratio(1.0), tokens_per_checkpoint=PAGE)
    cache = TieredCache(memory, config)
    drafter = GuessingDrafter(rng)
    engine = Engine(
        Idle(memory),
        cache,
        chunk_tokens=256,
        max_running=32,
        drafter=drafter,
        draft_tokens=7,
        fixed_drafts=True,
    )
    asked = ended = 0
    while asked < requests or not engine.idle:
        while asked < requests and engine.scheduler.waiting < 8:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6 * PAGE)))
            engine.submit(RequestParams(tokens, rng.randrange(40), priority=rng.randrange(2)))
            asked += 1
        updates = engine.step()
        ended += sum(update.finish is not None for update in updates)
        assert all(update.sampled is None or update.sampled.token == TOKEN for update in updates)
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine.abort(rng.choice(running))
            ended += 1
        elif running and rng.random() < 0.1:
            engine.scheduler.retract(rng.choice(running))
    assert ended == requests
    lengths = engine.accept_length_stats
    assert lengths is not None and lengths.accepted > 4 * requests > 0 < lengths.rejected
    assert cache.drain(10) and cache.validate() == [] and not cache.index.leases
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.flush(tier)
    for count in cache.stats().pages.values():
        assert (count.resident, count.free) == (0, count.capacity)
    cache.close()
