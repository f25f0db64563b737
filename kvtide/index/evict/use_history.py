"""What the tree's nodes tell `reuse_rates`: their uses, and what becomes of evicted ones.

A *ghost* is what is remembered of an evicted branch: its runs of pages, deepest first, with how
often they were used and when last. It is found by the first page behind the cut. When a request
computes that page again, the branch counts as used again, and the new node as used as often as the
ghost. When the pages above a ghost are evicted too, both become one. The oldest ghosts go first:
there are as many as nodes, and some thousands at least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtide.index.evict.reuse_rates import ReuseRates
from kvtide.index.tree.node import Node

MIN_GHOSTS = 4096

GhostRun = tuple[int, int, int]
"""How often pages were used again, the tick of their last use, and how many they are."""


class UseHistory:
    def __init__(self, page_bytes: int) -> None:
        self.rates = ReuseRates()
        self._page_bytes = page_bytes
        self._ghosts: OrderedDict[bytes, list[GhostRun]] = OrderedDict()

    def __len__(self) -> int:
        """How many ghosts there are."""
        return len(self._ghosts)

    # -- uses -------------------------------------------------------------------------------

    def pinned(self, node: Node, tick: int) -> None:
        """A request is about to use the path to this node."""
        rates = self.rates
        rates.begin_request(tick)
        hits, last, pages = node.hits, node.last, 0
        while node.parent is not None:
            if node.last != last or node.hits != hits:
                rates.count_reuse(hits, last, pages)
                hits, last, pages = node.hits, node.last, 0
            pages += node.pages
            node = node.parent
        rates.count_reuse(hits, last, pages)

    def released(self, node: Node, tick: int) -> None:
        """The request that used the path ends: from now on its pages are unused."""
        if self.rates.same_cohort(node.last, tick):
            return
        while node.parent is not None:
            self.touched(node, tick)
            node = node.parent

    def touched(self, node: Node, tick: int) -> None:
        """The node's last use is about to be this tick."""
        self.rates.count(node.hits, node.last, -node.pages)
        self.rates.count(node.hits, tick, node.pages)

    # -- new pages --------------------------------------------------------------------------

    def computed(self, node: Node, tick: int) -> None:
        """The node is new."""
        runs = self._ghosts.pop(node.tokens[: self._page_bytes], None)
        pages = node.pages
        if runs is not None:
            node.hits = runs[-1][0] + 1
            pages = self._reused(runs, pages)
        self.rates.count(node.hits, tick, pages)

    def extended(self, node: Node, tokens: bytes, pages: int, tick: int) -> None:
        """The node is about to grow by these pages."""
        runs = self._ghosts.pop(tokens[: self._page_bytes], None)
        node.ghost = None
        self.touched(node, tick)
        if runs is not None:
            pages = self._reused(runs, pages)
        self.rates.count(node.hits, tick, pages)

    def _reused(self, runs: list[GhostRun], pages: int) -> int:
        """So many pages of an evicted branch are used again; returns how many more are new."""
        for hits, last, count in reversed(runs):
            count = min(count, pages)
            self.rates.count_reuse(hits, last, count)
            pages -= count
        return pages

    # -- evicted pages ----------------------------------------------------------------------

    def left(self, nodes: Sequence[Node], above: Node, limit: int) -> None:
        """These nodes, which followed each other, deepest first, were evicted from below `above`.

        `limit`: how many ghosts to keep, if there are that many already.
        """
        ghost = nodes[0].ghost
        runs = (self._ghosts.pop(ghost, None) if ghost is not None else None) or []
        for node in nodes:
            _add(runs, node.hits, node.last, node.pages)
        self._keep(nodes[-1].tokens[: self._page_bytes], runs, above, limit)

    def shortened(self, node: Node, pages: int, limit: int) -> None:
        """All but the first `pages` pages of a leaf are about to be evicted."""
        ghost = node.ghost
        runs = (self._ghosts.pop(ghost, None) if ghost is not None else None) or []
        _add(runs, node.hits, node.last, node.pages - pages)
        start = pages * self._page_bytes
        self._keep(node.tokens[start : start + self._page_bytes], runs, node, limit)

    def _keep(self, key: bytes, runs: list[GhostRun], above: Node, limit: int) -> None:
        above.ghost = key
        self._ghosts[key] = runs
        if len(self._ghosts) > limit and len(self._ghosts) > MIN_GHOSTS:
            self._ghosts.popitem(last=False)


def _add(runs: list[GhostRun], hits: int, last: int, pages: int) -> None:
    if runs:
        below = runs[-1]
        if below[0] == hits and below[1] == last:
            runs[-1] = (hits, last, below[2] + pages)
            return
    runs.append((hits, last, pages))
