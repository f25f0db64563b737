"""Thousands of requests that draft, end, are aborted and retracted leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kvtide.bench.step_cost import MEMORIES, Idle
from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from kvtide.layers import ForwardPass, Place, Step
from kvtide.layers.reference.swap_in import swap_in
from kvtide.models.draft import CapturedStates
from kvtide.spec import ModelMemory, PoolSpec, Tier, with_draft
from kvtide.spec.residency import served_hot, step_queries

PAGE, TOKEN, DRAFTS = 16, 7, 7
"""`Idle` says nothing but this token."""
SELECTED = 8


class GuessingDrafter(TokenDrafter):
    """Right in four of five drafts."""

    def __init__(self, rng: random.Random, writes: tuple[str, ...]) -> None:
        self._random, self.writes = rng, writes

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [tuple(self._guess() for _ in range(wish.limit)) for wish in wishes]

    def _guess(self) -> int:
        return TOKEN if self._random.random() < 0.8 else TOKEN + 1


class Selecting(Idle):
    """Every query selects entries of hot pools at random, which are swapped in."""

    def forward(
        self, step: Step, before: torch.Tensor | None = None, captured: CapturedStates | None = None
    ) -> torch.Tensor:
        run = ForwardPass(step)
        for pool in self.memory.hot_pools:
            swap_in(
                run, Place(pool, pool.layers[0]), [_chosen(s.past, s.total) for s in run.sequences]
            )
        return super().forward(step, before, captured)


def _chosen(past: int, total: int) -> torch.Tensor:
    """A mask (queries, entries) for the tokens behind `past`."""
    visible = torch.rand(total - past, total).tril(past)
    best = visible.topk(min(SELECTED, total)).indices
    return torch.zeros_like(visible, dtype=torch.bool).scatter_(1, best, True) & (visible > 0)


def memory_of(name: str) -> ModelMemory:
    """One of `MEMORIES`; `hot`: with entries that are selected, on the host; `draft`: with a pool
    that the drafter writes."""
    full = ModelMemory(name, PAGE, MEMORIES["full"], layers=1)
    (kv,) = full.pools
    if name == "hot":
        index = PoolSpec("index", (1,), kv.entry, follows="kv")
        kv = PoolSpec("kv", (0,), kv.entry, selected=SELECTED)
        both = ModelMemory(name, PAGE, (kv, index), layers=2)
        return served_hot(both, SELECTED * (DRAFTS + 1), step_queries(both, DRAFTS))
    if name == "draft":
        return with_draft(full, ModelMemory("draft", PAGE, (kv,), layers=1))
    return ModelMemory(name, PAGE, MEMORIES[name], layers=len(MEMORIES[name]))


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        *((name, 300) for name in (*MEMORIES, "draft")),
        ("hot", 50),
        pytest.param("recurrent", 10_000, marks=pytest.mark.full),
        pytest.param("draft", 10_000, marks=pytest.mark.full),
        pytest.param("hot", 2000, marks=pytest.mark.full),
    ],
)
def test_nothing_leaks(name: str, requests: int) -> None:
    rng = random.Random(requests)
    torch.manual_seed(requests)
    memory = memory_of(name)
    config = CacheConfig(*(Tokens(PAGE * 400), Ratio(1.0)), tokens_per_checkpoint=PAGE, hot_rows=32)
    cache = TieredCache(memory, config)
    engine = Engine(
        Selecting(memory),
        cache,
        chunk_tokens=256,
        max_running=32,
        drafter=GuessingDrafter(rng, memory.draft_sidecars),
        draft_tokens=DRAFTS,
        fixed_drafts=True,
    )
    asked = ended = 0
    while asked < requests or not engine.idle:
        while asked < requests and engine.scheduler.waiting < 8:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 6 * PAGE)))
            how = {"priority": rng.randrange(2), "speculate": rng.random() < 0.9}
            engine.submit(RequestParams(tokens, rng.randrange(40), **how))
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
    assert cache.index.hot_rows[0] == 0
    for hot in cache.hardware.hot.values():
        assert bool((hot.counts > 0).all()), "hits, misses and gathered entries"
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.flush(tier)
    for count in cache.stats().pages.values():
        assert (count.resident, count.free) == (0, count.capacity)
    cache.close()
