"""What leases, arrivals, imports and departures hold, recorded so that release is a walk.

A pin keeps the pages of one cell on the path from page `start` to the end of `node`. Nodes may be
split while a pin exists: the lower part keeps its identity, both parts keep the pin count, and the
walk from `node` up to `start` meets both. So a pin never needs to be translated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.index.keys import Prompt
from kvtide.index.tree.node import Node
from kvtide.spec import PageMove, Slots, Tier


class Pin(NamedTuple):
    """`start` is where the topmost pinned node begins: pins cover whole nodes."""

    cell: int
    node: Node
    start: int

    def nodes(self) -> Iterator[Node]:
        """The pinned nodes, deepest first."""
        node: Node | None = self.node
        while node is not None and node.depth >= self.start and node.pages:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Segment:
    """Pages [start, end) that a lease is going to compute, with the slots it took, by home cell.

    All pages of a segment are kept in the same anchors, so a segment becomes one node.
    """

    start: int
    end: int
    slots: dict[int, Slots]

    def cut(self, at: int) -> Segment:
        """Shorten the segment to end at page `at`; the rest is returned."""
        kept, slots = at - self.start, self.slots
        self.slots = {cell: taken[:kept].copy() for cell, taken in slots.items()}
        rest = Segment(at, self.end, {c: taken[kept:].copy() for c, taken in slots.items()})
        self.end = at
        return rest


@dataclass(slots=True, eq=False)
class IndexLease:
    """The right to read a prefix, and the slots for what comes after it, until released.

    node      the tree node that ends at `boundary`: where commits go on
    boundary  pages of the prompt that are in the tree and pinned for this lease
    pins      exactly what this lease pinned
    segments  slots taken for pages that are not committed yet
    growth    per home cell, slots promised for later and not taken yet
    shrunk    how often slots were given back before they were used
    hot_row   its buffer in the hot pools, from the first reservation on; -1 without one
    pinned_at the boundary at which it was pinned: pages beyond it were computed by this lease
    planned   the page up to which the request computes full pages, as far as is known
    branches  page boundaries worth a checkpoint, because prompts diverge there
    wanted    the page boundaries that were chosen for checkpoints
    placed    the page up to which the placement chose them; 0 before it did
    running   whether it keeps windows and states at its boundary for its own next step
    """

    number: int
    prompt: Prompt
    node: Node
    boundary: int
    priority: int = 0
    pins: list[Pin] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    growth: dict[int, int] = field(default_factory=dict)
    shrunk: int = 0
    hot_row: int = -1
    branches: tuple[int, ...] = ()
    pinned_at: int = 0
    planned: int = 0
    wanted: tuple[int, ...] = ()
    placed: int = 0
    running: bool = False
    live: bool = True

    @property
    def reserved(self) -> int:
        """The page up to which this lease has slots."""
        return self.segments[-1].end if self.segments else self.boundary

    @property
    def hidden(self) -> bool:
        """Whether no match finds what the lease stands on and commits."""
        return self.node.hidden

    def passing(self, node: Node, reach: int) -> bool:
        """Whether this node's windows or states serve only this lease's next step.

        The lease computed them, and no checkpoint reaches back to them.
        """
        if not self.running or node.depth < self.pinned_at:
            return False
        return not any(node.depth < stop < node.end + reach for stop in self.wanted)


class ArrivalPart(NamedTuple):
    """One anchor's pages [start, end of node) of an arrival."""

    cell: int
    node: Node
    start: int
    end: int
    slots: Slots


@dataclass(slots=True, eq=False)
class Arrival:
    """Pages that are copied into a tier: the arrival owns their slots until they land or fail.

        begun ──land──▶ landed     the pages become RESIDENT, the source is unpinned
          └────fail───▶ failed     every slot goes back, the source is unpinned

    pins           the source pages
    guards         a history's pages above these, in source and target: they must not go before
    leases         the lease for which it was begun, and later ones that wait for these pages too
    behind         the arrivals that bring the rest of what the lease waits for
    leaves_source  a demotion: landing also drops the source copies that are not pinned by then
    additions      pages that the target has without optional sidecars, which this arrival brings
    computed       pages computed in the target (of hot pools) that depart when this one lands
    """

    number: int
    source: Tier
    target: Tier
    parts: list[ArrivalPart]
    pins: list[Pin]
    guards: list[Pin]
    moves: tuple[PageMove, ...]
    leases: list[IndexLease] = field(default_factory=list)
    behind: tuple[Arrival, ...] = ()
    leaves_source: bool = False
    additions: list[ArrivalPart] = field(default_factory=list)
    computed: list[Pin] = field(default_factory=list)
    live: bool = True

    @property
    def pages(self) -> int:
        return sum(part.end - part.start for part in (*self.parts, *self.additions))

    @property
    def pointless(self) -> bool:
        """Whether all that it brings, or that leaves with it, is hidden and no lease waits."""
        ends = [part.node for part in (*self.parts, *self.additions)]
        ends += [pin.node for pin in self.computed]
        waiting = any(lease.live for lease in self.leases)
        return all(node.hidden for node in ends) and not waiting


class Taken(NamedTuple):
    """A slot taken for one page of a prompt."""

    cell: int
    page: int
    slot: int


@dataclass(slots=True, eq=False)
class Import:
    """Pages that come from a store or a peer: the import owns their slots outside the tree.

        begun ──adopt───▶ begun     these of them can be found, the rest may still come
          ├────abandon──▶ begun     nothing more is adopted: what was there may go
          └─────forgo───▶ over      what was not adopted goes back

    lease   stands at the deepest boundary that the device and the host allow
    taken   in the order in which the pages were wanted
    guards  resident pages of the prompt beyond that boundary, usable once the import is complete
    """

    number: int
    lease: IndexLease
    taken: list[Taken]
    guards: list[Pin] = field(default_factory=list)
    live: bool = True


class AnchorNode(NamedTuple):
    """One anchor's pages of a node."""

    node: Node
    anchor: int


class LackingPage(NamedTuple):
    """A page of a prompt of which neither the device nor the host has these optional sidecars.

    slot  on the host; None where only the device has the page
    """

    anchor: str
    page: int
    slot: int | None
    sidecars: tuple[str, ...]


@dataclass(slots=True, eq=False)
class SidecarImport:
    """Host pages that stay pinned while a store brings optional sidecars that they lack."""

    number: int
    pages: Sequence[LackingPage]
    pins: list[Pin]
    live: bool = True


class Departing(NamedTuple):
    """A page on the host by its key, and the tokens after it (`PageKey`).

    `absent`: optional sidecars that it does not carry.
    """

    anchor: str
    key: bytes
    slot: int
    absent: tuple[str, ...]
    after: bytes


@dataclass(slots=True, eq=False)
class Departure:
    """Pages that landed on the host and stay pinned until a store has written them."""

    number: int
    pins: list[Pin]
    pages: list[Departing]
    live: bool = True
