"""Prefix matching: the deepest boundary at which a prompt can resume, over all pools.

Walk the tree along the prompt, once. For every anchor, `run` is the number of contiguous pages up
to here that are readable in any of the tiers asked. A page boundary b is valid iff for every
required anchor `run ≥ min(reach, b)`; the deepest valid one wins. Nodes are uniform (see `node`):
a run grows or ends with a whole node, and only the ends of nodes, or of the match, can be the
deepest valid boundary: inside a node runs only grow, so where its end is not valid no earlier
page of it is.

Matching changes nothing. `Index.pin` turns a hit into a lease.

What a store holds is in no node: `deepest_boundary` asks the same rule of bitmaps. A test holds
the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.index.keys import Hidden, Prompt
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree
from kvtide.spec import ALL, ModelMemory, PoolSpec, Tier

READ_PARTS = 4
"""A fetch reads a quarter of the way at a time, each with all that its boundary needs."""

Bits = npt.NDArray[np.bool_]
"""For every page of a prompt: whether it is available."""
Pages = npt.NDArray[np.intp]
"""Numbers of pages, of one anchor."""


class Hit(NamedTuple):
    """The result of a match, in pages.

    boundary    where generation can resume
    matched     how far the tree has the tokens, resumable or not
    limit       the deepest boundary that leaves a token to compute
    nodes       the nodes along the match, whole but for the last one
    last_pages  how many pages of the last node match
    slowest     the slowest tier of the match
    tick        when it was made: a hit is valid until the index changes
    """

    prompt: Prompt
    boundary: int
    matched: int
    limit: int
    nodes: Sequence[Node]
    last_pages: int
    slowest: Tier
    tick: int

    @property
    def branches(self) -> tuple[int, ...]:
        """Where a checkpoint is missing: branch points beyond the boundary."""
        if self.boundary == self.matched:
            return ()
        ends = (node.end for node in self.nodes if len(node.children) > 1)
        return (*(end for end in ends if self.boundary < end < self.matched), self.matched)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a pool did not allow a deeper boundary than `at` (in tokens)."""

    pool: str
    at: int
    reason: str

    def __str__(self) -> str:
        return f"{self.pool}: {self.reason}, resumable up to {self.at}"


