"""What those that are served pay for: the same load with something and without.

With every page copied to the host as it is full, and with none copied; with tokens drawn as
Qwen3's makers advise, and with the likeliest ones.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.gpu.engine_bed import Bed, alternating, first_token_s, forget
from kvtide.bench.gpu.throughput import generating_s
from kvtide.engine import Engine, SamplingParams
from kvtide.engine.sampler import GREEDY
from kvtide.spec import Tier

ADVISED = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the same load, with what is to be paid for and without."""

    what: str
    on_s: float
    off_s: float

    @property
    def share(self) -> float:
        """Speed with it, of that without."""
        return self.off_s / self.on_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def prefills(
    bed: Bed, tokens: int, prompts: int, rounds: int, chunk_tokens: int = 8192
) -> Overhead:
    """Prompts back to back, none of which is known."""
    page = bed.model.memory.page_tokens
    room = (prompts + 1) * (tokens + 4 * page)
    numbers = iter(range(10_000, 1_000_000))

    def prefilled(engine: Engine) -> float:
        forget(engine, Tier.DEVICE, Tier.HOST)
        asked = [bed.prompt(tokens, next(numbers)) for _ in range(prompts)]
        bed.finish()
        start = time.perf_counter()
        for prompt in asked:
            first_token_s(engine, prompt)
        return (time.perf_counter() - start) / prompts

    with (
        bed.engine(room, room, chunk_tokens=chunk_tokens) as on,
        bed.engine(room, 0, chunk_tokens=chunk_tokens) as off,
    ):
        ways = [lambda: prefilled(on), lambda: prefilled(off)]
        alternating(ways, 1)
        found = alternating(ways, rounds)
        forget(on)
        moved = on.cache.stats().moved_pages["backup"]
        assert moved >= (rounds + 1) * prompts * (tokens // page), "not every page was copied"
    return Overhead(f"prompts of {tokens:,} tokens back to back", *found)


def decodes(bed: Bed, batch: int, context: int, steps: int, rounds: int) -> Overhead:
    """Steps in which all generate."""
    page = bed.model.memory.page_tokens
    room = batch * (context + steps + 8 * page)
    with (
        bed.engine(room, room, max_running=batch) as on,
        bed.engine(room, 0, max_running=batch) as off,
    ):

        def generated(engine: Engine) -> float:
            forget(engine, Tier.DEVICE, Tier.HOST)
            return generating_s(bed, engine, batch, context, steps)

        ways = [lambda: generated(on), lambda: generated(off)]
        alternating(ways, 1)
        found = alternating(ways, rounds)
    return Overhead(f"{batch} sequences that generate", *found)


def drawings(bed: Bed, batch: int, context: int, steps: int, rounds: int) -> Overhead:
    """Steps in which all generate, on the device alone."""
    room = batch * (context + steps + 8 * bed.model.memory.page_tokens)
    with bed.engine(room, 0, max_running=batch) as engine:

        def generated(sampling: SamplingParams) -> float:
            forget(engine, Tier.DEVICE)
            return generating_s(bed, engine, batch, context, steps, sampling)

        ways = [lambda: generated(ADVISED), lambda: generated(GREEDY)]
        alternating(ways, 1)
        found = alternating(ways, rounds)
    return Overhead(f"{batch} sequences that generate, tokens drawn", *found)
