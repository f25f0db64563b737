"""The price of a feature: the same load with it and without it.

Write-through backup of every full page against no host tier; sampling with the parameters that
Qwen3's model card recommends against greedy decoding.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.gpu.engine_bed import Bed, alternating, flush, ttft_s
from kvtide.bench.gpu.throughput import decode_step_s
from kvtide.engine import Engine, SamplingParams
from kvtide.engine.sampling.sampling_params import GREEDY
from kvtide.spec import Tier

QWEN3_SAMPLING = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """Seconds of the same load with the feature (`on_s`) and without it (`off_s`)."""

    what: str
    on_s: float
    off_s: float

    @property
    def relative_speed(self) -> float:
        """Speed with the feature, as a fraction of the speed without."""
        return self.off_s / self.on_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "relative_speed": self.relative_speed}


def write_through_prefill(
    bed: Bed, tokens: int, prompts: int, rounds: int, chunk_tokens: int = 8192
) -> OverheadResult:
    """Uncached prompts back to back, with write-through and without a host tier."""
    page = bed.model.memory.page_tokens
    capacity = (prompts + 1) * (tokens + 4 * page)
    numbers = iter(range(10_000, 1_000_000))

    def prefill_s(engine: Engine) -> float:
        flush(engine, Tier.DEVICE, Tier.HOST)
        prompts_now = [bed.prompt(tokens, next(numbers)) for _ in range(prompts)]
        bed.synchronize()
        start = time.perf_counter()
        for prompt in prompts_now:
            ttft_s(engine, prompt)
        return (time.perf_counter() - start) / prompts

    with (
        bed.engine(capacity, capacity, chunk_tokens=chunk_tokens) as on,
        bed.engine(capacity, 0, chunk_tokens=chunk_tokens) as off,
    ):
        variants = [lambda: prefill_s(on), lambda: prefill_s(off)]
        alternating(variants, 1)
        found = alternating(variants, rounds)
        flush(on)
        moved = on.cache.stats().moved_pages["backup"]
        assert moved >= (rounds + 1) * prompts * (tokens // page), "some pages were not backed up"
    return OverheadResult(f"prefill of {tokens:,} tokens back to back, write-through", *found)


def decode_with_backup(
    bed: Bed, batch: int, context: int, steps: int, rounds: int
) -> OverheadResult:
    """Decode steps with write-through and without a host tier."""
    page = bed.model.memory.page_tokens
    capacity = batch * (context + steps + 8 * page)
    with (
        bed.engine(capacity, capacity, max_running=batch) as on,
        bed.engine(capacity, 0, max_running=batch) as off,
    ):

        def decoded(engine: Engine) -> float:
            flush(engine, Tier.DEVICE, Tier.HOST)
            return decode_step_s(bed, engine, batch, context, steps)

        variants = [lambda: decoded(on), lambda: decoded(off)]
        alternating(variants, 1)
        found = alternating(variants, rounds)
    return OverheadResult(f"decode, batch {batch}, write-through", *found)


def sampling(bed: Bed, batch: int, context: int, steps: int, rounds: int) -> OverheadResult:
    """Decode steps with sampling and with greedy tokens, on the device alone."""
    capacity = batch * (context + steps + 8 * bed.model.memory.page_tokens)
    with bed.engine(capacity, 0, max_running=batch) as engine:

        def decoded(params: SamplingParams) -> float:
            flush(engine, Tier.DEVICE)
            return decode_step_s(bed, engine, batch, context, steps, params)

        variants = [lambda: decoded(QWEN3_SAMPLING), lambda: decoded(GREEDY)]
        alternating(variants, 1)
        found = alternating(variants, rounds)
    return OverheadResult(f"decode, batch {batch}, sampling", *found)
