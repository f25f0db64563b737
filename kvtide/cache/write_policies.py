"""When pages are copied from the device to the host.

| policy                    | a page is copied                                |
|---------------------------|-------------------------------------------------|
| `write_through`           | as soon as it is computed (the default)         |
| `write_through_selective` | when a second prompt finds it                   |
| `write_back`              | before the device gives it up, ahead of need    |
| `none`                    | never                                           |

A policy starts copies; it never waits for one. `write_back` keeps device slots free: when fewer
than the headroom are, it demotes the next victims. A request that needs more than that waits a step
for the copies, so that no page is lost. Pages are dropped only where the host is full too.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.cache.inflight import InFlightTransfers
from kvtide.index import Index
from kvtide.index import IndexLease as IndexLease
from kvtide.spec import Tier


class Never:
    """Copies nothing: the base of all policies.

    `keeps_only_copies`: the device never evicts the only copy of a page.
    """

    keeps_only_copies = False

    def __init__(self, index: Index, in_flight: InFlightTransfers, headroom: float) -> None:
        self._index = index
        self._in_flight = in_flight
        self._headroom = headroom
        self.skipped = 0

    def found(self, lease: IndexLease) -> None:
        """A prompt has matched the lease's prefix."""

    def committed(self, lease: IndexLease) -> None:
        """Pages were added to the lease's prefix."""

    def make_room(self, missing: Mapping[str, int]) -> bool:
        """A request lacked device pages; True if trying again may succeed at once."""
        return False

    def tick(self) -> None:
        """Called once per step."""

    def _back_up(self, lease: IndexLease) -> None:
        if not self._in_flight.backup(lease):
            self.skipped += 1


class WriteThrough(Never):
    def committed(self, lease: IndexLease) -> None:
        self._back_up(lease)


class WriteThroughSelective(Never):
    def found(self, lease: IndexLease) -> None:
        if lease.boundary:
            self._back_up(lease)


class WriteBack(Never):
    keeps_only_copies = True

    def make_room(self, missing: Mapping[str, int]) -> bool:
        """Demote what is missing, unless enough is leaving already; drop where nothing can."""
        again = False
        for anchor, pages in missing.items():
            short = pages - self._in_flight.leaving(anchor)
            if short <= 0:
                continue
            leaving = self._in_flight.demote(anchor, short)
            if leaving is None:
                dropped = self._index.evict(Tier.DEVICE, anchor, short)
                self.skipped += dropped > 0
                again = again or dropped > 0
            else:
                again = again or leaving < short
        return again

    def tick(self) -> None:
        for anchor, headroom in self._wanted.items():
            free = self._index.free_pages(Tier.DEVICE, anchor) + self._in_flight.leaving(anchor)
            if free < headroom:
                # A little more than is missing, so that copies are few and large.
                self._in_flight.demote(anchor, headroom - free + headroom // 2)

    @property
    def _wanted(self) -> dict[str, int]:
        """How many pages of every anchor should be free."""
        index = self._index
        return {
            anchor.name: int(self._headroom * index.capacity(Tier.DEVICE, anchor.name))
            for anchor in index.memory.anchors
        }


POLICIES = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
    "none": Never,
}
