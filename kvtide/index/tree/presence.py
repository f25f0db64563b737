"""Which slots carry their optional sidecars: a draft's KV may be absent, never stale.

A sidecar lies at its anchor's slot, so its presence is one bit per slot. The bit is set or cleared
when the slot's pages are committed, and travels with every copy between tiers. A sidecar that is
computed, or found on the device, after its page was kept without it is added to the same slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtide.index.tree.node import Node
from kvtide.spec import ModelMemory, PageMove, Slots, Tier

Bits = npt.NDArray[np.bool_]


class Presence:
    """A bit per slot, tier and optional sidecar.

    needed  the memory has such sidecars at all
    uneven  a node was noted whose copies may differ in them (`Node.ahead`)
    """

    def __init__(
        self, memory: ModelMemory, capacity_pages: Mapping[Tier, Mapping[str, int]]
    ) -> None:
        self._bits: dict[str, dict[str, list[Bits]]] = {}  # By anchor, sidecar, tier.
        for anchor in (pool.name for pool in memory.anchors):
            slots = [capacity_pages.get(tier, {}).get(anchor, 0) for tier in Tier]
            self._bits[anchor] = {
                name: [np.zeros(count, bool) for count in slots]
                for name in memory.optional_sidecars(anchor)
            }
        self.needed = any(self._bits.values())
        self.uneven = False

    def note_ahead(self, node: Node) -> None:
        """The device may carry sidecars of this node that the host's copy lacks."""
        node.ahead = self.uneven = True

    def mark(self, tier: Tier, anchor: str, slots: Slots, without: Collection[str] = ()) -> None:
        """These slots carry all optional sidecars of the anchor but those named."""
        for name, bits in self._bits[anchor].items():
            bits[tier][slots] = name not in without

    def copy(self, anchor: str, source: Tier, sources: Slots, target: Tier, targets: Slots) -> None:
        """What a copied slot carried, its copy carries."""
        for bits in self._bits[anchor].values():
            bits[target][targets] = bits[source][sources]

    def additions(
        self, anchor: str, source: Tier, sources: Slots, target: Tier, targets: Slots
    ) -> list[PageMove]:
        """The moves that bring sidecars to slots without them, from slots of the same pages."""
        moves = []
        for name, bits in self._bits[anchor].items():
            lacking = bits[source][sources] & ~bits[target][targets]
            if lacking.any():
                some = (sources[lacking], targets[lacking])
                moves.append(PageMove(anchor, source, target, *some, sidecar=name))
        return moves

    def add(self, moves: Iterable[PageMove]) -> None:
        """The sidecars that these moves brought are there."""
        for move in moves:
            if move.sidecar is not None:
                self._bits[move.anchor][move.sidecar][move.target][move.target_slots] = True

    def absent(self, tier: Tier, anchor: str, slot: int) -> tuple[str, ...]:
        """The optional sidecars that a slot does not carry."""
        return tuple(name for name, bits in self._bits[anchor].items() if not bits[tier][slot])

    def of(self, tier: Tier, anchor: str, sidecar: str, slots: Slots) -> Bits:
        return self._bits[anchor][sidecar][tier][slots]
