"""The life of a lease: pin a prefix, reserve what comes after it, release it all.

`commits` has what happens in between, when pages are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvtide.index.evict.allocation import Allocator
from kvtide.index.keys import Prompt
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.match.match import Hit
from kvtide.index.placement.placement import Placement, PlannedSegment, plan
from kvtide.index.tree.holds import IndexLease, Pin, Segment
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree
from kvtide.spec import ModelMemory, Tier

_TIERS = tuple(Tier)


class CheckpointRequest(NamedTuple):
    """Which windows and states a reservation keeps.

    checkpoints  page boundaries; None lets the placement choose
    at_end       also what the request itself needs to continue from the reservation's end
    """

    checkpoints: tuple[int, ...] | None
    at_end: bool = False


_PLACED = CheckpointRequest(None)
_PLACED_AND_END = CheckpointRequest(None, at_end=True)
_END_ALONE = CheckpointRequest((), at_end=True)


class Leasing:
    """The verbs of a lease. Every one of them leaves the tree and all counts right."""

    def __init__(
        self,
        memory: ModelMemory,
        tree: Tree,
        allocator: Allocator,
        placement: Placement,
    ) -> None:
        self._tree = tree
        self._allocator = allocator
        self._placement = placement
        self._page = memory.page_tokens
        self._holdback = memory.holdback
        self.reaches = tuple(p.reuse.reach_pages(memory.page_tokens) for p in memory.anchors)
        self._required = frozenset(n for n, p in enumerate(memory.anchors) if p.reuse.required)
        self._has_hot_pools = bool(memory.hot_pools)
        self._finite = frozenset(reach for reach in self.reaches if reach is not None)

    def owns(self, lease: IndexLease) -> bool:
        """Whether this index leased it, and it is not released."""
        return self._tree.leases.get(lease.number) is lease

    # -- pinning ----------------------------------------------------------------------------

    def pin(self, hit: Hit, priority: int) -> IndexLease:
        """Lease the hit's prefix: pin what a resume at its boundary needs, and note its use."""
        tree = self._tree
        assert hit.tick == tree.tick, "the index changed since this hit; match again"
        tree.tick += 1
        node = self._node_ending(hit) if hit.boundary else tree.root(hit.prompt)
        node.leases += 1
        pins = self._pin_prefix(node, hit.boundary)
        lease = IndexLease(tree.next_number(), hit.prompt, node, hit.boundary, priority, pins)
        lease.pinned_at = hit.boundary
        if tree.finite_cells and hit.nodes:
            lease.branches = hit.branches
            if len(hit.nodes[-1].children) < 2:
                self._placement.note_branch(hit.matched, hit.nodes[-1].stop)
        tree.leases[lease.number] = lease
        tree.use(node, priority, hits=1)
        return lease

    def _node_ending(self, hit: Hit) -> Node:
        """The node that ends at the hit's boundary, cut to do so if the match ended inside it."""
        boundary, node = hit.boundary, hit.nodes[-1]
        if boundary < hit.matched:
            node = next(node for node in hit.nodes if node.depth + node.pages >= boundary)
        if node.depth + node.pages > boundary:
            node = self._tree.split(node, boundary - node.depth)
        return node

    def _pin_prefix(self, node: Node, boundary: int) -> list[Pin]:
        """Pin what a resume at the boundary, where the node ends, needs, wherever it is."""
        pins: list[Pin] = []
        for anchor, reach in enumerate(self.reaches):
            start = 0 if reach is None else max(0, boundary - reach)
            pins += self._tree.pins.fastest(anchor, node, start)
        return pins

    def repin(self, lease: IndexLease) -> None:
        """Pin what the lease needs in the tiers where it is now, then drop the old pins."""
        before, lease.pins = lease.pins, self._pin_prefix(lease.node, lease.boundary)
        for pin in before:
            self._tree.pins.unpin(pin)

    def slowest(self, lease: IndexLease) -> Tier:
        """The slowest tier that has to give part of the lease's prefix; DEVICE if none has to."""
        anchors, homes = self._tree.anchors, self._tree.homes
        slowest = 0
        for pin in lease.pins:
            if (cell := pin.cell) >= anchors:
                anchor = cell % anchors
                if cell > homes[anchor] and anchor in self._required:
                    slowest = max(slowest, cell)
        return _TIERS[slowest // anchors]

    def at_home(self, lease: IndexLease) -> bool:
        """Whether all that the lease needs to resume can be read where a forward pass reads it."""
        return self.slowest(lease) is _TIERS[0]

    # -- reserving --------------------------------------------------------------------------

    def reserve(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        """Take slots up to `tokens`, with the placement's checkpoints."""
        return self._reserve(lease, tokens, growth, _PLACED)

    def reserve_with(
        self, lease: IndexLease, tokens: int, checkpoints: Iterable[int], growth: int
    ) -> bool:
        """Take slots up to `tokens`, with these checkpoints."""
        return self._reserve(lease, tokens, growth, CheckpointRequest(tuple(checkpoints)))

    def advance(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        """Take slots up to `tokens`, from where the request computes on."""
        return self._reserve(lease, tokens, growth, _PLACED_AND_END)

    def advance_without_checkpoints(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        """The same, keeping only what the request itself continues from."""
        return self._reserve(lease, tokens, growth, _END_ALONE)

    def _reserve(
        self, lease: IndexLease, tokens: int, growth: int, keep: CheckpointRequest
    ) -> bool:
        assert lease.live and self.owns(lease), "reserving with a lease that is not this index's"
        tree = self._tree
        tree.tick += 1
        start = lease.reserved
        open_end = max(start, -(-tokens // self._page))
        end = max(start, min(open_end, (tokens - self._holdback) // self._page))
        planned, checkpoints = end, keep.checkpoints
        fresh = checkpoints is None and self._unplaced(lease, tokens, end, keep)
        if fresh:
            planned = max(end, self._full_pages(lease.prompt))
            placed = self._placement.checkpoints(lease.boundary, planned, lease.branches)
            checkpoints = (*placed, *lease.prompt.checkpoints)
        stops = lease.wanted if checkpoints is None else checkpoints
        kept = (*stops, end) if keep.at_end else stops
        segments = plan(start, end, open_end, kept, self.reaches)
        if keep.at_end and self._finite:
            segments = self._cut_at_checkpoints(segments, stops)
        needs_row = self._has_hot_pools and lease.hot_row < 0
        if needs_row and not tree.hot_rows.available:
            self._allocator.missing = {}
            return False
        if not self._promise(lease, segments, growth):
            return False
        if needs_row:
            tree.hot_rows.reserve(1)
            (lease.hot_row,) = tree.hot_rows.take(1).tolist()
        if fresh:
            self._placement.note_placed(lease.boundary, planned, len(set(stops)))
            lease.placed = planned
        if checkpoints is not None:
            others = (stop for stop in lease.wanted if not start < stop <= end)
            lease.wanted = (*others, *stops)
        lease.planned = max(lease.planned, planned)
        lease.running = lease.running or keep.at_end
        cells, homes = tree.cells, tree.homes
        for first, last, anchors in segments:
            slots = {}
            for anchor in anchors:
                home = homes[anchor]
                slots[home] = cells[home].slots.take(last - first)
            lease.segments.append(Segment(first, last, slots))
        return True

    def _unplaced(self, lease: IndexLease, tokens: int, end: int, keep: CheckpointRequest) -> bool:
        """Whether the placement has yet to choose this request's checkpoints.

        It chooses once, for all of the prompt, however small the chunks in which that is computed.
        Beyond the prompt a request has no known end: what it keeps last is its checkpoint.
        """
        if not self._tree.finite_cells:
            return False
        if keep.at_end:
            full = (min(tokens, lease.prompt.tokens) - self._holdback) // self._page
            return not lease.placed and lease.boundary < full
        return max(lease.reserved, lease.placed) < end

    def _cut_at_checkpoints(
        self, segments: list[PlannedSegment], stops: Iterable[int]
    ) -> list[PlannedSegment]:
        """The segments, cut where a checkpoint's pages begin and end: only these pages stay."""
        cuts = sorted({stop - reach for stop in stops for reach in (0, *self._finite)})
        parts: list[PlannedSegment] = []
        for first, last, anchors in segments:
            at = [first, *(cut for cut in cuts if first < cut < last), last]
            parts += [(low, high, anchors) for low, high in pairwise(at)]
        return parts

    def _full_pages(self, prompt: Prompt) -> int:
        return (prompt.tokens - self._holdback) // self._page

    def _promise(self, lease: IndexLease, segments: list[PlannedSegment], growth: int) -> bool:
        """Promise what the segments need, out of the lease's growth first, and new growth."""
        needs: dict[int, int] = {}
        homes = self._tree.homes
        for first, last, anchors in segments:
            for anchor in anchors:
                cell = homes[anchor]
                needs[cell] = needs.get(cell, 0) + last - first
        if not growth and not lease.growth:
            return self._allocator.reserve(needs)
        return self._grow(lease, needs, growth)

    def _grow(self, lease: IndexLease, needs: dict[int, int], growth: int) -> bool:
        """Cover `needs` from the lease's promise, and top that up to `growth` pages."""
        left: dict[int, int] = {}
        missing: dict[int, int] = {}
        for cell, reach in zip(self._tree.homes, self.reaches, strict=True):
            count, had = needs.get(cell, 0), lease.growth.get(cell, 0)
            wanted = growth if reach is None else min(growth, 2 * reach)
            left[cell] = max(had - count, wanted)
            missing[cell] = max(0, count + left[cell] - had)
        if not self._allocator.reserve(missing):
            return False
        lease.growth = left
        return True

    def shrink(self, lease: IndexLease, pages: int) -> None:
        """Give back the slots beyond a page; as many stay promised to the lease."""
        assert lease.live and self.owns(lease) and pages >= lease.boundary
        self._tree.tick += 1
        lease.shrunk += 1
        while lease.segments and lease.segments[-1].end > pages:
            segment = lease.segments.pop()
            if segment.start < pages:
                lease.segments.append(segment)
                segment = segment.cut(pages)
            for cell, slots in segment.slots.items():
                pool = self._tree.cells[cell].slots
                pool.free(slots)
                promised = pool.reserve(len(slots))
                assert promised, "what was just freed is free"
                lease.growth[cell] = lease.growth.get(cell, 0) + len(slots)

    def drop_passed(self, lease: IndexLease, start_page: int) -> None:
        """Drop the windows and states that served only the step from page `start_page`."""
        tree = self._tree
        for cell in range(tree.anchors):
            reach = self.reaches[cell]
            if reach is None:
                continue
            passed = []
            node = lease.node
            while node.parent is not None and node.end > start_page - reach:
                unused = node.resident >> cell & 1 and not node.pins[cell]
                if node.end <= start_page and unused and lease.passing(node, reach):
                    passed.append(node)
                node = node.parent
            for node in passed:
                tree.drop(node, cell)

    # -- the end ----------------------------------------------------------------------------

    def retain(self, lease: IndexLease) -> None:
        """Keep a checkpoint at the lease's boundary, whether or not one was placed there."""
        assert lease.live and self.owns(lease)
        lease.wanted = (*lease.wanted, lease.boundary)

    def release(self, lease: IndexLease) -> None:
        """Give back slots, promises and pins, as the lease recorded them."""
        if not lease.live:
            return
        tree = self._tree
        assert self.owns(lease), "releasing a lease that is not this index's"
        tree.tick += 1
        lease.live = False
        del tree.leases[lease.number]
        tree.use(lease.node, lease.priority, hits=0)
        for segment in lease.segments:
            for cell, slots in segment.slots.items():
                tree.cells[cell].slots.free(slots)
        for cell, count in lease.growth.items():
            tree.cells[cell].slots.forfeit(count)
        if lease.hot_row >= 0:
            tree.hot_rows.free(np.array([lease.hot_row], np.int32))
        for pin in lease.pins:
            tree.pins.unpin(pin)
        if lease.running and lease.boundary <= lease.placed:
            self.drop_passed(lease, lease.boundary)
        if lease.hidden:
            sweep(tree, hidden_roots([lease.node]))
        lease.node.leases -= 1
        tree.prune(lease.node)
