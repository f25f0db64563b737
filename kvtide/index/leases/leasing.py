"""The life of a lease: pin a prefix, reserve what comes after it, commit it, release it all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvtide.index.evict.allocation import Allocator
from kvtide.index.keys import Prompt
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.match.match import Hit, Matcher
from kvtide.index.placement.placement import Placement, PlannedSegment, plan
from kvtide.index.tree.holds import IndexLease, Pin, Segment
from kvtide.index.tree.node import Node
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import MAX_NODE_PAGES, Tree
from kvtide.spec import ModelMemory, PageMove, Slots, Tier

_TIERS = tuple(Tier)


class Wish(NamedTuple):
    """Which windows and states a reservation keeps.

    checkpoints  page boundaries; None lets the placement choose
    at_end       also what the request itself needs to continue from the reservation's end
    """

    checkpoints: tuple[int, ...] | None
    at_end: bool = False


class Leasing:
    def __init__(
        self,
        memory: ModelMemory,
        tree: Tree,
        matcher: Matcher,
        allocator: Allocator,
        placement: Placement,
        copy_on_device: Callable[[PageMove], None],
    ) -> None:
        self._tree = tree
        self._matcher = matcher
        self._allocator = allocator
        self._placement = placement
        self._page = memory.page_tokens
        self._holdback = memory.holdback
        self._reaches = tuple(p.reuse.reach_pages(memory.page_tokens) for p in memory.anchors)
        self._required = frozenset(n for n, p in enumerate(memory.anchors) if p.reuse.required)
        histories = (n for n in self._required if self._reaches[n] is None)
        self._histories = frozenset(tree.homes[n] for n in histories)
        self._has_hot_pools = bool(memory.hot_pools)
        self._copy_on_device = copy_on_device
        self._finite = frozenset(reach for reach in self._reaches if reach is not None)

    def owns(self, lease: IndexLease) -> bool:
        return self._tree.leases.get(lease.number) is lease

    # -- pinning ----------------------------------------------------------------------------

    def pin(self, hit: Hit, priority: int) -> IndexLease:
        tree = self._tree
        assert hit.tick == tree.tick, "the index changed since this hit; match again"
        tree.tick += 1
        node = self._node_ending(hit) if hit.boundary else tree.root(hit.prompt)
        node.leases += 1
        lease = IndexLease(tree.next_number(), hit.prompt, node, hit.boundary, priority)
        lease.begun = hit.boundary
        if tree.finite_cells and hit.nodes:
            lease.branches = hit.branches
            if len(hit.nodes[-1].children) < 2:
                self._placement.parted(hit.matched, hit.nodes[-1].stop)
        tree.leases[lease.number] = lease
        self._pin_prefix(lease)
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

    def _pin_prefix(self, lease: IndexLease) -> None:
        for anchor, reach in enumerate(self._reaches):
            start = 0 if reach is None else max(0, lease.boundary - reach)
            lease.pins += self._tree.pins.fastest(anchor, lease.node, start)

    def repin(self, lease: IndexLease) -> None:
        """Pin what the lease needs in the tiers where it is now, then drop the old pins."""
        before, lease.pins = lease.pins, []
        self._pin_prefix(lease)
        for pin in before:
            self._tree.pins.unpin(pin)

    def slowest(self, lease: IndexLease) -> Tier:
        """The slowest tier that has to give part of the lease's prefix; DEVICE if none has to."""
        anchors, below = self._tree.anchors, self._below_home(lease)
        cells = [cell for cell in below if cell % anchors in self._required]
        return _TIERS[max(cells, default=0) // anchors]

    def at_home(self, lease: IndexLease) -> bool:
        """Whether all that the lease needs to resume can be read where a forward pass reads it."""
        return not self._below_home(lease) or self.slowest(lease) is Tier.DEVICE

    def _below_home(self, lease: IndexLease) -> list[int]:
        """The cells of pinned pages that have to be copied before they are read."""
        anchors, homes = self._tree.anchors, self._tree.homes
        cells = (pin.cell for pin in lease.pins if pin.cell >= anchors)
        return [cell for cell in cells if cell > homes[cell % anchors]]

    # -- reserving --------------------------------------------------------------------------

    def reserve(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        return self._reserve(lease, tokens, growth, Wish(None))

    def reserve_with(
        self, lease: IndexLease, tokens: int, checkpoints: Iterable[int], growth: int
    ) -> bool:
        return self._reserve(lease, tokens, growth, Wish(tuple(checkpoints)))

    def advance(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        return self._reserve(lease, tokens, growth, Wish(None, at_end=True))

    def advance_without_checkpoints(self, lease: IndexLease, tokens: int, growth: int) -> bool:
        return self._reserve(lease, tokens, growth, Wish((), at_end=True))

    def _reserve(self, lease: IndexLease, tokens: int, growth: int, wish: Wish) -> bool:
        assert lease.live and self.owns(lease), "reserving with a lease that is not this index's"
        tree = self._tree
        tree.tick += 1
        start = lease.reserved
        open_end = max(start, -(-tokens // self._page))
        end = max(start, min(open_end, (tokens - self._holdback) // self._page))
        planned, checkpoints = end, wish.checkpoints
        fresh = checkpoints is None and self._unplaced(lease, tokens, end, wish)
        if fresh:
            planned = max(end, self._full_pages(lease.prompt))
            begun = lease.boundary
            placed = self._placement.checkpoints(begun, planned, lease.branches)
            checkpoints = (*placed, *lease.prompt.checkpoints)
        stops = lease.wanted if checkpoints is None else checkpoints
        kept = (*stops, end) if wish.at_end else stops
        segments = plan(start, end, open_end, kept, self._reaches)
        if wish.at_end and self._finite:
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
            self._placement.placed(lease.boundary, planned, len(set(stops)))
            lease.placed = planned
        if checkpoints is not None:
            others = (stop for stop in lease.wanted if not start < stop <= end)
            lease.wanted = (*others, *stops)
        lease.planned = max(lease.planned, planned)
        lease.running = lease.running or wish.at_end
        for first, last, anchors in segments:
            segment = Segment(first, last, {})
            for cell in (tree.homes[anchor] for anchor in anchors):
                segment.slots[cell] = tree.cells[cell].slots.take(last - first)
            lease.segments.append(segment)
        return True

    def _unplaced(self, lease: IndexLease, tokens: int, end: int, wish: Wish) -> bool:
        """Whether the placement has yet to choose this request's checkpoints.

        It chooses once, for all of the prompt, however small the chunks in which that is computed.
        Beyond the prompt a request has no known end: what it keeps last is its checkpoint.
        """
        if not self._tree.finite_cells:
            return False
        if wish.at_end:
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
        for first, last, anchors in segments:
            for cell in (self._tree.homes[anchor] for anchor in anchors):
                needs[cell] = needs.get(cell, 0) + last - first
        if not growth and not lease.growth:
            return self._allocator.reserve(needs)
        return self._grow(lease, needs, growth)

    def _grow(self, lease: IndexLease, needs: dict[int, int], growth: int) -> bool:
        """Cover `needs` from the lease's promise, and top that up to `growth` pages."""
        left: dict[int, int] = {}
        missing: dict[int, int] = {}
        for cell, reach in zip(self._tree.homes, self._reaches, strict=True):
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
                segment = self._cut(segment, pages)
            for cell, slots in segment.slots.items():
                pool = self._tree.cells[cell].slots
                pool.free(slots)
                promised = pool.reserve(len(slots))
                assert promised, "what was just freed is free"
                lease.growth[cell] = lease.growth.get(cell, 0) + len(slots)

    # -- committing -------------------------------------------------------------------------

    def commit(self, lease: IndexLease, tokens: int, without: Collection[str]) -> None:
        tree = self._tree
        upto = (tokens - self._holdback) // self._page
        assert lease.live and self.owns(lease), "committing with a lease that is not this index's"
        assert upto <= lease.reserved, "committing pages that were not reserved"
        assert tokens <= lease.prompt.tokens, "committing pages whose tokens are not known"
        assert self.at_home(lease), "committing on top of pages that have yet to be loaded"
        if upto <= lease.boundary:
            return
        tree.tick += 1
        self._find_root(lease)
        before, stood = lease.node, lease.boundary
        while lease.boundary < upto:
            segment = lease.segments.pop(0)
            if segment.end > upto:
                lease.segments.insert(0, self._cut(segment, upto))
            if tree.presence.needed:
                for cell, slots in segment.slots.items():
                    where = tree.cells[cell]
                    name = tree.anchor_names[where.anchor]
                    tree.presence.mark(where.tier, name, slots, without)
            self._insert(lease, segment, before)
            lease.boundary = segment.end
        lease.node.leases += 1
        if tree.finite_cells:
            self._note_stop(lease, before)
        self._move_pins(lease, before)
        before.leases -= 1
        if lease.running:
            self._pass_on(lease, stood)
        sweep(tree, hidden_roots([lease.node]))

    def _find_root(self, lease: IndexLease) -> None:
        """A prompt shorter than the holdback has no root of its own until it has grown."""
        if self._holdback and lease.boundary == 0:
            root, before = self._tree.root(lease.prompt), lease.node
            root.leases += 1
            before.leases -= 1
            lease.node = root
            self._tree.prune(before)

    @staticmethod
    def _cut(segment: Segment, at: int) -> Segment:
        """Shorten a segment to end at page `at`; the rest is returned."""
        kept, slots = at - segment.start, segment.slots
        segment.slots = {cell: taken[:kept].copy() for cell, taken in slots.items()}
        rest = Segment(at, segment.end, {c: taken[kept:].copy() for c, taken in slots.items()})
        segment.end = at
        return rest

    def _insert(self, lease: IndexLease, segment: Segment, stand: Node) -> None:
        """Hang the segment's pages below `lease.node`, which ends where the segment begins.

        `stand` is the node at which the lease stood before.
        """
        tree, body, page_bytes = self._tree, lease.prompt.body, self._tree.page_bytes
        at, slots = segment.start, segment.slots
        while at < segment.end:
            offset = at * page_bytes
            child = lease.node.children.get(body[offset : offset + page_bytes])
            if child is None:
                tokens = body[offset : segment.end * page_bytes]
                if lease.node is stand and self._can_extend(stand, tokens, slots):
                    tree.extend(stand, tokens, slots)
                else:
                    self._append(lease, tokens, slots)
                return
            pages = self._matcher.shared(child, body, at, segment.end)
            if pages < child.pages:
                child = tree.split(child, pages)
            child.priority = max(child.priority, lease.priority)
            self._fill(child, slots)
            slots = {cell: taken[pages:] for cell, taken in slots.items()}
            lease.node = child
            at += pages

    def _append(self, lease: IndexLease, tokens: bytes, slots: dict[int, Slots]) -> None:
        """New pages at the end of the path, in a node of their own."""
        tree = self._tree
        leaf = tree.add_leaf(lease.node, tokens, len(tokens) // tree.page_bytes)
        leaf.priority = lease.priority
        for cell, taken in slots.items():
            self._hold(leaf, cell, taken)
        lease.node = leaf

    def _can_extend(self, node: Node, tokens: bytes, slots: dict[int, Slots]) -> bool:
        """Whether the node a lease stands at may grow in place: a leaf, held alike, its alone.

        The lease itself pins every cell of it once. Windows and states do not grow: their pages
        must be able to go one by one.
        """
        pages = len(tokens) // self._tree.page_bytes
        if node.children or node.arriving or not 0 < node.pages <= MAX_NODE_PAGES - pages:
            return False
        if node.leases > 1 or max(node.pins) > 1 or node.resident & self._tree.finite_bits:
            return False
        cells = 0
        for cell in slots:
            cells |= 1 << cell
        return node.resident == cells

    def _fill(self, node: Node, slots: dict[int, Slots]) -> None:
        """Give the node these pages where it has none; duplicates go back.

        Sidecars that only the duplicates carry are added to the node's pages: leases and transfers
        use its slots, and read no sidecar that was absent.
        """
        tree = self._tree
        node.last = tree.tick
        for cell, taken in slots.items():
            mine = taken[: node.pages]
            if not node.resident >> cell & 1:
                self._hold(node, cell, mine.copy())
                continue
            if tree.presence.needed:
                where, theirs = tree.cells[cell], node.resident_slots(cell)
                name = tree.anchor_names[where.anchor]
                added = tree.presence.additions(name, where.tier, mine, where.tier, theirs)
                for move in added:
                    self._copy_on_device(move)
                tree.presence.add(SidecarSlots.of(added))
                if added:
                    tree.presence.note_ahead(node)
            tree.cells[cell].slots.free(mine)

    def _hold(self, node: Node, cell: int, slots: Slots) -> None:
        """Make the pages resident: `_move_pins` pins a history later, checkpoints are evictable.

        Leases that waited for an arrival of these pages have them now, and pin them.
        """
        tree = self._tree
        coming = node.arrivals.get(cell) if node.arrivals else None
        tree.hold(node, cell, slots)
        if tree.presence.needed and (node.resident | node.arriving) >> cell + tree.anchors & 1:
            tree.presence.note_ahead(node)
        if tree.cells[cell].reach is not None:
            tree.cells[cell].queue.offer(node)
        for lease in tree.arrivals[coming].leases if coming is not None else ():
            if lease.live:
                self.repin(lease)

    @staticmethod
    def _note_stop(lease: IndexLease, before: Node) -> None:
        """Record how far the request that committed these nodes computes full pages."""
        node = lease.node
        stop = max(lease.boundary, lease.planned)
        while True:
            node.stop = max(node.stop, stop)
            if node is before or node.parent is None:
                return
            node = node.parent

    def _move_pins(self, lease: IndexLease, before: Node) -> None:
        """Pin the committed pages: pins of histories extend, those of windows and states move."""
        tree = self._tree
        old, lease.pins = lease.pins, []
        for anchor, reach in enumerate(self._reaches):
            if (cell := tree.homes[anchor]) in self._histories:
                tree.pins.below(cell, lease.node, before)
                lease.pins.append(Pin(cell, lease.node, 0))
            else:
                start = 0 if reach is None else max(0, lease.boundary - reach)
                lease.pins += tree.pins.fastest(anchor, lease.node, start, Tier.DEVICE)
                lease.pins += self._pin_checkpoints(lease, anchor, reach)
        for pin in old:
            if pin.cell not in self._histories:
                tree.pins.unpin(pin)

    def _pin_checkpoints(self, lease: IndexLease, anchor: int, reach: int | None) -> list[Pin]:
        """Keep a window or state where the prompt names a checkpoint that the lease has passed."""
        stops = lease.prompt.checkpoints if reach is not None else ()
        ends = {node.end: node for node in self._tree.path(lease.node)} if stops else {}
        return [
            pin
            for stop in stops
            if lease.begun < stop < lease.boundary and stop in ends
            for pin in self._tree.pins.fastest(
                anchor, ends[stop], max(0, stop - (reach or 0)), Tier.DEVICE
            )
        ]

    def _pass_on(self, lease: IndexLease, stood: int) -> None:
        """Drop the windows and states that served only the step from page `stood`."""
        tree = self._tree
        for cell in range(tree.anchors):
            reach = self._reaches[cell]
            if reach is None:
                continue
            passed = []
            node = lease.node
            while node.parent is not None and node.end > stood - reach:
                unused = node.resident >> cell & 1 and not node.pins[cell]
                if node.end <= stood and unused and lease.passing(node, reach):
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
            self._pass_on(lease, lease.boundary)
        sweep(tree, hidden_roots([lease.node]))
        lease.node.leases -= 1
        tree.prune(lease.node)
