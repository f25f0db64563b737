"""The time to a first token, by where the prompt's prefix lies: nowhere, or on one of the tiers.

Every round asks for a prompt that nobody knows, and then for the same again from the device, from
the host and from storage. The bound is the bytes at the speed of a plain copy, or the time that
this engine takes when the prefix is on the device, whichever is longer.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from kvtide.bench.gpu.ceilings import Ceilings
from kvtide.bench.gpu.engine_bed import Bed, first_token_s, forget
from kvtide.engine import Engine
from kvtide.spec import Tier
from kvtide.storage import open_store
from kvtide.transfer.strided import Way

TIMES = 3
"""How often a prompt is asked for from the device and from the host, which takes little time."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Seconds to the first token, by where the prefix was; what came from the host, in bytes."""

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
        """From the host: the bytes, or the rest that is computed."""
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
) -> Restored:
    room = tokens + 4 * bed.model.memory.page_tokens
    times: dict[str, list[float]] = {where: [] for where in ("none", "device", "host", "storage")}
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder,
        bed.engine(2 * room, 2 * room, chunk_tokens=chunk_tokens) as engine,
    ):
        engine.cache.storage.attach(open_store(f"file://{folder}", engine.cache.storage.space))
        for number in range(rounds + 1):
            moved = _round(bed, engine, bed.prompt(tokens, number), times)
        # The first round is not counted.
        counted = {where: each[len(each) // (rounds + 1) :] for where, each in times.items()}
        found = {where: statistics.median(each) for where, each in counted.items()}
    moved_bytes, host_tokens = moved
    link_s = moved_bytes / ceilings.link_bytes_s
    return Restored(
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
    """One prompt from everywhere; how many bytes and tokens came from the host."""
    cache = engine.cache
    bed.finish()
    times["none"].append(first_token_s(engine, prompt)[0])
    forget(engine)
    # Once more before it counts: what is asked for a second time may be kept in other places.
    places = [*[((), "device")] * TIMES, *[((Tier.DEVICE,), "host")] * TIMES]
    for tiers, where in (((), None), *places):
        forget(engine, *tiers)
        before = cache.stats().moved_bytes[Way.LOAD.name.lower()]
        seconds, request = first_token_s(engine, prompt)
        if where is not None:
            times[where].append(seconds)
        assert where != "device" or not request.by_tier.get(Tier.HOST), request.by_tier
    cache.drain(60.0)
    moved = cache.stats().moved_bytes[Way.LOAD.name.lower()] - before
    host_tokens = request.by_tier[Tier.HOST]
    forget(engine, Tier.DEVICE, Tier.HOST)
    seconds, request = first_token_s(engine, prompt)
    assert sum(request.by_tier.values()) >= host_tokens, (request.by_tier, request.why)
    times["storage"].append(seconds)
    forget(engine, Tier.DEVICE, Tier.HOST)
    return moved, host_tokens
