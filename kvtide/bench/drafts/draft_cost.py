"""What a draft's pages cost in the index and in the cache, per committed page.

A batch of leases grows page by page, and the cache writes through to the host: grow, commit, poll.
With and without a draft, alternately in one process, so that the ratio is paired. Times are CPU
time of the calling thread: the bytes are copied on others, and are few here.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.progress import ShowProgress
from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, with_draft

PAGE = 16
GOAL = 1.15

_KV = Entry((Field("kv", (8,), DType.BF16),))
_PLAIN = ModelMemory("target", PAGE, (PoolSpec("kv", (0,), _KV),), layers=1)
_DRAFTED = with_draft(_PLAIN, ModelMemory("draft", PAGE, (PoolSpec("kv", (0,), _KV),), layers=1))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Microseconds per committed page, medians over the turns; `ratio` is of paired turns."""

    plain_us: float
    drafted_us: float
    ratio: float

    @property
    def reached(self) -> bool:
        return self.ratio <= GOAL

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(batch: int, pages: int, turns: int, progress: ShowProgress) -> DraftCost:
    """So many leases, each growing by so many pages."""
    found = [
        (_page_us(_PLAIN, batch, pages), _page_us(_DRAFTED, batch, pages))
        for _ in progress(range(turns), turns, "with and without a draft")
    ]
    plain, drafted = (statistics.median(column) for column in zip(*found, strict=True))
    return DraftCost(plain, drafted, statistics.median(b / a for a, b in found))


def _page_us(memory: ModelMemory, batch: int, pages: int) -> float:
    size = Tokens(2 * batch * (pages + 2) * PAGE)
    cache = TieredCache(memory, CacheConfig(size, host_size=Ratio(2.0)))
    leases = []
    for number in range(batch):
        prompt = cache.prompt(range(number << 16, (number << 16) + memory.holdback))
        lease = cache.reserve(cache.match(prompt))
        assert lease is not None, "the capacity holds the whole batch"
        leases.append(lease)
    gc.collect()
    gc.freeze()
    begun = time.thread_time_ns()
    for page in range(pages):
        for number, lease in enumerate(leases):
            start = (number << 16) + page * PAGE + memory.holdback
            lease.append(list(range(start, start + PAGE)))
            assert cache.grow(lease, lease.prompt.tokens)
        for lease in leases:
            cache.commit(lease, lease.prompt.tokens)
        cache.poll()
    spent = time.thread_time_ns() - begun
    gc.unfreeze()
    for lease in leases:
        assert lease.committed_pages == pages
        cache.release(lease)
    cache.close()
    return spent / 1e3 / (batch * pages)
