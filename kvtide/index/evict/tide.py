"""The default eviction policy: LRU that bets against itself with what it has won so far.

A leaf is worth (hits + 1) / (age + 256): how often it was used against how long ago. The victim is
the sampled leaf that is worth least, if that is safe, and else exactly the one LRU would take.

What is safe is measured. LRU with the same slots would hold the pages that were used last. A count
of pages by the tick of their last use, evicted ones included, therefore shows for every request
what LRU would have found. `_lead` is how far the policy is ahead of LRU, in pages. A page that LRU
would still hold and the policy does not (`_owed`) costs at most one hit, and on average what an
average page earns. Evicting one more such leaf is paid from half of the lead, or from 1% of what
LRU would have found. So the policy cannot fall behind LRU by much more than 1%, and it departs from
LRU further while that pays. Leaves that LRU would have dropped already cost nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from kvtide.index.evict.eviction_queue import Policy
from kvtide.index.keys import TOKEN_BYTES
from kvtide.index.tree.node import Node

SLACK = 0.01
YOUNG_TICKS = 256
EWMA_DECAY = 0.9999577
"""What a tick leaves of the scores: half of them after 16,384 ticks."""

MIN_GHOSTS = 1024
PAGES_PER_GHOST = 16

Ghost = tuple[int, int, int]
"""Tick of the last use, pages, hits of a run that was evicted."""


class Tide(Policy):
    """One cell's policy; it keeps the tick of a node's last use in `node.marks[cell]`."""

    bets = True

    def __init__(self, cell: int = 0, slots: int = 0) -> None:
        self._cell = cell
        self._slots = slots
        self._now = 0
        self._oldest = 1
        self._pages: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._held = 0
        self._owed = 0
        self._lead = self._lru = self._asked = 0.0
        self._ghosts: dict[int, Ghost] = {}
        self._max_ghosts = max(MIN_GHOSTS, slots // PAGES_PER_GHOST)

    def key(self, node: Node) -> int:
        return node.last

    # -- what happens -----------------------------------------------------------------------

    def asked(self, pages: int) -> None:
        """A request for so many pages begins."""
        while (
            self._oldest < self._now
            and self._held - self._pages.get(self._oldest, 0) >= self._slots
        ):
            self._held -= self._pages.pop(self._oldest, 0)
            self._owed -= self._gone.pop(self._oldest, 0)
            self._oldest += 1
        self._now += 1
        self._pages[self._now] = self._gone[self._now] = 0
        self._lead *= EWMA_DECAY
        self._lru *= EWMA_DECAY
        self._asked = self._asked * EWMA_DECAY + pages

    def used(self, node: Node) -> None:
        last = node.marks[self._cell]
        if last != self._now:
            node.marks[self._cell] = self._now
            self._lead += node.pages
            self._found_by_lru(last, node.pages)
            self._leave(last, node.pages, 0)
            self._join(self._now, node.pages)

    def inserted(self, node: Node, first: int) -> None:
        """Pages from number `first` on are new to the cell. Some may come back as ghosts."""
        if first:
            self._leave(node.marks[self._cell], first, 0)
            self._join(self._now, first)
        node.marks[self._cell] = self._now
        at = first
        while at < node.pages and (ghost := self._ghosts.pop(_name(node, at), None)) is not None:
            last, pages, hits = ghost
            node.hits = max(node.hits, hits + 1)
            self._found_by_lru(last, min(pages, node.pages - at))
            self._leave(last, pages, pages)
            at += pages
        self._join(self._now, node.pages - first)

    def removed(self, node: Node, first: int) -> None:
        """Pages from number `first` on leave the cell; LRU may have kept them."""
        last, pages = node.marks[self._cell], node.pages - first
        if last >= self._oldest:
            self._gone[last] += pages
            self._owed += pages
        name = _name(node, first)
        self._forget(name)
        self._ghosts[name] = (last, pages, node.hits)
        if len(self._ghosts) > self._max_ghosts:
            self._forget(next(iter(self._ghosts)))

    def withdrawn(self, node: Node) -> None:
        """LRU would not find them either: nothing is owed, and there is no ghost."""
        self._leave(node.marks[self._cell], node.pages, 0)

    def merged(self, upper: Node, lower: Node) -> None:
        """The lower node takes over the upper one's pages, which were used no earlier."""
        self._leave(lower.marks[self._cell], lower.pages, 0)
        lower.marks[self._cell] = upper.marks[self._cell]
        self._join(lower.marks[self._cell], lower.pages)

    # -- what LRU would hold ----------------------------------------------------------------

    def _found_by_lru(self, last: int, asked: int) -> None:
        """Pages last used at `last` are asked for: LRU would have had them, or some, or none."""
        if last < self._oldest:
            return
        if last == self._oldest:
            room = self._slots - self._held + self._pages[last]
            asked = max(0, min(asked, room))
        self._lru += asked
        self._lead -= asked

    def _leave(self, last: int, pages: int, gone: int) -> None:
        if last >= self._oldest:
            self._pages[last] -= pages
            self._gone[last] -= gone
            self._held -= pages
            self._owed -= gone

    def _join(self, last: int, pages: int) -> None:
        if last >= self._oldest:
            self._pages[last] += pages
            self._held += pages

    def _forget(self, name: int) -> None:
        last, pages, _ = self._ghosts.pop(name, (-1, 0, 0))
        self._leave(last, pages, pages)

    # -- the victim -------------------------------------------------------------------------

    def victim(self, oldest: Node, some: Callable[[], list[Node]]) -> Node:
        """The leaf worth least among LRU's victim and a sample, as far as can be afforded."""
        cell, first, afford = self._cell, self._oldest, self._affordable()
        last = oldest.marks[cell]
        if afford < 1 and last >= first:
            return oldest
        now = self._now + YOUNG_TICKS
        best, worth = oldest, (oldest.hits + 1) / (now - last)
        for node in some():
            last = node.marks[cell]
            value = (node.hits + 1) / (now - last)
            if value < worth and (last < first or node.pages <= afford):
                best, worth = node, value
        return best

    def _affordable(self) -> float:
        """How many pages that LRU holds may be evicted: lead and slack, less what is owed."""
        funds = self._lead / 2 if self._lead > 0 else self._lead
        price = min(1.0, self._lru / self._asked) if self._asked else 1.0
        return funds + SLACK * self._lru - self._owed * price


def _name(node: Node, page: int) -> int:
    """A page by its depth and tokens: not unique, but good enough to recognise a ghost."""
    size = len(node.tokens) // node.pages
    tokens = memoryview(node.tokens)[page * size : (page + 1) * size]
    return zlib.crc32(tokens, node.depth + page) << 32 | zlib.adler32(tokens[: 16 * TOKEN_BYTES])
