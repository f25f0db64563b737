"""A scheduler and an overlap without a model: steps are only counted."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from kvtide.cache import CacheConfig, TieredCache, Tokens
from kvtide.engine import Request, RequestParams
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.overlap import Overlap
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.scheduler import Scheduler
from kvtide.spec import ALL, ModelMemory
from tests.cache.building import text
from tests.cache.memories import FULL, PAGE


class Ahead(Enum):
    """What is planned of the step after the current one."""

    NOTHING = "nothing"
    DECODE = "decode"
    MIXED = "mixed"


class Graphs:
    """A runner that computes nothing: any step fits a graph."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> Any:
        return "eager", chunks

    def prepare(self, chunks: Sequence[ScheduledChunk], moves: int) -> Any:
        return chunks

    def launch_prepared(self, step: Any) -> Any:
        return "prepared", step

    def launch_ahead(self, step: Any, requests: Any, sampled: Any) -> Any:
        return step

    def launch_drafted(self, step: Any, drafts: Any) -> Any:
        return step

    def launch_verify_ahead(self, step: Any, sampled: Any, drafts: Any) -> Any:
        return step

    def read_launched(self, step: Any, chunks: Sequence[ScheduledChunk]) -> Any:
        return "launched", chunks


class Desk:
    """A scheduler, its cache, and requests that are computed by saying so."""

    def __init__(
        self,
        memory: ModelMemory = FULL,
        *,
        pages: int = 16,
        chunk_tokens: int = 64,
        max_running: int = 8,
        tokens_per_checkpoint: int = PAGE,
        **more: Any,
    ) -> None:
        config = CacheConfig(
            Tokens(pages * PAGE), host_size=None, tokens_per_checkpoint=tokens_per_checkpoint
        )
        self.cache = TieredCache(memory, config, **more)
        self.scheduler = Scheduler(self.cache, chunk_tokens, max_running, cuda_graphs=True)
        self.overlap = Overlap(self.cache, Graphs())
        self.requests: list[Request] = []

    def queue(
        self,
        pages: int = 2,
        *,
        extra: int = 1,
        answer: int = 4,
        priority: int = 0,
        after: Request | None = None,
    ) -> Request:
        """A request whose prompt has whole pages and some tokens, unlike any other's; or `after`
        the prompt of another."""
        number = len(self.requests) + 1
        begin = () if after is None else after.params.tokens
        ask = RequestParams((*begin, *text(number, pages, extra)), answer, priority=priority)
        request = Request(number, ask, self.cache.prompt(ask.tokens), list(ask.tokens))
        self.requests.append(request)
        self.scheduler.queue(request)
        return request

    def step(self, ahead: Ahead = Ahead.NOTHING) -> list[ScheduledChunk]:
        """Admit, schedule and commit a step; a request whose tokens are computed gets one more."""
        self.scheduler.admit()
        step = self.overlap.take(self.scheduler)
        chunks = step.chunks if step is not None else self.scheduler.schedule()
        for request, end, _ in chunks:
            self.check(request, end)
            request.computed = end
            self.cache.commit(request.held, end)
        plans = {Ahead.DECODE: self.scheduler.plan_decode, Ahead.MIXED: self.scheduler.plan_mixed}
        self.planned = plans[ahead]() if ahead in plans else None
        if self.planned is not None:
            self.overlap.plan(self.planned)
        for request, end, _ in chunks:
            if end == request.length:
                request.append(SampledToken(7, 0.0))
                if request.length == request.max_length:
                    self.scheduler.remove(request)
        return chunks

    @property
    def may_launch(self) -> bool:
        return self.planned is not None and self.scheduler.may_launch(self.planned)

    @property
    def may_launch_uncertain(self) -> bool:
        return self.planned is not None and self.scheduler.may_launch_uncertain(self.planned)

    def launch(self) -> None:
        """Launch what is planned, ahead of the tokens."""
        assert self.overlap.prepare()
        self.overlap.launch([], torch.empty(0))

    def check(self, request: Request, end: int) -> None:
        """Whether there are slots for what a step up to there reads, and for what the next does."""
        for pool in self.cache.memory.anchors:
            if pool.reuse.stride is None and pool.tail_entries is None:
                table = self.cache.page_table(request.held, pool.name)
                for at in (request.computed, end):
                    first = 0 if pool.reuse.reach is ALL else max(0, at - pool.reuse.reach)
                    assert (table[first // PAGE : -(-at // PAGE)] >= 0).all(), pool.name

    def end(self) -> None:
        for request in self.requests:
            self.scheduler.remove(request)
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.cache.validate() == []
        assert not self.cache.index.leases
        for count in self.cache.stats().pages.values():
            assert count.free + count.resident == count.capacity
        self.cache.close()