class Matcher:
    """The rule, prepared for one declaration. `counted`: the anchor by which pages count for a
    tier."""

    def __init__(self, memory: ModelMemory, tree: Tree) -> None:
        self._memory = memory
        self._tree = tree
        self._page_bytes = tree.page_bytes
        self._page_tokens = memory.page_tokens
        self._anchors = len(memory.anchors)
        self._shortfall = max(1, memory.holdback)
        self._required = 0
        self._histories = 0
        finite = []
        for number, pool in enumerate(memory.anchors):
            reach = pool.reuse.reach_pages(memory.page_tokens)
            if pool.reuse.required:
                self._required |= 1 << number
                self._histories |= (reach is None) << number
                finite += [(number, 1 << number, reach)] if reach is not None else []
        self._finite = tuple(finite)
        homes = sum(1 << cell for cell in tree.homes)
        self._looked_at = tuple((1 << (tier + 1) * self._anchors) - 1 | homes for tier in Tier)
        resident = (n for n, pool in enumerate(memory.anchors) if pool.hot is None)
        self.counted = next((n for n in resident if self._histories >> n & 1), 0)

    def match(self, prompt: Prompt, slowest: Tier = Tier.STORAGE) -> Hit:
        """The deepest resumable boundary, looking at the device and tiers down to `slowest`.

        At least one token is always left to compute: the request needs its logits.
        """
        limit = self._limit(prompt)
        nodes, last_pages = self._descend(prompt, limit)
        boundary, matched = self._deepest_valid(nodes, last_pages, slowest, self._required)
        tick = self._tree.tick
        return Hit(prompt, boundary, matched, max(limit, 0), nodes, last_pages, slowest, tick)

    def _limit(self, prompt: Prompt) -> int:
        """The deepest boundary that leaves a token to compute; below 0 for very short prompts."""
        return (prompt.tokens - self._shortfall) // self._page_tokens

    def shared_pages(self, prompt: Prompt, other: Prompt, beyond: int) -> int:
        """How many pages this prompt shares with another one; 0 if not more than `beyond`.

        The page after `beyond` is compared first: prompts that diverge earlier cost almost nothing.
        """
        max_pages = min(self._limit(prompt), len(other.body) // self._page_bytes)
        if max_pages <= beyond or isinstance(prompt.namespace, Hidden):
            return 0
        next_page = slice(beyond * self._page_bytes, (beyond + 1) * self._page_bytes)
        if prompt.body[next_page] != other.body[next_page]:
            return 0
        if (prompt.namespace, prompt.head) != (other.namespace, other.head):
            return 0
        pages = shared_pages(other.body, prompt.body, 0, max_pages, self._page_bytes)
        return pages if pages > beyond else 0

    def _descend(self, prompt: Prompt, limit: int) -> tuple[list[Node], int]:
        """The nodes whose tokens the prompt shares, and how many pages of the last one."""
        nodes: list[Node] = []
        node: Node | None = self._tree.roots.get((prompt.namespace, prompt.head))
        if node is None:
            return nodes, 0
        body, page_bytes = prompt.body, self._page_bytes
        at = offset = 0
        while at < limit:
            node = node.children.get(body[offset : offset + page_bytes])
            if node is None:
                break
            nodes.append(node)
            at += node.pages
            if at > limit or not body.startswith(node.tokens, offset):
                return nodes, self.shared(node, body, node.depth, limit)
            offset = at * page_bytes
        return nodes, nodes[-1].pages if nodes else 0

    def _deepest_valid(
        self, nodes: Sequence[Node], last_pages: int, slowest: Tier, required: int
    ) -> tuple[int, int]:
        """The deepest boundary valid for the `required` anchors (bits), and the match's end.

        `ended[a]` is where anchor a's last gap ended, so its run at `at` is `at - ended[a]`.
        """
        anchors, histories = self._anchors, self._histories & required
        finite = [pool for pool in self._finite if required & pool[1]] if self._finite else ()
        looked_at = self._looked_at[slowest]
        ended = [0] * anchors
        at = boundary = 0
        unbroken = True
        for number, node in enumerate(nodes, 1):
            at += node.pages if number < len(nodes) else last_pages
            held = node.resident & looked_at
            held |= held >> anchors | held >> 2 * anchors
            unbroken = unbroken and held & histories == histories
            valid = unbroken
            for anchor, bit, reach in finite:
                if not held & bit:
                    ended[anchor] = at
                if 0 < ended[anchor] > at - reach:
                    valid = False
            if valid:
                boundary = at
        return boundary, at

    def shared(self, node: Node, body: bytes, at: int, end: int) -> int:
        """How many of the node's pages the prompt has at page `at`, counting up to page `end`."""
        max_pages = min(node.pages, end - at)
        return shared_pages(node.tokens, body, at * self._page_bytes, max_pages, self._page_bytes)

    def pages_by_tier(self, hit: Hit) -> dict[Tier, int]:
        """The pages up to the boundary by the fastest tier that has them.

        Counted for the history; without one, all pages count for the tier of the last. Pages that
        were fetched to the host for this prompt count for storage.
        """
        assert hit.tick == self._tree.tick, "the index changed since this hit; match again"
        found: dict[Tier, int] = {}
        if not self._histories and hit.boundary:
            last = next(node for node in hit.nodes if node.end >= hit.boundary)
            tier = self._fastest(last, 0)
            if tier is Tier.HOST and hit.boundary - 1 in hit.prompt.fetched:
                tier = Tier.STORAGE
            return {tier: hit.boundary}
        for node in hit.nodes:
            pages = min(node.pages, hit.boundary - node.depth)
            if pages > 0:
                tier = self._fastest(node, self.counted)
                here = range(node.depth, node.depth + pages)
                brought = _overlap(here, hit.prompt.fetched) if tier is Tier.HOST else 0
                for where, count in ((tier, pages - brought), (Tier.STORAGE, brought)):
                    if count:
                        found[where] = found.get(where, 0) + count
        return found

    def _fastest(self, node: Node, anchor: int) -> Tier:
        held = node.resident >> anchor
        return next(tier for tier in Tier if held >> tier * self._anchors & 1)

    # -- why not deeper ---------------------------------------------------------------------

    def why(self, hit: Hit) -> list[Stop]:
        """What kept the boundary from being deeper, per pool; empty if nothing could be deeper."""
        assert hit.tick == self._tree.tick, "the index changed since this hit; match again"
        if hit.boundary == hit.limit:
            return []
        required = [pool for pool in self._memory.anchors if pool.reuse.required]
        if hit.boundary == hit.matched:
            at = hit.boundary * self._page_tokens
            return [
                Stop(pool.name, at, "no prompt with these tokens was kept") for pool in required
            ]
        stops = [self._stop(hit, pool) for pool in required]
        held_back = [stop for stop in stops if stop.at < hit.matched * self._page_tokens]
        return held_back or [
            Stop(s.pool, s.at, "no boundary suits all pools at once") for s in stops
        ]

    def _stop(self, hit: Hit, pool: PoolSpec) -> Stop:
        """How deep this pool alone would let the prompt resume, and why not deeper."""
        number = self._memory.anchors.index(pool)
        limit, _ = self._deepest_valid(hit.nodes, hit.last_pages, hit.slowest, 1 << number)
        tiers = range(number, (hit.slowest + 1) * self._anchors, self._anchors)
        cells = {*tiers, self._tree.homes[number]}
        beyond = [node for node in hit.nodes if node.end > limit]
        if any(node.arriving >> cell & 1 for node in beyond for cell in cells):
            reason = "pages are still arriving"
        elif pool.reuse.reach is ALL:
            reason = "pages were given up"
        else:
            reason = "no checkpoint was kept further on"
        return Stop(pool.name, limit * self._page_tokens, reason)


def _overlap(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


def shared_pages(run: bytes, body: bytes, offset: int, max_pages: int, page_bytes: int) -> int:
    """How many of the first `max_pages` pages of `run` stand in `body` at `offset`."""
    count = max_pages * page_bytes
    if body.startswith(run[:count], offset):
        return max_pages
    ours = np.frombuffer(run, np.uint32, count // 4)
    theirs = np.frombuffer(body, np.uint32, count // 4, offset)
    return int((ours != theirs).argmax()) * 4 // page_bytes


# -- the rule over bitmaps: what a store may bring ------------------------------------------


def deepest_boundary(memory: ModelMemory, limit: int, there: Mapping[str, Bits]) -> int:
    """The deepest boundary up to `limit` that is valid with these pages."""
    valid = np.ones(limit + 1, bool)
    for pool in memory.anchors:
        if not pool.reuse.required:
            continue
        gaps = np.concatenate(([0], np.cumsum(~there[pool.name][:limit])))
        reach = pool.reuse.reach_pages(memory.page_tokens)
        if reach is None:
            valid &= gaps == 0
        else:
            before = gaps[np.maximum(np.arange(limit + 1) - reach, 0)]
            valid &= gaps == before
    return int(np.flatnonzero(valid)[-1])


def read_order(
    memory: ModelMemory, boundary: int, held: Mapping[str, Bits], there: Mapping[str, Bits]
) -> list[tuple[str, Pages]]:
    """The pages to read for a boundary: part by part, each with all that its own end needs."""
    steps = (boundary * n // READ_PARTS for n in range(1, READ_PARTS + 1))
    ends = sorted({deepest_boundary(memory, step, there) for step in steps} - {0})
    left = {pool.name: ~held[pool.name] & there[pool.name] for pool in memory.anchors}
    runs: list[tuple[str, Pages]] = []
    for end in ends:
        for pool in memory.anchors:
            reach = pool.reuse.reach_pages(memory.page_tokens)
            start = 0 if reach is None else max(0, end - reach)
            runs.append((pool.name, start + np.flatnonzero(left[pool.name][start:end])))
            left[pool.name][start:end] = False
    return runs


def missing_pages(
    memory: ModelMemory, boundary: int, held: Mapping[str, Bits]
) -> list[tuple[str, Pages]]:
    """The pages that a resume at one boundary needs and that are not held; histories first."""
    runs: list[tuple[str, Pages]] = []
    for pool in sorted(memory.anchors, key=lambda anchor: anchor.reuse.reach is not ALL):
        reach = pool.reuse.reach_pages(memory.page_tokens)
        start = 0 if reach is None else max(0, boundary - reach)
        runs.append((pool.name, start + np.flatnonzero(~held[pool.name][start:boundary])))
    return runs
