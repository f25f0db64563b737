"""Commits: pages that a lease computed become part of the tree, and its pins move to them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvtide.index.leases.leasing import Leasing
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.match.match import Matcher
from kvtide.index.tree.holds import IndexLease, Pin, Segment
from kvtide.index.tree.node import MAX_NODE_PAGES, Node
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import Tree
from kvtide.spec import ModelMemory, PageMove, Slots, Tier


class Commits:
    def __init__(
        self,
        memory: ModelMemory,
        tree: Tree,
        matcher: Matcher,
        leasing: Leasing,
        copy_on_device: Callable[[PageMove], None],
    ) -> None:
        self._tree = tree
        self._matcher = matcher
        self._leasing = leasing
        self._copy_on_device = copy_on_device
        self._page = memory.page_tokens
        self._holdback = memory.holdback
        self._reaches = leasing.reaches
        required = (n for n, p in enumerate(memory.anchors) if p.reuse.required)
        self._histories = frozenset(tree.homes[n] for n in required if self._reaches[n] is None)

    def commit(self, lease: IndexLease, tokens: int, without: Collection[str]) -> None:
        """Hang the pages up to `tokens` on the tree, and let the lease stand and pin there."""
        tree = self._tree
        upto = (tokens - self._holdback) // self._page
        assert lease.live and self._leasing.owns(lease), "this lease is not this index's"
        assert upto <= lease.reserved, "committing pages that were not reserved"
        assert tokens <= lease.prompt.tokens, "committing pages whose tokens are not known"
        assert self._leasing.at_home(lease), "committing on top of pages that have yet to be loaded"
        if upto <= lease.boundary:
            return
        tree.tick += 1
        if self._holdback and not lease.boundary:
            self._find_root(lease)
        start_node, start_page = lease.node, lease.boundary
        while lease.boundary < upto:
            segment = lease.segments.pop(0)
            if segment.end > upto:
                lease.segments.insert(0, segment.cut(upto))
            if tree.presence.needed:
                for cell, slots in segment.slots.items():
                    where = tree.cells[cell]
                    name = tree.anchor_names[where.anchor]
                    tree.presence.mark(where.tier, name, slots, without)
            self._insert(lease, segment, start_node)
            lease.boundary = segment.end
        lease.node.leases += 1
        self._move_pins(lease, start_node)
        if tree.finite_cells:
            self._record_extent(lease, start_node)
            self._offer_checkpoints(lease, start_node)
        start_node.leases -= 1
        if lease.running:
            self._leasing.drop_passed(lease, start_page)
        if lease.hidden:
            sweep(tree, hidden_roots([lease.node]))

    def _find_root(self, lease: IndexLease) -> None:
        """A prompt shorter than the holdback has no root of its own until it has grown."""
        root, before = self._tree.root(lease.prompt), lease.node
        root.leases += 1
        before.leases -= 1
        lease.node = root
        self._tree.prune(before)

    def _insert(self, lease: IndexLease, segment: Segment, start_node: Node) -> None:
        """Hang the segment's pages below `lease.node`, which ends where the segment begins.

        `start_node` is where the lease stood when the commit began.
        """
        tree, body, page_bytes = self._tree, lease.prompt.body, self._tree.page_bytes
        at, slots = segment.start, segment.slots
        while at < segment.end:
            offset = at * page_bytes
            child = lease.node.children.get(body[offset : offset + page_bytes])
            if child is None:
                tokens = body[offset : segment.end * page_bytes]
                if lease.node is start_node and self._can_extend(start_node, tokens, slots):
                    tree.extend(start_node, tokens, slots)
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
            tree.hold(leaf, cell, taken)
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
        if tree.history is not None and not node.hidden:
            tree.history.touched(node, tree.tick)
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
        """Make the pages of a node that was there resident; `commit` pins and offers them later.

        Leases that waited for an arrival of these pages have them now, and pin them.
        """
        tree = self._tree
        coming = node.arrivals.get(cell) if node.arrivals else None
        tree.hold(node, cell, slots)
        if tree.presence.needed and (node.resident | node.arriving) >> cell + tree.anchors & 1:
            tree.presence.note_ahead(node)
        for lease in tree.arrivals[coming].leases if coming is not None else ():
            if lease.live:
                self._leasing.repin(lease)

    @staticmethod
    def _record_extent(lease: IndexLease, start_node: Node) -> None:
        """Record how far the request that committed these nodes computes full pages."""
        node = lease.node
        stop = max(lease.boundary, lease.planned)
        while True:
            node.stop = max(node.stop, stop)
            if node is start_node or node.parent is None:
                return
            node = node.parent

    def _offer_checkpoints(self, lease: IndexLease, start_node: Node) -> None:
        """Windows and states of the committed nodes may be evicted where the lease pins none."""
        tree, node = self._tree, lease.node
        while node is not start_node and node.parent is not None:
            if node.resident & tree.finite_bits:
                for cell in tree.finite_cells:
                    tree.cells[cell].queue.offer(node)
            node = node.parent

    def _move_pins(self, lease: IndexLease, start_node: Node) -> None:
        """Pin the committed pages: pins of histories extend, those of windows and states move."""
        tree = self._tree
        if lease.node is start_node and not tree.finite_cells:
            return  # The node grew in place, and so did the pins.
        old, lease.pins = lease.pins, []
        for anchor, reach in enumerate(self._reaches):
            if (cell := tree.homes[anchor]) in self._histories:
                tree.pins.below(cell, lease.node, start_node)
                lease.pins.append(Pin(cell, lease.node, 0))
            else:
                start = 0 if reach is None else max(0, lease.boundary - reach)
                lease.pins += tree.pins.fastest(anchor, lease.node, start, Tier.DEVICE)
                if lease.prompt.checkpoints:
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
            if lease.pinned_at < stop < lease.boundary and stop in ends
            for pin in self._tree.pins.fastest(
                anchor, ends[stop], max(0, stop - (reach or 0)), Tier.DEVICE
            )
        ]
