"""The radix tree, and every count that must agree with it. It changes nodes, with `joining`.

`Tree` offers the small steps (hold, drop, pin, split …), each of which leaves all counters right;
the verbs of `Index` consist of them. `index_invariants` tables what must hold between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvtide.index.events import CellName, PackedSizes
from kvtide.index.evict.use_history import UseHistory
from kvtide.index.keys import TOKEN_BYTES, Hidden, PageKey, Prompt, unlike_any_prompt
from kvtide.index.tree.cells import cells_of
from kvtide.index.tree.event_source import EventSource
from kvtide.index.tree.holds import Arrival, Departure, Import, IndexLease, SidecarImport
from kvtide.index.tree.joining import joinable, merge
from kvtide.index.tree.node import Node, Root, RootName
from kvtide.index.tree.node_keys import NodeKeys
from kvtide.index.tree.pins import Pins
from kvtide.index.tree.presence import Presence
from kvtide.index.tree.slots import SlotPool
from kvtide.index.tree.tree_reading import TreeReading
from kvtide.spec import ModelMemory, Slots, Tier


class Tree:
    """The tree of every namespace and the cells its pages lie in.

    homes     by anchor, the cell where a forward pass reads its pages and leases take their slots
    hot_rows  buffers of running leases in the hot pools
    reading   the last one that was begun
    """

    def __init__(
        self,
        memory: ModelMemory,
        capacity_pages: Mapping[Tier, Mapping[str, int]],
        eviction: str,
        fingerprint: bytes,
        hot_rows: int,
    ) -> None:
        self.page_bytes = memory.page_tokens * TOKEN_BYTES
        self.after_bytes = memory.holdback * TOKEN_BYTES
        self.keys = NodeKeys(fingerprint, self.page_bytes, self.after_bytes)
        self.anchor_names = tuple(pool.name for pool in memory.anchors)
        self.anchors = len(self.anchor_names)
        history = UseHistory(self.page_bytes)
        self.cells = cells_of(memory, capacity_pages, eviction, history.rates)
        self.homes = tuple(self.cell(pool.home, n) for n, pool in enumerate(memory.anchors))
        self.hot_rows = SlotPool(hot_rows)
        self.pins = Pins(self.cells, self.anchors)
        self.finite_cells = [n for n, cell in enumerate(self.cells) if cell.reach is not None]
        self.finite_bits = sum(1 << n for n in self.finite_cells)
        learns = any(cell.policy.learns for cell in self.cells) and not self.finite_cells
        self.history = history if learns else None
        self._rises = all(cell.policy.rises for cell in self.cells)
        self._longest_reach = max((cell.reach or 0 for cell in self.cells), default=0)
        self.presence = Presence(memory, capacity_pages)
        self.roots: dict[RootName, Root] = {}
        self.leases: dict[int, IndexLease] = {}
        self.arrivals: dict[int, Arrival] = {}
        self.imports: dict[int, Import] = {}
        self.sidecar_imports: dict[int, SidecarImport] = {}
        self.departures: dict[int, Departure] = {}
        names = [CellName(cell.tier, self.anchor_names[cell.anchor]) for cell in self.cells]
        sizes = PackedSizes(self.page_bytes, self.after_bytes)
        self.events = EventSource(names, self.keys, sizes)
        self.listeners = self.events.listeners
        self.reading = TreeReading(self.events, 0, ())
        self.nodes = 0
        self.tick = 0
        self._numbers = 0

    def cell(self, tier: Tier, anchor: int) -> int:
        return tier * self.anchors + anchor

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- structure --------------------------------------------------------------------------

    def root(self, prompt: Prompt) -> Root:
        """The root of the prompt's namespace, made if need be; of a hidden one, always anew."""
        if isinstance(prompt.namespace, Hidden):
            return self._hidden_root()
        name = (prompt.namespace, prompt.head)
        root = self.roots.get(name)
        if root is None:
            root = self.roots[name] = Root(name, len(self.cells))
        return root

    def _hidden_root(self) -> Root:
        name = (Hidden(self.next_number()), b"")
        root = self.roots[name] = Root(name, len(self.cells))
        return root

    def add_leaf(self, parent: Node, tokens: bytes, pages: int) -> Node:
        node = Node(parent, tokens, pages, parent.depth + parent.pages, len(self.cells))
        node.last = node.born = self.tick
        parent.children[tokens[: self.page_bytes]] = node
        self.nodes += 1
        if self.history is not None and not node.hidden:
            self.history.computed(node, self.tick)
        if self.finite_cells:
            self._reach_changed(parent)
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut the run after `pages` pages; the new upper part is returned, `node` is the lower."""
        assert 0 < pages < node.pages, f"cannot split {node.pages} pages after {pages}"
        parent = node.parent
        assert parent is not None
        cut = pages * self.page_bytes
        upper = Node(parent, node.tokens[:cut], pages, node.depth, len(self.cells))
        parent.children[node.tokens[: self.page_bytes]] = upper
        node.tokens = node.tokens[cut:]
        upper.children[node.tokens[: self.page_bytes]] = node
        node.parent = upper
        node.depth += pages
        node.pages -= pages
        self._split_cells(upper, node)
        upper.last, upper.born = node.last, node.born
        upper.hits, upper.priority, upper.stop = node.hits, node.priority, node.stop
        upper.ahead, upper.sought, upper.departed = node.ahead, node.sought, node.departed
        upper.read = node.read
        self.reading.split(upper, node)
        self.nodes += 1
        for cell in self.finite_cells:
            self.cells[cell].queue.offer(upper)
        return upper

    def _split_cells(self, upper: Node, lower: Node) -> None:
        upper.resident, upper.arriving = lower.resident, lower.arriving
        upper.pins = list(lower.pins)
        if lower.arrivals is not None:
            upper.arrivals = dict(lower.arrivals)
        held = lower.resident | lower.arriving
        for cell in range(len(self.cells)):
            if held >> cell & 1:
                upper.kids[cell] = 1
            slots = lower.slots[cell]
            if slots is not None:
                upper.slots[cell] = slots[: upper.pages].copy()
                lower.slots[cell] = slots[upper.pages :].copy()

    def extend(self, node: Node, tokens: bytes, slots: Mapping[int, Slots]) -> None:
        """Lengthen a leaf in place. `slots` names exactly the cells it is resident in."""
        pages = len(tokens) // self.page_bytes
        assert not node.children and not node.arriving
        assert node.parent is not None
        if self.history is not None and not node.hidden:
            self.history.extended(node, tokens, pages, self.tick)
        node.tokens += tokens
        node.pages += pages
        node.key, node.sought = None, 0
        node.last = self.tick
        if self.finite_cells:
            self._reach_changed(node.parent)
        for cell, added in slots.items():
            node.slots[cell] = np.concatenate((node.resident_slots(cell), added))
            where = self.cells[cell]
            node.departed &= ~where.bit
            where.resident_pages += pages
            if node.pins[cell]:
                where.pinned_pages += pages
            self._notify_stored(node, cell, node.pages - pages)

    def join(self, node: Node) -> None:
        """Merge this node with its neighbours above and below, where nothing differs."""
        run = joinable(node, self.finite_bits)
        if len(run) > 1:
            merge(run, self.page_bytes)
            self.reading.joined(run)
            self.nodes -= len(run) - 1

    def truncate(self, node: Node, pages: int, cell: int) -> None:
        """Drop all but the first `pages` pages of a leaf that is held in `cell` alone."""
        self._notify_removed(node, cell, pages)
        if self.history is not None and not node.hidden:
            self.history.shortened(node, pages, self.nodes)
        slots = node.resident_slots(cell)
        where = self.cells[cell]
        where.slots.free(slots[pages:])
        where.resident_pages -= node.pages - pages
        node.slots[cell] = slots[:pages].copy()
        node.tokens = node.tokens[: pages * self.page_bytes]
        node.pages = pages
        node.key = None
        where.queue.offer(node)

    def prune(self, node: Node) -> None:
        """Remove the node, and ancestors it alone kept alive, where nothing is held any more."""
        removed = []
        while not (node.resident or node.arriving or node.children or node.leases):
            parent = node.parent
            if parent is None:
                assert isinstance(node, Root)
                del self.roots[node.name]
                break
            assert not any(node.pins), "a pinned node lost its pages"
            del parent.children[node.tokens[: self.page_bytes]]
            self.nodes -= 1
            if self.finite_cells:
                self._reach_changed(parent)
            node.parent = None
            removed.append(node)
            node = parent
        if removed and self.history is not None and not node.hidden:
            self.history.left(removed, node, self.nodes)

    def hide(self, top: Node) -> int:
        """Move a whole branch to a hidden root of its own; returns how many pages it has.

        The branch stays in one piece: leases and arrivals in it keep what they hold, and leases
        may commit below it.
        """
        above, first = top.parent, top.tokens[: self.page_bytes]
        assert isinstance(above, Root) and not above.hidden
        pages = sum(self._withdraw(node) for node in reversed([top, *self.below(top)]))
        del above.children[first]
        root = top.parent = self._hidden_root()
        root.children[top.tokens[: self.page_bytes]] = top
        held = top.resident | top.arriving
        for cell in range(len(self.cells)):
            above.kids[cell] -= held >> cell & 1
            root.kids[cell] += held >> cell & 1
        self.prune(above)
        return pages

    def _withdraw(self, node: Node) -> int:
        """Report the node's pages as removed to listeners, and rename the node.

        The children come first: a page's key depends on the tokens above it. The node's tokens
        become some that no prompt has, so that a lease that computes the page anew gets a new one.
        """
        resident = [number for number, cell in enumerate(self.cells) if node.resident & cell.bit]
        for cell in resident:
            if self.listeners:
                self.events.removed(node, cell, 0)
        children = node.children.values()
        node.children = {child.tokens[: self.page_bytes]: child for child in children}
        node.tokens = unlike_any_prompt(node.tokens)
        node.hidden = True
        return node.pages * len(resident)

    def _reach_changed(self, parent: Node) -> None:
        """A child was added or removed. With one child left, pages may be out of every reach."""
        if len(parent.children) != 1:
            return
        node, end = parent, parent.depth + parent.pages
        while node.parent is not None and end - node.depth - node.pages < self._longest_reach:
            for cell in self.finite_cells:
                if node.resident >> cell & 1:
                    self.cells[cell].queue.offer_again(node)
            node = node.parent

    # -- cells ------------------------------------------------------------------------------

    def hold(self, node: Node, cell: int, slots: Slots) -> None:
        """The pages are RESIDENT in these slots from now on, even if an arrival was expected.

        The caller pins them or offers them for eviction.
        """
        bit = 1 << cell
        assert not node.resident & bit and len(slots) == node.pages
        if node.arriving & bit:
            self._forget_arrival(node, cell)
        elif node.parent is not None:
            node.parent.kids[cell] += 1
        node.resident |= bit
        node.slots[cell] = slots
        self.cells[cell].resident_pages += node.pages
        if self.listeners and not node.hidden:
            self.events.stored(node, cell, 0)

    def drop(self, node: Node, cell: int) -> None:
        """Forget the pages' copy in this cell, and the node if it was the last one.

        When a history has left every tier, its windows and states are dropped too: nothing could
        resume with them.
        """
        where = self.cells[cell]
        if where.reach is None:
            self.drop_run([node], cell)
            return
        self._forget(node, cell)
        if node.resident:
            self.join(node)
        else:
            self.prune(node)

    def drop_run(self, run: Sequence[Node], cell: int) -> None:
        """Forget a history's copies in this cell, of nodes that follow each other, deepest first.

        They leave the tree in one step where nothing else is left of them.
        """
        anchor_bits = self.cells[cell].anchor_bits
        for node in run:
            self._notify_removed(node, cell, 0)
        for node in reversed(run):  # From the top: none of them is offered for eviction.
            self._clear(node, cell)
        for node in run:
            held = node.resident
            if held & self.finite_bits and not held & anchor_bits:
                for other in self.finite_cells:
                    if held >> other & 1 and not node.pins[other]:
                        self._forget(node, other)
        self.prune(run[0])

    def _forget(self, node: Node, cell: int) -> None:
        self._notify_removed(node, cell, 0)
        self._clear(node, cell)

    def _clear(self, node: Node, cell: int) -> None:
        """Free the slots, listeners having been notified."""
        assert node.resident >> cell & 1 and not node.pins[cell]
        where = self.cells[cell]
        where.slots.free(node.resident_slots(cell))
        where.resident_pages -= node.pages
        node.slots[cell] = None
        node.resident &= ~where.bit
        node.departed &= ~where.bit
        self._lost_kid(node, cell)

    def arrive(self, node: Node, cell: int, number: int) -> None:
        """The pages are ARRIVING: arrival `number` owns their slots, and they are not readable."""
        bit = 1 << cell
        assert not (node.resident | node.arriving) & bit and node.parent is not None
        node.arriving |= bit
        if node.arrivals is None:
            node.arrivals = {}
        node.arrivals[cell] = number
        node.parent.kids[cell] += 1

    def give_up(self, node: Node, cell: int) -> None:
        """The arrival failed: its pages are ABSENT again. The caller prunes."""
        self._forget_arrival(node, cell)
        self._lost_kid(node, cell)

    def _forget_arrival(self, node: Node, cell: int) -> None:
        assert node.arrivals is not None
        del node.arrivals[cell]
        if not node.arrivals:
            node.arrivals = None
        node.arriving &= ~(1 << cell)

    def _lost_kid(self, node: Node, cell: int) -> None:
        parent = node.parent
        assert parent is not None
        parent.kids[cell] -= 1
        if not parent.kids[cell] and parent.pages:
            self.cells[cell].queue.offer(parent)

    # -- recency ----------------------------------------------------------------------------

    def use(self, node: Node, priority: int, hits: int) -> None:
        """Record a use of all nodes on the path, and `hits` more hits."""
        tick = self.tick
        if self.history is not None and not node.hidden:
            if hits:
                self.history.pinned(node, tick)
            else:
                self.history.released(node, tick)
        above = node
        while above.parent is not None:
            above.last = tick
            above.hits += hits
            if priority > above.priority:
                above.priority = priority
            above = above.parent
        if not self._rises:
            self._offer_path(node)

    def _offer_path(self, node: Node) -> None:
        """Keys on the path may have fallen, in every cell."""
        for above in self.path(node):
            for number, cell in enumerate(self.cells):
                if above.resident >> number & 1:
                    cell.queue.offer(above)

    # -- keys and events --------------------------------------------------------------------

    def key(self, node: Node) -> bytes:
        """The key of the node's last page; for a root, what its page keys begin with."""
        return self.keys.of(node)

    def page_keys(self, node: Node) -> list[PageKey]:
        """The keys of all pages of the node."""
        return self.keys.of_pages(node)

    def _notify_stored(self, node: Node, cell: int, first: int) -> None:
        """Notify the listeners: pages from `first` on became readable."""
        if node.hidden:
            return
        if self.listeners:
            self.events.stored(node, cell, first)

    def _notify_removed(self, node: Node, cell: int, first: int) -> None:
        """Notify the listeners: pages from `first` on are about to be dropped."""
        if node.hidden:
            return
        if self.listeners:
            self.events.removed(node, cell, first)

    def read(self) -> TreeReading:
        """Begin a reading, which takes the place of the one before."""
        self.reading = TreeReading(self.events, self.reading.number + 1, self.roots.values())
        return self.reading

    # -- looking around ---------------------------------------------------------------------

    def walk(self) -> Iterator[Node]:
        """Every node but the roots, parents first, in insertion order."""
        for root in self.roots.values():
            yield from self.below(root)

    @staticmethod
    def below(node: Node) -> Iterator[Node]:
        """Every node below this one, parents first."""
        pending = list(node.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root to `node`."""
        nodes = []
        above = node
        while above.parent is not None:
            nodes.append(above)
            above = above.parent
        nodes.reverse()
        return nodes
