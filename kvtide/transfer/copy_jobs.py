"""The copier turns page moves between device and host into strided copies, which backends issue.

The calling thread computes the copies from tables made at the start, and submits them to the lane
of their direction. Loads go in groups of layers, first layers first, so that a forward pass starts
when its first group has landed; backups go whole. All moves of one call are one submission: pages
of one anchor are copied together, whichever lease needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from kvtide.spec import ALL, ModelMemory, PageMove, Tier
from kvtide.tiers.buffers import Buffers
from kvtide.tiers.layout import pieces
from kvtide.transfer.lane import Job, Ticket
from kvtide.transfer.strided import Addresses, PieceTable, Strided, Way
from kvtide.transfer.timeline import DeviceEvent, Timeline

GROUP_PAGE_BYTES = 192 * 1024
"""The least that a group of layers brings per page: smaller copies waste the link."""

MIN_GROUPS = 3
"""Even where groups are smaller than that: a forward pass starts before all has landed."""

MAX_GROUPS = 16


class Issuer(Protocol):
    """What runs jobs in one direction: `lane.Lane`; in tests also one that is run by hand."""

    timeline: Timeline
    failures: int

    def submit(self, job: Job) -> None: ...
    def close(self, timeout_s: float) -> bool: ...


class Copier:
    """Moves pages between two buffers. `groups` are the legs of a load."""

    def __init__(
        self,
        device: Buffers,
        host: Buffers,
        lanes: Mapping[Way, Issuer],
        groups: Sequence[range] = (),
    ) -> None:
        memory = device.arrangement.memory
        assert host.arrangement.memory == memory.at_rest, "the host keeps what lasts of the same"
        self.groups = tuple(groups) or layer_groups(memory)
        grouped = {layer for group in self.groups for layer in group}
        assert all(grouped.issuperset(pool.layers) for pool in memory.pools), "a layer is left out"
        self.lanes = lanes
        self._buffers = {Tier.DEVICE: device, Tier.HOST: host}
        self._blocks = (device.data, host.data)
        self._memory = memory
        self._tables = {
            (way, anchor.name, sidecar): self._page_table(way, anchor.name, sidecar)
            for way in Way
            for anchor in memory.anchors
            for sidecar in (None, *memory.optional_sidecars(anchor.name))
        }

    def leg_of(self, layer: int) -> int:
        """Which leg of a load brings this layer."""
        for leg, layers in enumerate(self.groups):
            if layer in layers:
                return leg
        raise AssertionError(f"no leg brings layer {layer}; there are {self.groups}")

    def fence(self, way: Way) -> DeviceEvent:
        """The end of the work that the calling thread has queued on the device so far."""
        return self.lanes[way].timeline.fence()

    def queued(self) -> Callable[[], bool]:
        """Tells, from any thread, whether the work is done that the caller has queued so far."""
        timeline = self.lanes[Way.LOAD].timeline
        event = timeline.fence()
        return lambda: timeline.passed(event)

    def copy(
        self, way: Way, moves: Sequence[PageMove], timeout_s: float, after: DeviceEvent = None
    ) -> Ticket:
        """Copy whole pages, after a fence, or after all that is queued now."""
        joined: dict[tuple[str, str | None], list[PageMove]] = {}
        for move in moves:
            assert (move.source, move.target) == way.value, f"{move} does not go {way.name}"
            joined.setdefault((move.anchor, move.sidecar), []).append(move)
        works = []
        for (anchor, sidecar), of_pages in joined.items():
            source = np.concatenate([move.source_slots for move in of_pages], dtype=np.int64)
            target = np.concatenate([move.target_slots for move in of_pages], dtype=np.int64)
            self._check(way.source, anchor, source, len(target))
            self._check(way.target, anchor, target, len(source))
            table = self._tables[way, anchor, sidecar]
            if len(table) and len(source):
                works.append(Strided(table, source, target))
        return self._submit(way, works, len(self._legs(way)), timeout_s, after)

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted; False if a lane did not end in time."""
        closed = [lane.close(timeout_s) for lane in self.lanes.values()]
        return all(closed)

    def _check(self, tier: Tier, anchor: str, slots: Addresses, count: int) -> None:
        """Wrong slots would be wrong addresses."""
        capacity = self._buffers[tier].arrangement.slots[anchor]
        assert len(slots) == count, "a move names as many source slots as target slots"
        assert not count or 0 <= slots.min() <= slots.max() < capacity, f"{anchor}: no such slot"

    def _legs(self, way: Way) -> Sequence[range]:
        return self.groups if way is Way.LOAD else (range(self._memory.end_layer),)

    def _submit(
        self,
        way: Way,
        works: Sequence[Strided],
        legs: int,
        timeout_s: float,
        after: DeviceEvent = None,
    ) -> Ticket:
        lane = self.lanes[way]
        ticket = Ticket(lane.timeline, legs, time.monotonic() + timeout_s)
        lane.submit(Job(ticket, works, legs, after or self.fence(way), self._blocks))
        return ticket

    def _page_table(self, way: Way, anchor: str, sidecar: str | None) -> PieceTable:
        source, target = self._buffers[way.source], self._buffers[way.target]
        found = [
            pieces(source.arrangement, target.arrangement, anchor, layers, sidecar)
            for layers in self._legs(way)
        ]
        return PieceTable.of(way, source, target, found)


def layer_groups(memory: ModelMemory, max_groups: int = MAX_GROUPS) -> tuple[range, ...]:
    """The model's layers in order, cut into groups that bring about the same number of bytes."""
    page = memory.page_tokens
    loaded = memory.in_device_pages.pools
    histories = [pool for pool in loaded if pool.reuse.reach is ALL and pool.layers]
    counted = histories or loaded
    layers = range(memory.end_layer) if memory.part is None else memory.part.layers
    sizes = [sum(p.row_bytes(page) for p in counted if layer in p.layers) for layer in layers]
    count = min(max_groups, len(layers), max(MIN_GROUPS, sum(sizes) // GROUP_PAGE_BYTES))
    ends = np.searchsorted(np.cumsum(sizes), np.arange(1, count) * sum(sizes) / count) + 1
    cuts = sorted({0, *(int(end) for end in ends), len(layers)})
    first = layers.start
    return tuple(range(first + a, first + b) for a, b in pairwise(cuts))
