"""The eviction policies by name."""

from __future__ import annotations

from kvtide.index.evict.policies import Fifo, Filo, Lfu, Lru, Mru, Policy, Priority, Slru
from kvtide.index.evict.tide import Tide

DEFAULT_POLICY = "tide"

POLICIES: dict[str, type[Policy]] = {
    "tide": Tide,
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "mru": Mru,
    "filo": Filo,
    "priority": Priority,
}


def policy(name: str, cell: int, reach: int | None, slots: int) -> Policy:
    """A policy for one cell.

    Tide weighs runs of history. Windows and states, which are in or out of reach before anything
    else, go by LRU under it.
    """
    if name not in POLICIES:
        raise ValueError(f"no eviction policy named {name}; use {', '.join(POLICIES)}")
    if name == "tide":
        return Tide(cell, slots) if reach is None else Lru()
    return POLICIES[name]()
