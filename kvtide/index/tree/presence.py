"""Which slots carry their optional sidecars: a draft's KV may be absent, never stale.

A sidecar lies at its anchor's slot, so its presence is one bit per slot. The bit is set or cleared
when the slot's pages are committed, and travels with every copy between tiers. A sidecar that is
computed, or found on the device, after its page was kept without it is added to the same slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtide.spec import ModelMemory, PageMove, Slots, Tier


class Presence:
    """A bit per slot, tier and optional sidecar. `needed`: the memory has such sidecars at all."""

    def __init__(
        self, memory: ModelMemory, capacity_pages: Mapping[Tier, Mapping[str, int]]
    ) -> None:
        self._bits: dict[tuple[Tier, str], dict[str, npt.NDArray[np.bool_]]] = {}
        for anchor in memory.anchors:
            optional = memory.optional_sidecars(anchor.name)
            for tier in Tier if optional else ():
                slots = capacity_pages.get(tier, {}).get(anchor.name, 0)
                self._bits[tier, anchor.name] = {name: np.zeros(slots, bool) for name in optional}
        self.needed = bool(self._bits)

    def mark(self, tier: Tier, anchor: str, slots: Slots, without: Collection[str] = ()) -> None:
        """These slots carry all optional sidecars of the anchor but those named."""
        for name, bits in self._bits.get((tier, anchor), {}).items():
            bits[slots] = name not in without

    def copy(self, anchor: str, source: Tier, sources: Slots, target: Tier, targets: Slots) -> None:
        """What a copied slot carried, its copy carries."""
        for name, bits in self._bits.get((source, anchor), {}).items():
            self._bits[target, anchor][name][targets] = bits[sources]

    def additions(
        self, anchor: str, source: Tier, sources: Slots, target: Tier, targets: Slots
    ) -> list[PageMove]:
        """The moves that bring sidecars to slots without them, from slots of the same pages."""
        moves = []
        for name, bits in self._bits.get((source, anchor), {}).items():
            lacking = bits[sources] & ~self._bits[target, anchor][name][targets]
            if lacking.any():
                some = (sources[lacking], targets[lacking])
                moves.append(PageMove(anchor, source, target, *some, sidecar=name))
        return moves

    def add(self, moves: Iterable[PageMove]) -> None:
        """The sidecars that these moves brought are there."""
        for move in moves:
            if move.sidecar is not None:
                self._bits[move.target, move.anchor][move.sidecar][move.target_slots] = True

    def absent(self, tier: Tier, anchor: str, slot: int) -> tuple[str, ...]:
        """The optional sidecars that a slot does not carry."""
        found = self._bits.get((tier, anchor), {})
        return tuple(name for name, bits in found.items() if not bits[slot])

    def of(self, tier: Tier, anchor: str, sidecar: str, slots: Slots) -> npt.NDArray[np.bool_]:
        return self._bits[tier, anchor][sidecar][slots]
