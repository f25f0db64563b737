"""Page tables: in which slots of its home tier an anchor has the pages of a lease."""

from __future__ import annotations

import numpy as np

from kvtide.index.tree.holds import IndexLease
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree
from kvtide.spec import Slots


def page_table(tree: Tree, lease: IndexLease, anchor: int) -> Slots:
    """The slot of every page up to `lease.reserved`, at home; -1 where there is none."""
    table, cell = np.full(lease.reserved, -1, np.int32), tree.homes[anchor]
    for node in tree.path(lease.node):
        slots = node.slots[cell]
        if slots is not None:
            table[node.depth : node.depth + node.pages] = slots
    for segment in lease.segments:
        if cell in segment.slots:
            table[segment.start : segment.end] = segment.slots[cell]
    return table


def arriving_table(tree: Tree, lease: IndexLease, anchor: int) -> Slots:
    """The page table, with the slots of pages that are arriving."""
    table, cell = page_table(tree, lease, anchor), tree.homes[anchor]
    for node in tree.path(lease.node):
        if node.slots[cell] is None and node.arriving >> cell & 1:
            table[node.depth : node.depth + node.pages] = _arriving_slots(tree, node, cell)
    return table


def _arriving_slots(tree: Tree, node: Node, cell: int) -> Slots:
    """The slots that an arrival has for the node's pages. Arrivals here follow one path."""
    assert node.arrivals is not None
    arrival = tree.arrivals[node.arrivals[cell]]
    part = next(p for p in arrival.parts if p.cell == cell and p.start <= node.depth < p.end)
    return part.slots[node.depth - part.start : node.depth - part.start + node.pages]
