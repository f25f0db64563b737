"""The eviction order: one queue per cell, repaired lazily.

A queue is a heap of (key, entry number, node). A node enters when it becomes evictable: resident,
unpinned and, in a pool that keeps the whole history, without a child in the same cell (a prefix
must not lose its middle). Its key is not updated when the node is used again; an entry that comes
to the top with an outdated key is put back under the present one. A key that may have *fallen* is
entered a second time (`offer_again`): a lazy update would keep the better victim from the top.
`Node.queued` has the number of the entry that counts; others are void. No operation looks at more
nodes than it moves, so a victim costs O(log n).

Void entries and those of nodes that left are swept a few per push: once the heap has grown to twice
what it kept last time, a second heap is begun, and entries move there from the end of the first.

Pools with a finite reach (windows, states) sort by two classes first. Pages out of every reach go
before all others: no leaf and no branch point needs them. Their children do not matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from kvtide.index.evict.policies import Policy
from kvtide.index.tree.node import Node

SWEEP_FROM = 1024
"""Entries below which a heap is not worth sweeping."""
SWEPT_PER_PUSH = 4
"""Entries that one push moves: the old heap is gone long before the new one has doubled."""

Key = Any
QueueEntry = tuple[Key, int, Node]


class EvictionQueue:
    """The evictable nodes of one cell. `reach` is the pool's reach in pages, None for ALL."""

    __slots__ = (
        "_bit",
        "_cell",
        "_entries",
        "_heap",
        "_key",
        "_reach",
        "_rises",
        "_sweep_at",
        "_swept",
    )

    def __init__(self, cell: int, reach: int | None, policy: Policy) -> None:
        self._cell = cell
        self._bit = 1 << cell
        self._reach = reach
        self._rises = policy.rises
        self._key = policy.key if reach is None else _reach_first(policy.key, reach)
        self._heap: list[QueueEntry] = []
        self._swept: list[QueueEntry] = []  # The old heap, while entries move from it.
        self._sweep_at = SWEEP_FROM
        self._entries = 0

    def nodes(self) -> set[int]:
        """The identities of the nodes that stand in the queue, for checks."""
        cell, entries = self._cell, (*self._heap, *self._swept)
        return {id(node) for _, number, node in entries if node.queued[cell] == number}

    def __len__(self) -> int:
        """How many entries there are, void ones included."""
        return len(self._heap) + len(self._swept)

    def evictable(self, node: Node) -> bool:
        cell = self._cell
        if not node.resident & self._bit or node.pins[cell]:
            return False
        return self._reach is not None or not node.kids[cell]

    def offer(self, node: Node) -> None:
        """Enter the node if it is evictable and not entered yet."""
        cell = self._cell
        if node.pins[cell] or not node.resident & self._bit or (node.queued[cell] and self._rises):
            return
        if self._reach is not None or not node.kids[cell]:
            self._push(node)

    def offer_again(self, node: Node) -> None:
        """Enter the node under its present key although an entry may exist: the key fell."""
        if self.evictable(node):
            self._push(node)

    def pop(self) -> Node | None:
        """The node that should lose its pages next; None when nothing is evictable."""
        cell = self._cell
        while heap := self._first():
            key, number, node = heap[0]
            if node.queued[cell] == number and self.evictable(node):
                present = self._key(node)
                if present != key:
                    heapq.heapreplace(heap, (present, number, node))
                    continue
                heapq.heappop(heap)
                node.queued[cell] = 0
                return node
            self._discard(heapq.heappop(heap))
        return None

    def _first(self) -> list[QueueEntry]:
        """The heap with the smallest entry; empty when both are."""
        heap, swept = self._heap, self._swept
        return swept if swept and (not heap or swept[0] < heap[0]) else heap

    def _push(self, node: Node) -> None:
        self._entries += 1
        node.queued[self._cell] = self._entries
        heapq.heappush(self._heap, (self._key(node), self._entries, node))
        if self._swept:
            self._sweep()
        elif len(self._heap) >= self._sweep_at:
            self._heap, self._swept = [], self._heap

    def _sweep(self) -> None:
        """Move a few entries that count to the new heap. A heap's end can go: it stays a heap."""
        cell = self._cell
        for _ in range(min(SWEPT_PER_PUSH, len(self._swept))):
            entry = self._swept.pop()
            _, number, node = entry
            if node.queued[cell] == number and self.evictable(node):
                heapq.heappush(self._heap, entry)
            else:
                self._discard(entry)
        if not self._swept:
            self._sweep_at = max(SWEEP_FROM, 2 * len(self._heap))

    def _discard(self, entry: QueueEntry) -> None:
        """The entry is gone; if it was the one that counted, the node is in the queue no more."""
        _, number, node = entry
        if node.queued[self._cell] == number:
            node.queued[self._cell] = 0


def _reach_first(key: Callable[[Node], Key], reach: int) -> Callable[[Node], Key]:
    """Order by class first: out of every reach, then the rest."""
    return lambda node: (in_reach(node, reach), key(node))


def in_reach(node: Node, reach: int) -> bool:
    """Whether the reach of a leaf's end or of a branch point covers the node's last page.

    Walks down single children, each at least a page long: fewer than `reach` steps.
    """
    limit = node.depth + node.pages + reach
    below = node
    while len(below.children) == 1:
        (below,) = below.children.values()
        if below.depth + below.pages >= limit:
            return False
    return True
