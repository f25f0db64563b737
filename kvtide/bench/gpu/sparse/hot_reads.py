"""What engines read of hot pools: entries that were on the device, and entries from the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvtide.engine import Engine
from kvtide.tiers import HotBuffers


@dataclass(frozen=True, slots=True)
class HotReads:
    """What queries selected of hot pools: found in hot rows, or read from the host.

    hit_rate        of what was selected; None if that is nothing
    layer_misses    entries that a layer swapped in
    missing_bytes   of those, in all layers
    gathered_bytes  of entries that prefill chunks read
    """

    hit_rate: float | None = None
    layer_misses: float = 0.0
    missing_bytes: float = 0.0
    gathered_bytes: float = 0.0


class HotReading:
    """Counts from its beginning on; nothing where all pages are resident."""

    def __init__(self, engine: Engine) -> None:
        self._hot = list(engine.cache.hardware.hot.values())
        self._before = self._counts()

    def per(self, times: int) -> HotReads:
        """The mean of so many times."""
        counts = [now - then for now, then in zip(self._counts(), self._before, strict=True)]
        if not counts:
            return HotReads()
        hits, misses, gathered = torch.cat(counts).sum(0).tolist()
        selected = hits + misses + gathered
        layers = sum(len(each.pool.layers) for each in self._hot)
        _, missing_bytes, gathered_bytes = (
            sum(float(each[:, n].sum()) * hot.pool.entry.bytes for each, hot in self._pairs(counts))
            for n in range(3)
        )
        return HotReads(
            hits / selected if selected else None,
            misses / layers / times,
            missing_bytes / times,
            gathered_bytes / times,
        )

    def _pairs(self, counts: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, HotBuffers]]:
        return zip(counts, self._hot, strict=True)

    def _counts(self) -> list[torch.Tensor]:
        return [hot.counts.clone().cpu() for hot in self._hot]
