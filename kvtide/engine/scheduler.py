"""Who runs next, and how many of its tokens.

Admission reserves the worst case: a request runs only when the device has slots for its prefix and
prompt and a promise of slots for all it may generate. Then every step gives one token to each
request that generates, and what is left of the step's tokens to prompts, oldest first.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kvtide.cache import TieredCache
from kvtide.engine.request import Request, State


class Share(NamedTuple):
    """A request's part of a step: its tokens from `computed` up to `end`."""

    request: Request
    end: int


class Scheduler:
    """`chunk_tokens` is the most that one step computes (it may change between steps),
    `most_running` the largest batch.

    No more run than a step has tokens, so that all who generate get one.
    """

    def __init__(self, cache: TieredCache, chunk_tokens: int, most_running: int) -> None:
        self.running: list[Request] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._cache = cache
        self.chunk_tokens = chunk_tokens
        self._most_running = min(most_running, chunk_tokens)
        pools = cache.memory.pools
        self._states = sorted({p.follows or p.name for p in pools if p.tail_entries is not None})

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -- in and out -------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Higher priorities first; among equals the older request, also when it was retracted."""
        request.state = State.WAITING
        heapq.heappush(self._waiting, (-request.ask.priority, request.number, request))

    def admit(self) -> None:
        """Take in waiting requests as long as there is room for the first of them.

        When nothing runs and nothing moves, only pins of sessions can be in its way: they go.
        """
        while self._waiting and len(self.running) < self._most_running:
            if self._start(self._waiting[0][2]):
                heapq.heappop(self._waiting)
            elif self.running or self._cache.busy or not self._cache.forget_oldest():
                return

    def retract(self, request: Request) -> None:
        """Take its slots and let it wait again; what it committed stays in the cache."""
        self.remove(request)
        self.queue(request)

    def remove(self, request: Request) -> None:
        """However it ended, it holds nothing any more."""
        if request in self.running:
            self.running.remove(request)
            self._cache.release(request.held)
            request.lease = None
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)

    def _start(self, request: Request) -> bool:
        """Slots for what is found and a promise for the rest; steps take from it as they go.

        Windows and states are kept where a step ends, and where that is only the step knows.
        """
        match = self._cache.match(request.prompt, request.slowest)
        page = self._cache.memory.page_tokens
        growth = -(-request.most_length // page) - match.tokens // page
        lease = self._cache.reserve(match, match.tokens, growth, request.ask.priority)
        if lease is None:
            return False
        self._cache.load(lease)
        request.lease, request.computed = lease, lease.cached_tokens
        if not request.admissions:
            request.by_tier, request.why = dict(lease.by_tier), lease.why
        request.admissions += 1
        request.state = State.RUNNING
        self.running.append(request)
        return True

    # -- a step -----------------------------------------------------------------------------

    def plan(self) -> list[Share]:
        """Requests that generate come first; a request without slots for its share waits again."""
        left = self.chunk_tokens
        shares = []
        for request in sorted(self.running, key=lambda r: (r.length - r.computed > 1, r.number)):
            count = min(request.length - request.computed, left)
            if count == 0:
                continue
            end = request.computed + count
            if not self._cache.grow(request.held, end):
                self.retract(request)
                continue
            end = self._cut(request, end)
            self._cache.shrink(request.held, end)
            left -= end - request.computed
            shares.append(Share(request, end))
        return shares

    def _cut(self, request: Request, end: int) -> int:
        """A running state is written where a step ends: end where a snapshot is wanted.

        What was taken beyond goes back: the next step may end elsewhere, and needs its state there.
        """
        page = self._cache.memory.page_tokens
        for anchor in self._states:
            table = self._cache.page_table(request.held, anchor)
            for number in range(request.computed // page, (end - 1) // page):
                if table[number] >= 0:
                    end = (number + 1) * page
                    break
        return end
