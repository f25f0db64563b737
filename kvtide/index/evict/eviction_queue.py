"""The eviction order: one queue per cell, repaired lazily.

A queue is a heap of (key, entry number, node). A node enters when it becomes evictable: resident,
unpinned and, in a pool that keeps the whole history, without a child in the same cell (a prefix
must not lose its middle). Its key is not updated when the node is used again; an entry that comes
to the top with an outdated key is put back under the present one. A key that may have *fallen* is
entered a second time (`offer_again`): a lazy update would keep the better victim from the top. No
operation looks at more nodes than it moves, so a victim costs O(log n).

Pools with a finite reach (windows, states) sort by two classes first. Pages out of every reach go
before all others: no leaf and no branch point needs them. Their children do not matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from kvtide.index.evict.policies import Policy
from kvtide.index.tree.node import Node

Key = Any


class EvictionQueue:
    """The evictable nodes of one cell. `reach` is the pool's reach in pages, None for ALL."""

    __slots__ = (
        "_bit",
        "_cell",
        "_compact_at",
        "_entries",
        "_heap",
        "_key",
        "_reach",
        "_rises",
    )

    def __init__(self, cell: int, reach: int | None, policy: Policy) -> None:
        self._cell = cell
        self._bit = 1 << cell
        self._reach = reach
        self._rises = policy.rises
        self._key = policy.key if reach is None else _reach_first(policy.key, reach)
        self._heap: list[tuple[Key, int, Node]] = []
        self._entries = 0
        self._compact_at = 1024

    def nodes(self) -> set[int]:
        """The identities of the nodes that stand in the queue, for checks."""
        return {id(node) for _, _, node in self._heap}

    def evictable(self, node: Node) -> bool:
        cell = self._cell
        if not node.resident & self._bit or node.pins[cell]:
            return False
        return self._reach is not None or not node.kids[cell]

    def offer(self, node: Node) -> None:
        """Enter the node if it is evictable and not entered yet."""
        cell, bit = self._cell, self._bit
        if node.pins[cell] or not node.resident & bit or (node.queued & bit and self._rises):
            return
        if self._reach is not None or not node.kids[cell]:
            self._push(node)

    def offer_again(self, node: Node) -> None:
        """Enter the node under its present key although an entry may exist: the key fell."""
        if self.evictable(node):
            self._push(node)

    def pop(self) -> Node | None:
        """The node that should lose its pages next; None when nothing is evictable."""
        heap = self._heap
        while heap:
            key, number, node = heap[0]
            present = self._key(node) if self.evictable(node) else None
            if present is not None and present != key:
                heapq.heapreplace(heap, (present, number, node))
                continue
            heapq.heappop(heap)
            node.queued &= ~self._bit
            if present is not None:
                return node
        return None

    def _push(self, node: Node) -> None:
        if len(self._heap) >= self._compact_at:
            self._compact()
        node.queued |= self._bit
        self._entries += 1
        heapq.heappush(self._heap, (self._key(node), self._entries, node))

    def _compact(self) -> None:
        """Drop second entries and entries of nodes that left; each waits for as many pushes."""
        nodes = {id(node): (number, node) for _, number, node in sorted(self._heap, key=_number)}
        kept = [
            (self._key(node), number, node)
            for number, node in nodes.values()
            if self.evictable(node)
        ]
        for _, _, node in self._heap:
            node.queued &= ~self._bit
        for _, _, node in kept:
            node.queued |= self._bit
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = max(1024, 2 * len(kept))


def _reach_first(key: Callable[[Node], Key], reach: int) -> Callable[[Node], Key]:
    """Order by class first: out of every reach, then the rest."""
    return lambda node: (in_reach(node, reach), key(node))


def _number(entry: tuple[Key, int, Node]) -> int:
    return entry[1]


def in_reach(node: Node, reach: int) -> bool:
    """Whether the reach of a leaf's end or of a branch point covers the node's last page.

    Walks down single children, each at least a page long: fewer than `reach` steps.
    """
    limit = node.end + reach
    below = node
    while len(below.children) == 1:
        (below,) = below.children.values()
        if below.end >= limit:
            return False
    return True
