"""Which slots carry their optional sidecars: a draft's KV may be absent, never stale.

A sidecar lies at its anchor's slot, so its presence is one bit per slot. The bit is set or cleared
when the slot's pages are committed, and travels with every copy between tiers. A sidecar that is
computed, or found in another tier, after its page was kept without it is added to the same slot.
While it is on its way there, a second bit keeps others from bringing it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.index.tree.node import Node
from kvtide.spec import ModelMemory, PageMove, Slots, Tier

Bits = npt.NDArray[np.bool_]


class SidecarSlots(NamedTuple):
    """One optional sidecar in these slots."""

    tier: Tier
    anchor: str
    sidecar: str
    slots: Slots

    @classmethod
    def of(cls, moves: Iterable[PageMove]) -> Iterator[SidecarSlots]:
        """Where these moves bring sidecars to pages that lack them."""
        for move in moves:
            if move.sidecar is not None:
                yield cls(move.target, move.anchor, move.sidecar, move.target_slots)


class Presence:
    """A bit per slot, tier and optional sidecar.

    needed   the memory has such sidecars at all
    uneven   a node was noted whose copies may differ in them (`Node.ahead`)
    version  changes when pages that may be in use get sidecars
    """

    def __init__(
        self, memory: ModelMemory, capacity_pages: Mapping[Tier, Mapping[str, int]]
    ) -> None:
        self._bits: dict[str, dict[str, list[Bits]]] = {}  # By anchor, sidecar, tier.
        self._coming: dict[str, dict[str, list[Bits]]] = {}
        for anchor in (pool.name for pool in memory.anchors):
            slots = [capacity_pages.get(tier, {}).get(anchor, 0) for tier in Tier]
            for bits in (self._bits, self._coming):
                bits[anchor] = {
                    name: [np.zeros(count, bool) for count in slots]
                    for name in memory.optional_sidecars(anchor)
                }
        self.version = 0
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
            there = bits[target][targets] | self._coming[anchor][name][target][targets]
            lacking = bits[source][sources] & ~there
            if lacking.any():
                some = (sources[lacking], targets[lacking])
                moves.append(PageMove(anchor, source, target, *some, sidecar=name))
        return moves

    def expect(self, coming: Iterable[SidecarSlots]) -> None:
        """These sidecars are on their way."""
        for tier, anchor, sidecar, slots in coming:
            self._coming[anchor][sidecar][tier][slots] = True

    def forgo(self, coming: Iterable[SidecarSlots]) -> None:
        """They do not come."""
        for tier, anchor, sidecar, slots in coming:
            self._coming[anchor][sidecar][tier][slots] = False

    def add(self, came: Iterable[SidecarSlots]) -> None:
        """These sidecars are there."""
        for tier, anchor, sidecar, slots in came:
            self._bits[anchor][sidecar][tier][slots] = True
            self._coming[anchor][sidecar][tier][slots] = False
            self.version += 1

    def absent(self, tier: Tier, anchor: str, slot: int) -> tuple[str, ...]:
        """The optional sidecars that a slot does not carry."""
        return tuple(name for name, bits in self._bits[anchor].items() if not bits[tier][slot])

    def of(self, where: SidecarSlots) -> Bits:
        """Which of the slots carry the sidecar."""
        return self._bits[where.anchor][where.sidecar][where.tier][where.slots]

    def coming(self, where: SidecarSlots) -> Bits:
        """To which of the slots it is on its way."""
        return self._coming[where.anchor][where.sidecar][where.tier][where.slots]

    def expected(self) -> Iterator[SidecarSlots]:
        """All that is on its way."""
        for anchor, sidecars in self._coming.items():
            for sidecar, bits in sidecars.items():
                for tier in Tier:
                    if (slots := np.flatnonzero(bits[tier])).size:
                        yield SidecarSlots(tier, anchor, sidecar, slots.astype(np.int32))
