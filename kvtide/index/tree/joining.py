"""Joining nodes in which nothing differs any more.

Every checkpoint begins and ends a node, and so does every turn of a conversation. When the
checkpoint is dropped, its node is joined with its neighbours, so that paths stay short. The lowest
node of a run takes the pages of the others: pins and leases name the node at which they end.
"""

from __future__ import annotations

import numpy as np

from kvtide.index.tree.node import MAX_NODE_PAGES, Node


def joinable(node: Node, finite_bits: int) -> list[Node]:
    """The node with its neighbours below and above from which it differs in nothing, topmost first.

    `finite_bits` are the cells of windows and states.
    """
    run = [node]
    pages = node.pages
    if len(node.children) == 1:
        (below,) = node.children.values()
        if pages + below.pages <= MAX_NODE_PAGES and _alike(node, below, finite_bits):
            run.append(below)
            pages += below.pages
    above = node.parent
    fits = above is not None and 0 < above.pages <= MAX_NODE_PAGES - pages
    if above is not None and fits and _alike(above, node, finite_bits):
        run.insert(0, above)
    return run


def _alike(upper: Node, lower: Node, finite_bits: int) -> bool:
    """Held in the same cells, and neither in use nor a checkpoint, whose pages go singly."""
    return (
        upper.resident == lower.resident
        and not upper.resident & finite_bits
        and len(upper.children) == 1
        and not (upper.arriving or lower.arriving or upper.leases)
        and not (any(upper.pins) or any(lower.pins))
    )


def merge(run: list[Node], page_bytes: int) -> None:
    """The lowest node takes the pages of all others, each copied once, however many they are."""
    top, lowest = run[0], run[-1]
    assert top.parent is not None
    top.parent.children[top.tokens[:page_bytes]] = lowest
    for cell, slots in enumerate(lowest.slots):
        if slots is not None:
            lowest.slots[cell] = np.concatenate([node.resident_slots(cell) for node in run])
    lowest.tokens = b"".join([node.tokens for node in run])
    lowest.depth, lowest.parent = top.depth, top.parent
    for upper in run[:-1]:
        lowest.pages += upper.pages
        lowest.last = max(lowest.last, upper.last)
        lowest.hits = max(lowest.hits, upper.hits)
        lowest.priority = max(lowest.priority, upper.priority)
        lowest.stop = max(lowest.stop, upper.stop)
        lowest.ahead = lowest.ahead or upper.ahead
        lowest.sought = min(lowest.sought, upper.sought)
        lowest.departed &= upper.departed
        upper.resident = 0
        upper.parent = None
