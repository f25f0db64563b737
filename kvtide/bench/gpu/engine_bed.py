"""An engine over a model, opened for a while, and how long what it does takes."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvtide.cache import CacheConfig, FetchPatience, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.models import Model
from kvtide.spec import Tier

DRAIN_S = 120.0
IDLE_S = 0.0002
TOKENS_PER_CHECKPOINT = 1024
"""Few conversations have the tiers to themselves: each has more windows than in a server's."""


@dataclass(frozen=True, slots=True)
class Bed:
    """Where engines of one model are opened. They differ in their memory, not in their weights."""

    model: Model
    device: torch.device

    @contextmanager
    def engine(
        self,
        device_tokens: int,
        host_tokens: int = 0,
        *,
        chunk_tokens: int = 8192,
        max_running: int = 64,
        write_policy: str = "write_through",
    ) -> Iterator[Engine]:
        config = CacheConfig(
            Tokens(device_tokens),
            host_size=Tokens(host_tokens) if host_tokens else None,
            device=str(self.device),
            write_policy=write_policy,
            tokens_per_checkpoint=TOKENS_PER_CHECKPOINT,
            patience=FetchPatience("wait_complete"),
        )
        cache = TieredCache(self.model.memory, config)
        try:
            yield Engine(self.model, cache, chunk_tokens=chunk_tokens, max_running=max_running)
        finally:
            cache.close()
            gc.collect()  # Recordings hold memory of the device.
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def prompt(self, tokens: int, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).choices(range(self.model.vocabulary), k=tokens))

    def finish(self) -> None:
        """Wait until the device does nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def first_token_s(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, Request]:
    """Seconds from asking to the first token, and what was asked."""
    start = time.perf_counter()
    request = engine.submit(RequestParams(prompt, 1))
    while request.finish is None:
        engine.step()
        if not engine.computed:
            time.sleep(IDLE_S)  # Threads that bring its prefix want the interpreter.
    return time.perf_counter() - start, request


def forget(engine: Engine, *tiers: Tier) -> None:
    """Let all copies land, then empty these tiers."""
    assert engine.cache.drain(DRAIN_S), "copies do not end"
    for tier in tiers:
        engine.cache.flush(tier)


def median_s(function: Callable[[], float], times: int) -> float:
    return statistics.median(function() for _ in range(times))


def alternating(ways: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of each way, in turns whose order is reversed every time."""
    found: list[list[float]] = [[] for _ in ways]
    for number in range(rounds):
        order = range(len(ways)) if number % 2 == 0 else reversed(range(len(ways)))
        for way in order:
            found[way].append(ways[way]())
    return [statistics.median(values) for values in found]
