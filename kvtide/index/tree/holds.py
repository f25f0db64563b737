"""What leases and arrivals hold, recorded so exactly that giving it back is a walk.

A pin says: the pages of this cell on the path from page `start` to the end of `node` must stay.
Nodes may be split while a pin stands: the lower part keeps its identity, both parts keep the pin
count, and the walk from `node` up to `start` meets both. So a pin never needs to be replayed or
translated.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Pages [start, end) that a lease is going to compute, with the slots it took for them.

    All pages of a segment are kept in the same anchors, so a segment becomes one node.
    """

    start: int
    end: int
    slots: dict[int, Slots]


@dataclass(slots=True, eq=False)
class IndexLease:
    """The right to read a prefix, and the slots for what comes after it, until released.

    node      the tree node that ends at `boundary`: where commits go on
    boundary  pages of the prompt that are in the tree and pinned for this lease
    pins      exactly what this lease pinned
    segments  slots taken for pages that are not committed yet
    growth    per anchor, device slots promised for later and not taken yet
    begun     the boundary at which it was pinned: what lies beyond, this lease computed
    planned   the page up to which the request computes full pages, as far as is known
    branches  page boundaries worth a checkpoint, because prompts part there
    wanted    the page boundaries that were chosen for checkpoints
    placed    the page up to which the placement chose them; 0 as long as it was not asked
    running   whether it keeps windows and states at its boundary only to go on from there
    """

    number: int
    prompt: Prompt
    node: Node
    boundary: int
    priority: int = 0
    pins: list[Pin] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    growth: dict[int, int] = field(default_factory=dict)
    branches: tuple[int, ...] = ()
    begun: int = 0
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
        """Whether what it stands on, and what it commits, is found by nobody."""
        return self.node.hidden

    def passing(self, node: Node, reach: int) -> bool:
        """Whether windows or states of this node are there only for this lease to go on.

        It computed them, and no boundary that was chosen for a checkpoint reaches back to them.
        """
        if not self.running or node.depth < self.begun:
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
    """Pages on their way into a tier: their slots are owned here until they land or fail.

        begun ──land──▶ landed     the pages become RESIDENT, the source is unpinned
          └────fail───▶ failed     every slot goes back, the source is unpinned

    pins           the source of what is on its way
    guards         what a history has above it, in source and target: it cannot go before
    leases         who waits for these pages: the lease they were begun for, and later ones that
                   need some of them too
    behind         the arrivals that bring the rest of what the lease waits for
    leaves_source  a demotion: landing also drops the source copies that nobody pinned since
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
    live: bool = True

    @property
    def pages(self) -> int:
        return sum(part.end - part.start for part in self.parts)

    @property
    def pointless(self) -> bool:
        """Whether all it brings is hidden and no lease waits for it."""
        return all(part.node.hidden for part in self.parts) and not any(
            lease.live for lease in self.leases
        )


class Taken(NamedTuple):
    """A slot taken for one page of a prompt."""

    cell: int
    page: int
    slot: int


@dataclass(slots=True, eq=False)
class Import:
    """Pages on their way from outside: their slots are owned here, and are not in the tree.

        begun ──adopt───▶ begun     the first of them can be found, the rest may still come
          ├────abandon──▶ begun     nothing more is adopted: what was there may go
          └─────forgo───▶ over      what was not adopted goes back

    lease   stands at the deepest boundary that the device and the host allow
    taken   in the order in which the pages are to come
    guards  what is there of the prompt beyond that boundary, and is of use once they have come
    """

    number: int
    lease: IndexLease
    taken: list[Taken]
    guards: list[Pin] = field(default_factory=list)
    live: bool = True


class Departing(NamedTuple):
    """A page on the host by its key. `absent`: optional sidecars that it does not carry."""

    anchor: str
    key: bytes
    slot: int
    absent: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Departure:
    """Pages that landed on the host and stay there until somebody has written them elsewhere."""

    number: int
    pins: list[Pin]
    pages: list[Departing]
    live: bool = True
