"""The tree in outline, for people: its widest branches, found a few nodes at a time.

A tree may have a million nodes, and its owner serves requests. So `advance` visits a bounded number
of nodes, and continues in the next call where it stopped. The tree changes between two calls: the
outline is that of no single moment. Its widths still add up, since every branch has what was
counted below it.

A branch that is narrower than 1/512 of the tree, or deeper than 24 nodes, is counted in the one
above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.index.keys import TOKEN_BYTES
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree
from kvtide.spec import Tier

NARROWEST = 512
"""A branch below this fraction of the tree could not be seen."""
MAX_LEVELS = 24
MAX_NAMES = 3
SHOWN_TOKENS = 24
"""The first tokens of a run, for readers that may show text."""

Standing = Callable[[], Mapping[int, Sequence[str]]]
"""Names of whatever stands at the end of a node, by the node's `id`."""


@dataclass(slots=True, eq=False)
class TreeBranch:
    """A node and all below it.

    start    where the node's run begins, in tokens
    tokens   of the run; `width` of all that is below it, too
    tiers    where the run is, fastest first; `arriving` in one of them
    last     the tick of its last use
    standing how many names stand in the branch, of which `names` are some
    head     the packed first tokens of the run
    node     the node; it may leave the tree, or be split or merged, later
    stored   whether a store has its last page: set by the caller that asks one
    """

    start: int = 0
    tokens: int = 0
    width: int = 0
    tiers: tuple[Tier, ...] = ()
    arriving: bool = False
    hits: int = 0
    last: int = 0
    standing: int = 0
    names: tuple[str, ...] = ()
    head: bytes = b""
    node: Node | None = None
    stored: bool = False
    children: list[TreeBranch] = field(default_factory=list)

    def widest(self, count: int) -> list[tuple[int, TreeBranch]]:
        """The widest branches below this one with the number of their parent in the list, or -1.

        A parent stands before its children, which are never wider.
        """
        found: list[tuple[int, TreeBranch]] = []
        queue = [(-child.width, n, -1, child) for n, child in enumerate(self.children)]
        heapq.heapify(queue)
        numbers = len(queue)
        while queue and len(found) < count:
            *_, parent, branch = heapq.heappop(queue)
            for child in branch.children:
                heapq.heappush(queue, (-child.width, numbers, len(found), child))
                numbers += 1
            found.append((parent, branch))
        return found


@dataclass(slots=True, eq=False)
class _Open:
    """A node whose children are being visited; `branch` is where they are counted."""

    branch: TreeBranch
    pending: list[Node]
    level: int


class TreeSurvey:
    """`counted` is the anchor whose pages count. `found` is the last complete outline: a branch
    without tokens of its own, above all others; None before there is one."""

    def __init__(self, tree: Tree, counted: int, standing: Standing = dict) -> None:
        self._tree, self._standing_at = tree, standing
        self._page_tokens = tree.page_bytes // TOKEN_BYTES
        self._cells = [(tier, 1 << tree.cell(tier, counted)) for tier in Tier]
        self._open: list[_Open] = []
        self._standing: Mapping[int, Sequence[str]] = {}
        self._narrowest = 0
        self.found: TreeBranch | None = None
        self.visited = self.nodes = 0

    def advance(self, nodes: int) -> bool:
        """Visit so many nodes at most; whether the outline is complete, and the next one begins."""
        if not self._open:
            self._begin()
        return any(not self._visit() for _ in range(nodes))

    def _begin(self) -> None:
        tree = self._tree
        resident = max(cell.resident_pages for cell in tree.cells)
        self._narrowest = max(1, resident * self._page_tokens // NARROWEST)
        self._standing, self.visited = self._standing_at(), 0
        roots = [root for root in tree.roots.values() if not root.hidden]
        tops = [node for root in reversed(roots) for node in root.children.values()]
        self._open.append(_Open(TreeBranch(), tops, 0))

    def _visit(self) -> bool:
        """Visit the next node; False if there is none."""
        here = self._open[-1]
        while not here.pending:
            self._open.pop()
            if not self._open:
                self.found, self.nodes, self._standing = here.branch, self.visited, {}
                return False
            self._close(here.branch, self._open[-1].branch)
            here = self._open[-1]
        node = here.pending.pop()
        if node.parent is None:  # It was removed or merged since.
            return True
        self.visited += 1
        branch, tokens = here.branch, node.pages * self._page_tokens
        narrow = tokens < self._narrowest and not node.children
        if here.level == MAX_LEVELS or narrow:
            branch.width += tokens
        else:
            branch = self._branch(node, tokens)
        if names := self._standing.get(id(node), ()):
            branch.standing += len(names)
            branch.names = (*branch.names, *names)[:MAX_NAMES]
        if node.children:
            level = here.level + (branch is not here.branch)
            self._open.append(_Open(branch, [*node.children.values()], level))
        else:
            self._close(branch, here.branch)
        return True

    def _branch(self, node: Node, tokens: int) -> TreeBranch:
        held = node.resident
        return TreeBranch(
            start=node.depth * self._page_tokens,
            tokens=tokens,
            width=tokens,
            tiers=tuple(tier for tier, bit in self._cells if held & bit),
            arriving=bool(node.arriving),
            hits=node.hits,
            last=node.last,
            head=node.tokens[: SHOWN_TOKENS * TOKEN_BYTES],
            node=node,
        )

    def _close(self, branch: TreeBranch, above: TreeBranch) -> None:
        """All below the branch is counted: count it in the one above."""
        if branch is above:  # The node is too deep or too narrow for a branch of its own.
            return
        above.width += branch.width
        above.standing += branch.standing
        if branch.names:
            above.names = (*above.names, *branch.names)[:MAX_NAMES]
        if branch.width >= self._narrowest:
            above.children.append(branch)
