"""Engines over one model, opened for one benchmark each, and the timing of their requests."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvtide.cache import CacheConfig, FetchPatience, Layout, TieredCache, Tokens
from kvtide.engine import Engine, Request, RequestParams
from kvtide.engine.speculation.drafter import Drafter
from kvtide.models import Model
from kvtide.models.tokenizer import Tokenizer
from kvtide.spec import Tier

DRAIN_S = 120.0
IDLE_S = 0.0002
TOKENS_PER_CHECKPOINT = 1024
"""Closer than a server's default, because a benchmark runs few conversations."""


class Drafts(NamedTuple):
    """What an engine speculates with, by the names of its parameters."""

    drafter: Callable[[TieredCache], Drafter]
    draft_tokens: int
    fixed_drafts: bool


@dataclass(frozen=True, slots=True)
class Bed:
    """Opens engines of one model, which share its weights and differ in their tier sizes.

    tokenizer  the vocabulary of benchmarks of text; None for the default model's
    """

    model: Model
    device: torch.device
    tokenizer: Tokenizer | None = None

    @contextmanager
    def engine(
        self,
        device_tokens: int,
        host_tokens: int = 0,
        *,
        chunk_tokens: int = 8192,
        max_running: int = 64,
        write_policy: str = "write_through",
        tokens_per_checkpoint: int = TOKENS_PER_CHECKPOINT,
        drafts: Drafts | None = None,
        longest_tokens: int | None = None,
        host_layout: Layout = Layout.PAGE_FIRST_DIRECT,
        tokenizer: Tokenizer | None = None,
    ) -> Iterator[Engine]:
        config = CacheConfig(
            Tokens(device_tokens),
            host_size=Tokens(host_tokens) if host_tokens else None,
            device=str(self.device),
            write_policy=write_policy,
            tokens_per_checkpoint=tokens_per_checkpoint,
            patience=FetchPatience("wait_complete"),
            hot_rows=max_running,
            longest_tokens=longest_tokens,
            host_layout=host_layout,
        )
        cache = TieredCache(self.model.memory, config)
        try:
            sizes: dict[str, Any] = {"chunk_tokens": chunk_tokens, "max_running": max_running}
            if drafts is not None:
                sizes |= drafts._asdict() | {"drafter": drafts.drafter(cache)}
            yield Engine(self.model, cache, tokenizer, **sizes)
        finally:
            cache.close()
            gc.collect()  # CUDA graphs hold device memory.
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def prompt(self, tokens: int, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).choices(range(self.model.vocabulary), k=tokens))

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def ttft_s(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, Request]:
    """Seconds from submission to the first token, and the request."""
    start = time.perf_counter()
    request = engine.submit(RequestParams(prompt, 1))
    while request.finish is None:
        engine.step()
        if not engine.computed:
            time.sleep(IDLE_S)  # Leaves the interpreter to the threads that load the prefix.
    return time.perf_counter() - start, request


def start(engine: Engine, requests: Iterable[RequestParams]) -> list[Request]:
    """Submit them, and step until all decode."""
    submitted = [engine.submit(params) for params in requests]
    while any(len(request.output) < 2 for request in submitted):
        engine.step()
    running = len(engine.scheduler.running)
    assert running == len(submitted), f"{running} of {len(submitted)} requests run at once"
    return submitted


def step_s(bed: Bed, engine: Engine, steps: int) -> float:
    """Seconds of a step in which all running requests decode; a mean."""
    batch = len(engine.scheduler.running)
    bed.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        assert len(engine.step()) >= batch, "every request has a token"
    bed.synchronize()
    return (time.perf_counter() - begun) / steps


def stop(engine: Engine) -> None:
    """Abort all running requests."""
    for request in list(engine.scheduler.running):
        engine.abort(request)


def flush(engine: Engine, *tiers: Tier) -> None:
    """Wait until all transfers land, then empty these tiers."""
    assert engine.cache.drain(DRAIN_S), "transfers do not end"
    for tier in tiers:
        engine.cache.flush(tier)


def median_s(function: Callable[[], float], times: int) -> float:
    return statistics.median(function() for _ in range(times))


def alternating(variants: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of each variant; rounds run the variants in alternating order."""
    found: list[list[float]] = [[] for _ in variants]
    for number in range(rounds):
        order = range(len(variants)) if number % 2 == 0 else reversed(range(len(variants)))
        for index in order:
            found[index].append(variants[index]())
    return [statistics.median(values) for values in found]
