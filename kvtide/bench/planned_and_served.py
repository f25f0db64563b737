"""The hit rates of an engine beside those that the planner predicts.

The same requests, one after another, go through a planner's replay and through an engine with a
cache of as many pages. The engine computes prompts in chunks, copies pages beside the model and
keeps the running requests' state, all of which the planner leaves out. Both must still find the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from kvtide.bench.step_cost import MEMORIES, PAGE, Idle
from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Engine, RequestError, RequestParams
from kvtide.models import Model
from kvtide.planner.replay import Setup, replay
from kvtide.planner.study import Checkpoints
from kvtide.planner.traces import Trace, TraceRequest
from kvtide.spec import ModelMemory, Tier

GOAL_POINTS = 1.0
_DRAIN_S = 60.0
_ANSWER = 1


@dataclass(frozen=True, slots=True)
class Replayed:
    """Token hit rates of the same requests, planned and served, in all and by tier."""

    memory: str
    checkpoints: str
    requests: int
    prompt_tokens: int
    planned: dict[str, float]
    served: dict[str, float]

    @property
    def planned_rate(self) -> float:
        return sum(self.planned.values())

    @property
    def served_rate(self) -> float:
        return sum(self.served.values())

    @property
    def points(self) -> float:
        """How much more the engine found, in percentage points."""
        return 100 * (self.served_rate - self.planned_rate)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"points": self.points}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The tiers in tokens, and the maximum tokens of a step of the engine."""

    device_tokens: int
    host_tokens: int
    chunk_tokens: int = 512
    tokens_per_checkpoint: int = 4096


def idle(name: str) -> Idle:
    """A model that computes nothing, with one of the memories of `step_cost`."""
    return Idle(ModelMemory(name, PAGE, MEMORIES[name], layers=2))


def thinned(trace: Trace, requests: int, every: int, vocabulary: int) -> list[TraceRequest]:
    """The first requests with one token in `every`, within a vocabulary.

    Prompts that shared a prefix share one still, and pages that are smaller by as much are shared
    as those of the trace were.
    """
    return [
        TraceRequest(
            r.arrival_s, np.ascontiguousarray(r.prompt[::every] % vocabulary), 1, r.session
        )
        for r in islice(trace, requests)
    ]


def compare(
    model: Model, requests: Sequence[TraceRequest], sizes: Sizes, checkpoints: Checkpoints
) -> Replayed:
    """Replay the requests both ways, from an empty cache each time."""
    config = CacheConfig(
        Tokens(sizes.device_tokens),
        host_size=Tokens(sizes.host_tokens) if sizes.host_tokens else None,
        tokens_per_checkpoint=sizes.tokens_per_checkpoint,
    )
    cache = TieredCache(model.memory, config, placement=checkpoints.placement())
    capacity_pages = _capacity(cache)
    served = _served(Engine(model, cache, chunk_tokens=sizes.chunk_tokens), requests)
    cache.close()
    setup = Setup(model.memory, capacity_pages, config.eviction, checkpoints.placement())
    report = replay(setup, requests)
    total = report.prompt_tokens
    return Replayed(
        model.memory.model,
        checkpoints.name,
        report.requests,
        total,
        {tier.name.lower(): tokens / total for tier, tokens in report.hit_tokens.items()},
        {tier.name.lower(): served[tier] / total for tier in capacity_pages},
    )


def _capacity(cache: TieredCache) -> Mapping[Tier, Mapping[str, int]]:
    tiers = [Tier.DEVICE, *([Tier.HOST] if cache.config.host_size else [])]
    names = [anchor.name for anchor in cache.memory.anchors]
    return {tier: {name: cache.index.capacity(tier, name) for name in names} for tier in tiers}


def _served(engine: Engine, requests: Sequence[TraceRequest]) -> Counter[Tier]:
    """Prompt tokens that the engine found, by tier; it refuses what does not fit."""
    found: Counter[Tier] = Counter()
    for params in _params(requests):
        try:
            request = engine.submit(params)
        except RequestError:
            continue
        while not engine.idle:
            engine.step()
        drained = engine.cache.drain(_DRAIN_S)
        assert drained, "transfers have not landed after a minute"
        found.update(request.by_tier)
    return found


def _params(requests: Sequence[TraceRequest]) -> Iterator[RequestParams]:
    return (RequestParams(tuple(request.prompt.tolist()), _ANSWER) for request in requests)
