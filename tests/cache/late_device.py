"""A rig whose device is behind: what a step writes is there when the device has done it.

The caller launches a step and commits its pages at once, as an engine does. Whatever reads or
writes the same slots has to wait for the device by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from kvtide.cache import Lease
from kvtide.spec import PageMove
from kvtide.testing.hand_run import HandRunTimeline
from tests.cache.building import Rig


class LateDevice:
    """Takes the place of a rig's device."""

    def __init__(self, rig: Rig) -> None:
        self.timeline = HandRunTimeline()
        self._rig = rig
        self._settle = rig.settle
        for hand in rig.hands.values():
            hand.timeline = self.timeline
        rig.write = self.launch
        rig.settle = self.settle
        rig.cache.index._commits._copy_on_device = self._copy_on_device

    @property
    def behind(self) -> bool:
        return not self.timeline.passed(self.timeline.fence())

    def launch(self, lease: Lease, first: int, end: int, without: Collection[str] = ()) -> None:
        for write in self._rig.writes(lease, first, end, without):
            self.timeline.queue(write)

    def work(self) -> None:
        """Do all that is queued. A step writes to its slots even when its lease has gone: slots
        that are free by then are poisoned anew."""
        self.timeline.work()
        for cell in self._rig.cache.index.tree.cells:
            if cell.tier in self._rig.rows:
                name = self._rig.memory.anchors[cell.anchor].name
                self._rig.rows[cell.tier].poison(name, cell.slots.free_slots())

    def settle(self) -> None:
        self.work()
        self._settle()

    def _copy_on_device(self, move: PageMove) -> None:
        self.timeline.queue(partial(self._rig.cache._copy_on_device, move))
