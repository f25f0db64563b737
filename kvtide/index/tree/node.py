"""A run of pages on which everything is the same: the unit of the tree.

A *cell* is one anchor in one tier (`cell = tier · anchors + anchor`). In every cell the pages of a
node are ABSENT, ARRIVING or RESIDENT, and all alike: where two pages would differ, there are two
nodes. So matching, pinning and eviction work on nodes and never look at single pages.

    ABSENT ──arrive──▶ ARRIVING ──land──▶ RESIDENT ──drop──▶ ABSENT
      │                    └────fail────▶ ABSENT
      └─────────────hold (computed here)─▶ RESIDENT

Only RESIDENT cells have slots in the node, so what is arriving cannot be read by mistake.
"""

from __future__ import annotations

from kvtide.index.keys import Hidden, Namespace
from kvtide.spec import Slots

MAX_NODE_PAGES = 256
"""Nodes are lengthened and joined up to here, so that growing page by page stays cheap."""

RootName = tuple[Namespace | Hidden, bytes]


class Node:
    """Fields only; `Tree` changes them.

    pages, depth   the run is pages [depth, depth + pages) of every prompt through it
    tokens         the run's packed tokens
    resident       bit per cell; `slots[cell]` holds the slot numbers of those
    arriving       bit per cell; `arrivals[cell]` is the number of the arrival that owns the slots
    kids           per cell, how many children are resident or arriving there
    pins           per cell, how many leases and arrivals need these pages to stay
    leases         how many leases stand at the end of this node, with or without pins
    hidden         no match finds it, no event names it, and it is dropped once unpinned
    queued         per cell, the number of its entry in that cell's eviction queue; 0 without one
    ahead          the device may carry optional sidecars that the host's copy of the run lacks
    sought         the number of the store that has none of the optional sidecars that it lacks
    departed       bit per cell: its pages there, computed or fetched, have been given to a store
    last … priority  what eviction policies look at
    ghost          the key of what is remembered of the branch last evicted below its end
    stop           the page up to which the request that computed the run went on
    read           the number of the reading that visited it last (`tree_reading`)
    key            key of the run's last page, computed on demand
    """

    __slots__ = (
        "ahead",
        "arrivals",
        "arriving",
        "born",
        "children",
        "departed",
        "depth",
        "ghost",
        "hidden",
        "hits",
        "key",
        "kids",
        "last",
        "leases",
        "pages",
        "parent",
        "pins",
        "priority",
        "queued",
        "read",
        "resident",
        "slots",
        "sought",
        "stop",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, tokens: bytes, pages: int, depth: int, cells: int
    ) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.tokens = tokens
        self.pages = pages
        self.depth = depth
        self.resident = 0
        self.arriving = 0
        self.arrivals: dict[int, int] | None = None
        self.slots: list[Slots | None] = [None] * cells
        self.kids = [0] * cells
        self.pins = [0] * cells
        self.leases = 0
        self.hidden: bool = parent is not None and parent.hidden
        self.queued = [0] * cells
        self.ahead = False
        self.sought = 0
        self.departed = 0
        self.last = 0
        self.born = 0
        self.hits = 0
        self.priority = 0
        self.stop = 0
        self.read = 0
        self.ghost: bytes | None = None
        self.key: bytes | None = None

    @property
    def end(self) -> int:
        return self.depth + self.pages

    def resident_slots(self, cell: int) -> Slots:
        slots = self.slots[cell]
        assert slots is not None, "only resident pages can be read"
        return slots


class Root(Node):
    """Where the prompts of one namespace (and one head, see `keys`) begin: no pages of its own."""

    __slots__ = ("name",)

    def __init__(self, name: RootName, cells: int) -> None:
        super().__init__(None, b"", 0, 0, cells)
        self.name = name
        self.hidden = isinstance(name[0], Hidden)
