"""Pins: which pages must stay in a cell.

A pin covers whole nodes on one path (see `holds.Pin`). Counts are kept per node and cell, and a
cell counts its pinned pages: those that are resident and not pinned can be evicted.
"""

from __future__ import annotations

from kvtide.index.tree.cells import Cell
from kvtide.index.tree.holds import Pin
from kvtide.index.tree.node import Node
from kvtide.spec import Tier


class Pins:
    def __init__(self, cells: list[Cell], anchors: int) -> None:
        self._cells = cells
        self._anchors = anchors

    def span(self, cell: int, node: Node, start: int) -> Pin:
        """Pin whole nodes of a cell from `node` up to the one that holds page `start`."""
        pin, above = self._run(cell, node, start, 1 << cell)
        assert above.depth + above.pages <= start, "only resident pages can be pinned"
        return pin

    def fastest(
        self, anchor: int, node: Node, start: int, slowest: Tier = Tier.STORAGE
    ) -> list[Pin]:
        """Pin an anchor from `node` up to page `start`, each node in the fastest tier it is in.

        Nodes that are in none down to `slowest` are passed over.
        """
        pins: list[Pin] = []
        cells = (slowest + 1) * self._anchors
        above: Node = node
        while above.depth + above.pages > start:
            cell, mask = anchor, 1 << anchor
            while cell < cells and not above.resident & mask:
                cell += self._anchors
                mask |= 1 << cell
            if cell < cells:
                pin, above = self._run(cell, above, start, mask)
                pins.append(self._with_ancestors(pin, above))
            else:
                assert above.parent is not None
                above = above.parent
        return pins

    def resident(self, cell: int, node: Node) -> list[Pin]:
        """Pin every node on the path to `node` that is in the cell."""
        pins: list[Pin] = []
        above: Node = node
        while (parent := above.parent) is not None:
            if above.resident >> cell & 1:
                pin, above = self._run(cell, above, 0, 1 << cell)
                pins.append(pin)
            else:
                above = parent
        return pins

    def _with_ancestors(self, pin: Pin, above: Node) -> Pin:
        """A history cannot lose the pages above pinned ones: pin what the cell has of them, too.

        So that the pages that are not pinned are just those that could be evicted.
        """
        if self._cells[pin.cell].reach is not None or not above.resident >> pin.cell & 1:
            return pin
        return Pin(pin.cell, pin.node, self.upwards(pin.cell, above).start)

    def whole(self, cell: int, node: Node) -> Pin:
        """Pin the node; of a history with all pages above, which must stay too."""
        if self._cells[cell].reach is None:
            return self.upwards(cell, node)
        return self.span(cell, node, node.depth)

    def upwards(self, cell: int, node: Node) -> Pin:
        """Pin the node and those above it, as far as the cell has them without a gap."""
        return self._run(cell, node, 0, 1 << cell)[0]

    def below(self, cell: int, node: Node, above: Node) -> None:
        """Pin the nodes from `node` up to, and without, `above`: extends a pin that ended there."""
        if node is not above:
            self._run(cell, node, above.depth + above.pages, 1 << cell)

    def _run(self, cell: int, node: Node, start: int, mask: int) -> tuple[Pin, Node]:
        """Pin nodes that of the cells in `mask` are in this one only; also where it stopped."""
        where = self._cells[cell]
        bit = where.bit
        top = above = node
        while above.depth + above.pages > start and above.resident & mask == bit:
            pins = above.pins
            if not pins[cell]:
                where.pinned_pages += above.pages
            pins[cell] += 1
            top = above
            assert above.parent is not None
            above = above.parent
        return Pin(cell, node, top.depth), above

    def unpin(self, pin: Pin) -> None:
        cell, start = pin.cell, pin.start
        where = self._cells[cell]
        is_history = where.reach is None
        node: Node | None = pin.node
        while node is not None and node.depth >= start and node.pages:
            pins = node.pins
            pins[cell] -= 1
            if not pins[cell]:
                where.pinned_pages -= node.pages
                if not is_history:  # It may have gone out of reach meanwhile.
                    where.queue.offer_again(node)
                elif not node.kids[cell]:
                    where.queue.offer(node)
            node = node.parent
