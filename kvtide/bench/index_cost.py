"""What the index costs: time per request and operation, memory per token, growth with size.

A run replays one workload over several contestants (see `contestants`) in one process, the order
rotated from repetition to repetition, so that ratios between them are paired. Contestants of other
projects join by import path if they keep the same contract.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvtide.bench.contestants import (
    DeepSeekV4Index,
    DeepSeekV4Learned,
    Drafted,
    Full,
    FullLearned,
    Recurrent,
    Timings,
    Window,
)
from kvtide.bench.progress import ShowProgress
from kvtide.planner.traces import Trace

CONTESTANTS: dict[str, type[Any]] = {
    "full": Full,
    "full-learned": FullLearned,
    "drafted": Drafted,
    "window": Window,
    "recurrent": Recurrent,
    "deepseek-v4": DeepSeekV4Index,
    "deepseek-v4-learned": DeepSeekV4Learned,
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contestant on one workload: medians over repetitions, percentiles within one."""

    contestant: str
    hit_rate: float
    us_per_request: float
    speed: float
    p50_us: dict[str, float]
    p99_us: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Run:
    us_per_request: float
    hit_rate: float
    timings: Timings = field(repr=False)


def contestant(name: str) -> Callable[[int, int], Any]:
    """A built-in contestant, or a class by import path: `package.module:Class`."""
    if name in CONTESTANTS:
        return CONTESTANTS[name]
    if ":" not in name:
        raise ValueError(
            f"no contestant named {name}; use {', '.join(CONTESTANTS)} or package.module:Class"
        )
    module, _, attribute = name.partition(":")
    found: Callable[[int, int], Any] = getattr(importlib.import_module(module), attribute)
    return found


def compare(
    trace: Trace,
    names: Sequence[str],
    capacity_tokens: int,
    page_tokens: int,
    repetitions: int,
    progress: ShowProgress,
) -> list[Measurement]:
    """Replay the trace over every contestant, and put them beside the first one."""
    runs: dict[str, list[_Run]] = {name: [] for name in names}
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in (*names[turn:], *names[:turn]):
            label = f"{trace.name}, {name}, run {repetition + 1}/{repetitions}"
            requests = progress(trace, trace.requests, label)
            made = contestant(name)(capacity_tokens, page_tokens)
            runs[name].append(_replay(made, requests))
    base = [run.us_per_request for run in runs[names[0]]]
    return [_measurement(name, runs[name], base) for name in names]


def _replay(made: Any, requests: Iterable[Any]) -> _Run:
    timings: Timings = defaultdict(list)
    matched = total = count = 0
    gc.collect()
    gc.freeze()
    try:
        for count, request in enumerate(requests, 1):
            tokens = request.prompt.astype(np.int64)
            handle = made.start(made.prepare(count, tokens), timings)
            matched += handle.matched
            total += len(request.prompt)
            made.finish(handle, timings)
    finally:
        gc.unfreeze()
    spent_us = sum(sum(values) for values in timings.values()) / 1e3
    made.close()
    return _Run(spent_us / max(count, 1), matched / max(total, 1), timings)


def _measurement(name: str, runs: Sequence[_Run], base: Sequence[float]) -> Measurement:
    pairs = zip(base, runs, strict=True)
    last = runs[-1].timings
    return Measurement(
        contestant=name,
        hit_rate=runs[-1].hit_rate,
        us_per_request=statistics.median(run.us_per_request for run in runs),
        speed=statistics.median(first / run.us_per_request for first, run in pairs),
        p50_us={op: float(np.percentile(values, 50)) / 1e3 for op, values in last.items()},
        p99_us={op: float(np.percentile(values, 99)) / 1e3 for op, values in last.items()},
    )


def bytes_per_token(trace: Trace, name: str, page_tokens: int, max_requests: int) -> float:
    """Memory of the index, tokens and slots included, per token it has cached."""
    prompts = [request.prompt for request, _ in zip(trace, range(max_requests), strict=False)]
    capacity = sum(len(prompt) + page_tokens for prompt in prompts)
    build = contestant(name)
    needed = _needed(build, prompts, capacity, page_tokens)
    gc.collect()
    tracemalloc.start()
    try:
        made = build(needed, page_tokens)
        for number, prompt in enumerate(prompts):
            timings: Timings = defaultdict(list)
            made.finish(made.start(made.prepare(number, prompt), timings), timings)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        return used / int(made.cached_tokens())
    finally:
        tracemalloc.stop()


def _needed(
    build: Callable[[int, int], Any], prompts: Sequence[Any], capacity: int, page_tokens: int
) -> int:
    """A capacity that just fits what the prompts leave behind: free slots should not count."""
    made = build(capacity, page_tokens)
    for number, prompt in enumerate(prompts):
        timings: Timings = defaultdict(list)
        made.finish(made.start(made.prepare(number, prompt), timings), timings)
    return int(made.cached_tokens() * 1.03) + max(len(prompt) for prompt in prompts)


@dataclass(frozen=True, slots=True)
class Growth:
    """Cost of a request when this many pages are cached: 64-page prompts, half of them known."""

    cached_pages: int
    us_per_request: float
    p50_us: dict[str, float]
    p99_us: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def growth(cached_pages: int, page_tokens: int, requests: int, progress: ShowProgress) -> Growth:
    """Fill an index to the brim, then measure requests that hit, miss and evict in turn."""
    prompt_tokens = 64 * page_tokens
    made = Full(cached_pages * page_tokens, page_tokens)
    generator = np.random.default_rng(0)
    known = cached_pages // 64 - 2

    def prompt(number: int) -> Any:
        return np.random.default_rng(number).integers(0, 1 << 17, prompt_tokens + 1)

    timings: Timings = defaultdict(list)
    for number in progress(range(known), known, f"filling {cached_pages:,} pages"):
        made.finish(made.start(made.prepare(number, prompt(number)), timings), timings)
    timings = defaultdict(list)
    for number in progress(range(requests), requests, f"measuring {cached_pages:,} pages"):
        seen = known - 1 - int(generator.integers(0, known // 2))
        tokens = prompt(seen if number % 2 else known + number)
        made.finish(made.start(made.prepare(number, tokens), timings), timings)
    spent_us = sum(sum(values) for values in timings.values()) / 1e3
    return Growth(
        cached_pages,
        spent_us / requests,
        {op: float(np.percentile(values, 50)) / 1e3 for op, values in timings.items()},
        {op: float(np.percentile(values, 99)) / 1e3 for op, values in timings.items()},
    )
