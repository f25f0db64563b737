"""Time to first token (TTFT), by the tier that holds the prompt's prefix, or none.

Every round submits a new prompt, and then the same prompt with its prefix on the device, on the
host and in storage. The bound of a host hit is the larger of two times: its bytes at the speed of a
plain copy, and this engine's TTFT with the prefix on the device.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.gpu.ceilings import Ceilings
from kvtide.bench.gpu.engine_bed import Bed, flush, ttft_s
from kvtide.engine import Engine
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.transfer.strided import Way

TIMES = 3
"""Repetitions of device and host hits in a round; both are short."""


@dataclass(frozen=True, slots=True)
class TtftResult:
    """TTFT in seconds, by the tier of the prefix; `moved_bytes`: loaded from the host."""

    model: str
    tokens: int
    recompute_s: float
    storage_s: float
    host_s: float
    device_s: float
    host_tokens: int
    moved_bytes: int
    link_s: float

    @property
    def bound_s(self) -> float:
        """The lower bound of a host hit."""
        return max(self.link_s, self.device_s)

    @property
    def of_bound(self) -> float:
        return self.host_s / self.bound_s

    @property
    def times_faster(self) -> float:
        return self.recompute_s / self.host_s

    def as_json(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("bound_s", "of_bound", "times_faster")}
        return {**asdict(self), **derived}


def measure(
    bed: Bed, name: str, tokens: int, ceilings: Ceilings, rounds: int, chunk_tokens: int = 8192
) -> TtftResult:
    capacity = tokens + 4 * bed.model.memory.page_tokens
    times: dict[str, list[float]] = {where: [] for where in ("none", "device", "host", "storage")}
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder,
        bed.engine(2 * capacity, 2 * capacity, chunk_tokens=chunk_tokens) as engine,
    ):
        engine.cache.storage.attach(open_store(f"file://{folder}", engine.cache.storage.space))
        for number in range(rounds + 1):
            moved = _round(bed, engine, bed.prompt(tokens, number), times)
        # The first round is not counted.
        counted = {where: each[len(each) // (rounds + 1) :] for where, each in times.items()}
        found = {where: statistics.median(each) for where, each in counted.items()}
    moved_bytes, host_tokens = moved
    link_s = moved_bytes / ceilings.link_bytes_s
    return TtftResult(
        name,
        tokens,
        recompute_s=found["none"],
        storage_s=found["storage"],
        host_s=found["host"],
        device_s=found["device"],
        host_tokens=host_tokens,
        moved_bytes=moved_bytes,
        link_s=link_s,
    )


def _round(
    bed: Bed, engine: Engine, prompt: tuple[int, ...], times: dict[str, list[float]]
) -> tuple[int, int]:
    """One prompt from every tier; the bytes and tokens that a host hit loads."""
    cache = engine.cache
    bed.synchronize()
    times["none"].append(ttft_s(engine, prompt)[0])
    flush(engine)
    # The first repetition is not counted: a second hit may move checkpoints.
    hits = [*[((), "device")] * TIMES, *[((Tier.DEVICE,), "host")] * TIMES]
    for tiers, where in (((), None), *hits):
        flush(engine, *tiers)
        before = cache.stats().moved_bytes[Way.LOAD.name.lower()]
        seconds, request = ttft_s(engine, prompt)
        if where is not None:
            times[where].append(seconds)
        assert where != "device" or not request.by_tier.get(Tier.HOST), request.by_tier
    cache.drain(60.0)
    moved = cache.stats().moved_bytes[Way.LOAD.name.lower()] - before
    host_tokens = request.by_tier[Tier.HOST]
    flush(engine, Tier.DEVICE, Tier.HOST)
    seconds, request = ttft_s(engine, prompt)
    assert sum(request.by_tier.values()) >= host_tokens, (request.by_tier, request.why)
    times["storage"].append(seconds)
    flush(engine, Tier.DEVICE, Tier.HOST)
    return moved, host_tokens
