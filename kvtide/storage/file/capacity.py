"""Room for what is new: within the cap, over all spaces and processes, and above the floor.

What was used longest ago goes first. Every process counts what all of them hold, so together they
exceed the cap by no more than what they are writing at one moment. Where the file system has less
left than the floor, objects are evicted for it as for the cap; if all of them together would not
be enough, none is evicted and the new ones are refused.
"""

from __future__ import annotations

from kvtide.storage.file.base import Base
from kvtide.storage.file.merging import LAST_REMOVALS
from kvtide.storage.file.records import BLOCK_BYTES
from kvtide.storage.file.writer import Hole


class Capacity:
    def __init__(self, base: Base) -> None:
        self._base = base
        self._promised = 0

    def promise(self, need: int) -> bool:
        """Make room for so many bytes; it is theirs until `settle`. False: there is none."""
        base = self._base
        with base.lock:
            held = base.catalog.blocks * BLOCK_BYTES
            over = held + self._promised + need - base.settings.cap_bytes
            short = self._short(need)
            if short > held:
                return False
            holes = self._evict(max(over, short))
            self._promised += need
        self.give_back(holes)
        with base.lock:
            if short > 0 and self._short(0) > 0:
                self._promised -= need
                return False
        return True

    def settle(self, need: int) -> None:
        with self._base.lock:
            self._promised -= need

    def spare(self) -> int:
        """What may be allocated ahead of need."""
        settings = self._base.settings
        return max(0, self._base.folder.free_bytes() - settings.floor_bytes - self._promised)

    def _short(self, need: int) -> int:
        """How many bytes the file system lacks to take so many and keep its floor."""
        new = max(0, self._promised + need - self._base.writer.ahead())
        return self._base.settings.floor_bytes + new - self._base.folder.free_bytes()

    def _evict(self, count: int) -> list[Hole]:
        """Remove the oldest; what the caller has to give back. OSError if it cannot be noted."""
        catalog, holes = self._base.catalog, list[Hole]()
        blocks = -(-count // BLOCK_BYTES)
        while blocks > 0:
            self.give_back(holes)
            rows = catalog.victims(blocks, LAST_REMOVALS)
            if not len(rows):
                return []
            blocks -= int(catalog.table.blocks(rows).sum())
            holes = self._base.writer.remove(rows)
            self._base.counts.add("evicted", len(rows))
        return holes

    def give_back(self, holes: list[Hole]) -> None:
        """To the file system, what nothing lives in: whole segments, or ranges of them."""
        if not holes:
            return
        ids = {int(path.stem, 16) for path in {hole.path for hole in holes}}
        with self._base.lock:
            numbers = map(self._base.catalog.number, sorted(ids))
            self._base.writer.delete_empty(n for n in numbers if n is not None)
        self._base.writer.punch(holes)
