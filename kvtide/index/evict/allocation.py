"""Allocation: promise slots in cells, and evict to free them, in the order of the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtide.index.evict.eviction_queue import in_reach
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree


class Allocator:
    """`keeps`: the cells that never evict the only copy of a page.

    `missing` is what the last refusal lacked, by cell.
    """

    def __init__(self, tree: Tree, keeps: frozenset[int] = frozenset()) -> None:
        self._tree = tree
        self._keeps = keeps
        self.missing: dict[int, int] = {}

    def reserve(self, needs: Mapping[int, int]) -> bool:
        """Promise slots in several cells, in all or in none; evicts only if it seems to help."""
        cells = self._tree.cells
        self.missing = self._lacking(needs)
        if self.missing and not self._make_room(needs):
            return False
        for cell, count in needs.items():
            promised = cells[cell].slots.reserve(count)
            assert promised, "slots were freed, yet there are too few"
        return True

    def _make_room(self, needs: Mapping[int, int]) -> bool:
        """Evict what `missing` says; False where that is too much, or does not succeed."""
        cells = self._tree.cells
        if any(needs[cell] > self.max_slots(cell) for cell in self.missing):
            return False
        for cell in self.missing:
            # An eviction in one cell may have freed slots in the next.
            missing = needs[cell] - cells[cell].slots.available
            wanted = max(missing, cells[cell].batch_pages)
            evict = self.evict_copied if cell in self._keeps else self.evict
            if missing > 0 and evict(cell, wanted) < missing:
                self.missing = self._lacking(needs)
                return False
        return True

    def max_slots(self, cell: int) -> int:
        """The most slots that can be promised in a cell, if all that is not pinned goes."""
        where = self._tree.cells[cell]
        return where.slots.available + where.resident_pages - where.pinned_pages

    def _lacking(self, needs: Mapping[int, int]) -> dict[int, int]:
        cells = self._tree.cells
        lacking: dict[int, int] = {}
        for cell, count in needs.items():
            available = cells[cell].slots.available
            if count > available:
                lacking[cell] = count - available
        return lacking

    def evict(self, cell: int, pages: int) -> int:
        """Drop at least `pages` pages from a cell if so many are evictable; returns the count."""
        return self._evict(cell, pages, lambda node, cell: False)

    def evict_copied(self, cell: int, pages: int) -> int:
        """Like `evict`, but ends at the first victim whose only useful copy is in this cell.

        Also at one whose copy below may lack a sidecar.
        """
        return self._evict(cell, pages, self._keeps_something)

    def _keeps_something(self, node: Node, cell: int) -> bool:
        below = self._below(cell)
        return (node.ahead and bool(node.resident & below)) or self.would_be_lost(node, cell)

    def _evict(self, cell: int, pages: int, spares: Callable[[Node, int], bool]) -> int:
        """Drop victims until `pages` are gone, none is left, or the next one is spared.

        Nodes that follow each other and were always used together go together.
        """
        tree, queue = self._tree, self._tree.cells[cell].queue
        dropped = 0
        node = queue.pop()
        if node is not None and tree.history is not None:
            tree.cells[cell].policy.evicts(node)
        while node is not None:
            if spares(node, cell):
                queue.offer(node)
                break
            used, parent = (node.last, node.hits), node.parent
            count = self.pages_to_take(node, cell, pages - dropped)
            if count < node.pages:
                self._shorten(node, count, cell)
            elif tree.cells[cell].reach is None:
                run = self._used_together(node, cell, pages - dropped, spares)
                count, parent = sum([each.pages for each in run]), run[-1].parent
                tree.drop_run(run, cell)
            else:
                tree.drop(node, cell)
            dropped += count
            if dropped >= pages:
                break
            if parent is None or (parent.last, parent.hits) != used or not queue.evictable(parent):
                parent = queue.pop()
            node = parent
        tree.cells[cell].evicted_pages += dropped
        return dropped

    def _used_together(
        self, victim: Node, cell: int, pages: int, spares: Callable[[Node, int], bool]
    ) -> list[Node]:
        """A history's victim, which goes whole, and the nodes above it that go with it.

        They were last used with it and have no other child, until `pages` are found.
        """
        run = [victim]
        left = pages - victim.pages
        above = victim.parent
        while left > 0 and above is not None and above.kids[cell] == 1:
            if above.last != victim.last or above.hits != victim.hits or above.pins[cell]:
                break
            if not above.resident >> cell & 1 or spares(above, cell):
                break
            if self.pages_to_take(above, cell, left) < above.pages:
                break
            run.append(above)
            left -= above.pages
            above = above.parent
        return run

    def _shorten(self, node: Node, pages: int, cell: int) -> None:
        """Drop so many pages off the node's end."""
        if self._alone(node, cell):
            self._tree.truncate(node, node.pages - pages, cell)
        else:
            self._tree.drop(self.tail(node, pages), cell)

    def would_be_lost(self, node: Node, cell: int) -> bool:
        """Whether the cell has the only copy of pages that a resume may need."""
        where = self._tree.cells[cell]
        if node.resident & self._below(cell):
            return False
        return where.reach is None or in_reach(node, where.reach)

    def _below(self, cell: int) -> int:
        """The cells of the same anchor in slower tiers."""
        where = self._tree.cells[cell]
        return where.anchor_bits & -(where.bit << 1)

    def pages_to_take(self, node: Node, cell: int, pages: int) -> int:
        """How many pages to take off a victim's end when `pages` are wanted.

        Histories are cut in multiples of a batch. Windows and states are useless in part and go
        whole.
        """
        where = self._tree.cells[cell]
        if where.reach is not None or node.pages <= where.batch_pages:
            return node.pages
        return min(node.pages, -(-pages // where.batch_pages) * where.batch_pages)

    def tail(self, node: Node, pages: int) -> Node:
        """The last `pages` pages of the node as a node of their own."""
        if pages < node.pages:
            self._tree.split(node, node.pages - pages)
        return node

    @staticmethod
    def _alone(node: Node, cell: int) -> bool:
        """Whether this cell is all that keeps the node in the tree."""
        return node.resident == 1 << cell and not (node.arriving or node.children or any(node.pins))
