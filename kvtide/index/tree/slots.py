"""The slots of one anchor in one tier: which are free, and how many of those are promised.

reserve → take → forfeit: a reservation promises a number of slots without naming them, taking
turns part of the promise into slot numbers, forfeiting gives the rest of the promise back. So
several pools can be promised first, all or none, and nothing has to be undone half-way.
"""

from __future__ import annotations

import numpy as np

from kvtide.spec import Slots


class SlotPool:
    """A stack of free slot numbers, and how many of them are promised.

    available  free slots that are not promised
    """

    __slots__ = ("_free", "_stack", "available", "capacity", "promised")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.available = capacity
        self.promised = 0
        self._free = capacity
        self._stack: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)

    def reserve(self, count: int) -> bool:
        """Promise `count` slots; False, with nothing changed, when there are not as many."""
        if count > self.available:
            return False
        self.available -= count
        self.promised += count
        return True

    def take(self, count: int) -> Slots:
        """Turn `count` promised slots into slot numbers."""
        assert count <= self.promised, f"taking {count} slots of {self.promised} promised"
        self.promised -= count
        end = self._free
        self._free = start = end - count
        return self._stack[start:end].copy()

    def forfeit(self, count: int) -> None:
        """Give a promise of `count` slots back."""
        assert count <= self.promised, f"forfeiting {count} slots of {self.promised} promised"
        self.promised -= count
        self.available += count

    def free(self, slots: Slots) -> None:
        """Take slot numbers back that `take` gave out."""
        count = len(slots)
        start = self._free
        self._free = end = start + count
        assert end <= self.capacity, "more slots came back than were given out"
        self._stack[start:end] = slots
        self.available += count

    def free_slots(self) -> Slots:
        """The free slot numbers, for checks."""
        return self._stack[: self._free]
