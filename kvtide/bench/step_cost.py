"""The cost of a step besides the model: scheduling, page tables, sampling, the radix tree.

The model here computes nothing, so that a step takes the engine's own time alone. A batch of
requests decodes after long prompts, and the cache writes through to the host.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvtide.cache import CacheConfig, Ratio, TieredCache, Tokens
from kvtide.engine import Engine, RequestParams
from kvtide.layers import Step
from kvtide.models.draft import CapturedStates
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Reuse

LAYERS = 32
PAGE = 64
VOCABULARY = 1000
GOAL_MS = 1.0
CHUNK = 8192

_KV = Entry((Field("kv", (8,), DType.BF16),))
MEMORIES = {
    "full": (PoolSpec("kv", (0,), _KV),),
    "window": (PoolSpec("kv", (0,), _KV), PoolSpec("swa", (1,), _KV, reuse=Reuse(1023))),
    "recurrent": (
        PoolSpec("kv", (0,), _KV),
        PoolSpec("state", (1,), _KV, tail_entries=1, reuse=Reuse(1, stride=PAGE)),
    ),
}
"""Entries are small: the radix tree costs the same per page, whatever its bytes."""


class Idle:
    """A model that computes nothing and returns constant logits. Every pool has one layer."""

    vocabulary = VOCABULARY
    max_positions = 1 << 20
    uses_kernels = False

    def __init__(self, memory: ModelMemory) -> None:
        self.memory = memory
        self._logits = torch.nn.functional.one_hot(torch.tensor(7), VOCABULARY).float()

    def forward(
        self, step: Step, before: torch.Tensor | None = None, captured: CapturedStates | None = None
    ) -> torch.Tensor:
        for layer in range(self.memory.layers):
            step.wait(layer)
        for pool in self.memory.pools:
            step.view(pool.name, pool.layers[0])
        return torch.zeros(len(step.tokens), 1)

    def carried(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(len(hidden), VOCABULARY)


@dataclass(frozen=True, slots=True)
class StepCost:
    memory: str
    batch: int
    p50_ms: float
    p99_ms: float

    @property
    def reached(self) -> bool:
        return self.p50_ms < GOAL_MS

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(name: str, batch: int, prompt_tokens: int, steps: int) -> StepCost:
    """Milliseconds per step in which every request of the batch decodes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The tensors are tiny; more threads would only wait for each other.
    try:
        times = sorted(_times(name, batch, prompt_tokens, steps))
    finally:
        torch.set_num_threads(threads)
    return StepCost(name, batch, statistics.median(times), times[int(0.99 * (steps - 1))])


def idle_cache(name: str, max_tokens: int) -> tuple[TieredCache, ModelMemory]:
    """A cache for `Idle` models whose device holds so many tokens."""
    memory = ModelMemory(name, PAGE, MEMORIES[name], layers=LAYERS)
    config = CacheConfig(Tokens(max_tokens), host_size=Ratio(2.0), tokens_per_checkpoint=1024)
    return TieredCache(memory, config), memory


def _times(name: str, batch: int, prompt_tokens: int, steps: int) -> list[float]:
    spare = 2 * batch * prompt_tokens // CHUNK + PAGE
    cache, memory = idle_cache(name, 8 * batch * max(prompt_tokens + steps + spare, 4096))
    engine = Engine(Idle(memory), cache, chunk_tokens=CHUNK, max_running=batch)
    for number in range(batch):
        prompt = [(number * 7919 + at * 31) % VOCABULARY for at in range(prompt_tokens)]
        engine.submit(RequestParams(tuple(prompt), steps + spare))
    running = engine.scheduler.running
    while engine.scheduler.waiting or any(not request.output for request in running):
        engine.step()  # The first requests decode while the last still prefill.
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        updates = engine.step()
        times.append((time.perf_counter() - start) * 1e3)
        assert len(updates) == batch
    cache.close()
    return times
