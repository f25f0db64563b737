"""One anchor in one tier: its slots, its eviction queue and its page counts."""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.index.evict.eviction_queue import EvictionQueue
from kvtide.index.evict.policies import Policy, policy_named
from kvtide.index.evict.reuse_rates import ReuseRates
from kvtide.index.tree.slots import SlotPool
from kvtide.spec import ModelMemory, Tier

BATCH_FRACTION = 256
MAX_BATCH_PAGES = 256


class Cell:
    """One anchor in one tier: its slots, its queue, its page counts.

    anchor_bits  the cells of the same anchor in all tiers
    batch_pages  eviction takes at least so many pages at once and cuts long runs in multiples of
                 it: 1/256 of the slots, so that runs do not crumble and not every request pays
    """

    __slots__ = (
        "anchor",
        "anchor_bits",
        "batch_pages",
        "bit",
        "evicted_pages",
        "pinned_pages",
        "policy",
        "queue",
        "reach",
        "resident_pages",
        "slots",
        "tier",
    )

    def __init__(
        self, number: int, tier: Tier, anchor: int, reach: int | None, slots: int, policy: Policy
    ) -> None:
        self.tier = tier
        self.anchor = anchor
        self.bit = 1 << number
        self.anchor_bits = 0
        self.reach = reach
        self.slots = SlotPool(slots)
        self.batch_pages = max(1, min(slots // BATCH_FRACTION, MAX_BATCH_PAGES))
        self.policy = policy
        self.queue = EvictionQueue(number, reach, self.policy)
        self.resident_pages = 0
        self.pinned_pages = 0
        self.evicted_pages = 0


def cells_of(
    memory: ModelMemory,
    capacity_pages: Mapping[Tier, Mapping[str, int]],
    eviction: str,
    rates: ReuseRates,
) -> list[Cell]:
    """All cells, tier by tier: cell number = tier · anchors + anchor."""
    cells = [
        Cell(
            tier * len(memory.anchors) + number,
            tier,
            number,
            pool.reuse.reach_pages(memory.page_tokens),
            capacity_pages.get(tier, {}).get(pool.name, 0),
            policy_named(eviction, rates),
        )
        for tier in Tier
        for number, pool in enumerate(memory.anchors)
    ]
    for cell in cells:
        cell.anchor_bits = sum(other.bit for other in cells if other.anchor == cell.anchor)
    return cells
