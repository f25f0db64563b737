"""Imports and exports: pages that come from a store or a peer, and pages that a store is given.

A store's contents are not in the tree: other processes change them. An *import* is host slots taken
for pages of a prompt, outside the tree and not readable, until the pages are adopted: a fetch from
a store, or a handoff from a prefill server.
An export is a *departure*: pages that landed on the host and stay pinned until they are written
(`Arrivals.land_departing` begins it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtide.index.evict.allocation import Allocator
from kvtide.index.keys import Prompt
from kvtide.index.leases.leasing import Leasing
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.match.match import Bits, Matcher
from kvtide.index.tree.holds import Departing, Departure, Import, IndexLease, Pin, Taken
from kvtide.index.tree.node import Node
from kvtide.index.tree.tree import Tree
from kvtide.spec import Slots, Tier


class WantedPages(NamedTuple):
    """One page of one anchor."""

    anchor: str
    page: int


@dataclass(frozen=True, slots=True)
class Outline:
    """Which pages of a prompt the device and the host have.

    limit  the deepest boundary that would leave a token to compute
    held   per anchor, for the pages before the limit
    """

    limit: int
    held: Mapping[str, Bits]


class ImportsExports:
    def __init__(
        self, tree: Tree, allocator: Allocator, matcher: Matcher, leasing: Leasing
    ) -> None:
        self._tree = tree
        self._allocator = allocator
        self._matcher = matcher
        self._leasing = leasing

    # -- imports ----------------------------------------------------------------------------

    def outline(self, prompt: Prompt) -> Outline:
        tree = self._tree
        hit = self._matcher.match(prompt, Tier.HOST)
        held = {name: np.zeros(hit.limit, bool) for name in tree.anchor_names}
        end = 0
        for number, node in enumerate(hit.nodes, 1):
            start, end = end, end + (node.pages if number < len(hit.nodes) else hit.last_pages)
            for anchor, name in enumerate(tree.anchor_names):
                cells = (tree.cell(tier, anchor) for tier in (Tier.DEVICE, Tier.HOST))
                held[name][start:end] = any(node.resident >> cell & 1 for cell in cells)
        return Outline(hit.limit, held)

    def take(self, lease: IndexLease, wanted: Sequence[WantedPages]) -> Import | None:
        """Host slots for pages of the lease's prompt; None when the host has no room.

        The import owns the lease and pins what is resident beyond its boundary, so that adopted
        pages always have their prefix.
        """
        tree = self._tree
        assert lease.live and self._leasing.owns(lease)
        guards = self._guard(lease.prompt, max((want.page + 1 for want in wanted), default=0))
        tree.tick += 1
        cell_of = {name: tree.cell(Tier.HOST, n) for n, name in enumerate(tree.anchor_names)}
        cells = [cell_of[want.anchor] for want in wanted]
        needs = {cell: cells.count(cell) for cell in sorted(set(cells))}
        if not self._allocator.reserve(needs):
            self._unguard(guards)
            return None
        slots = {c: iter(tree.cells[c].slots.take(n).tolist()) for c, n in needs.items()}
        taken = [
            Taken(cell, want.page, next(slots[cell]))
            for cell, want in zip(cells, wanted, strict=True)
        ]
        arriving = Import(tree.next_number(), lease, taken, guards)
        tree.imports[arriving.number] = arriving
        return arriving

    def adopt(
        self, arriving: Import, here: Sequence[Taken], absent: Sequence[Collection[str]]
    ) -> None:
        """These pages of the import have come from a store: matches find them on the host.

        `absent` names, for each of them, the optional sidecars that it lacks.
        """
        self._adopt(arriving, here, absent, stored=True)

    def adopt_from_peer(
        self, arriving: Import, here: Sequence[Taken], absent: Sequence[Collection[str]]
    ) -> None:
        """The same of pages that are in no store."""
        self._adopt(arriving, here, absent, stored=False)

    def _adopt(
        self,
        arriving: Import,
        here: Sequence[Taken],
        absent: Sequence[Collection[str]],
        *,
        stored: bool,
    ) -> None:
        tree = self._tree
        assert arriving.live and arriving.lease.live and len(absent) == len(here)
        tree.tick += 1
        coming = set(here)
        left = [one for one in arriving.taken if one not in coming]
        assert len(left) + len(here) == len(arriving.taken), "adopted twice, or never taken"
        arriving.taken = left
        if arriving.lease.hidden:
            self._free(here)
            return
        if tree.presence.needed:
            self._mark(here, absent)
        for start, end, slots in _uniform(here):
            self._insert(arriving.lease.prompt, start, end, slots, stored)

    def abandon(self, arriving: Import) -> None:
        """Adopt no more: only the slots stay taken, until nothing writes to them any longer."""
        guards, arriving.guards = arriving.guards, []
        self._unguard(guards)
        self._leasing.release(arriving.lease)

    def forgo(self, arriving: Import) -> None:
        """Nothing writes to the import's slots any longer: those not adopted go back."""
        assert arriving.live
        self.abandon(arriving)
        arriving.live = False
        del self._tree.imports[arriving.number]
        self._free(arriving.taken)

    def _guard(self, prompt: Prompt, end: int) -> list[Pin]:
        """Pin what the device and the host have of the pages that a resume at `end` needs.

        The lease does not pin pages beyond the deepest boundary, and the allocation may evict.
        """
        tree = self._tree
        path = [node for node in self._matcher.match(prompt, Tier.HOST).nodes if node.depth < end]
        if not path:
            return []
        return [
            pin
            for anchor in range(tree.anchors)
            for pin in tree.pins.fastest(anchor, path[-1], self._first(anchor, end), Tier.HOST)
        ]

    def _first(self, anchor: int, end: int) -> int:
        reach = self._tree.cells[anchor].reach
        return 0 if reach is None else max(0, end - reach)

    def _unguard(self, guards: Sequence[Pin]) -> None:
        hidden = hidden_roots(pin.node for pin in guards)
        for pin in guards:
            self._tree.pins.unpin(pin)
        sweep(self._tree, hidden)

    def _mark(self, taken: Sequence[Taken], absent: Sequence[Collection[str]]) -> None:
        """Record the sidecars of each page, grouped: mostly all pages have the same."""
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for one, without in zip(taken, absent, strict=True):
            alike.setdefault((one.cell, tuple(without)), []).append(one.slot)
        for (cell, without), slots in alike.items():
            anchor = self._tree.anchor_names[cell % self._tree.anchors]
            self._tree.presence.mark(Tier.HOST, anchor, np.array(slots, np.int32), without)

    def _free(self, taken: Sequence[Taken]) -> None:
        slots: dict[int, list[int]] = {}
        for one in taken:
            slots.setdefault(one.cell, []).append(one.slot)
        for cell, mine in slots.items():
            self._tree.cells[cell].slots.free(np.array(mine, np.int32))

    def _insert(
        self, prompt: Prompt, start: int, end: int, slots: dict[int, Slots], stored: bool
    ) -> None:
        """Give the prompt's pages [start, end) these slots, where they have none.

        Pages above that no tier has become nodes without slots, kept by those below.
        """
        tree, body, size = self._tree, prompt.body, self._tree.page_bytes
        node: Node = tree.root(prompt)
        at = 0
        while at < end:
            stop = start if at < start else end
            child = node.children.get(body[at * size : (at + 1) * size])
            if child is None:
                child = tree.add_leaf(node, body[at * size : stop * size], stop - at)
                child.stop = end
            else:
                pages = self._matcher.shared(child, body, at, stop)
                if pages < child.pages:
                    child = tree.split(child, pages)
            if at >= start:
                first = at - start
                mine = {c: s[first : first + child.pages] for c, s in slots.items()}
                self._fill(child, mine, stored)
            node = child
            at += child.pages

    def _fill(self, node: Node, slots: dict[int, Slots], stored: bool) -> None:
        tree = self._tree
        for cell, mine in slots.items():
            if node.resident >> cell & 1:
                tree.cells[cell].slots.free(mine)
                continue
            coming = node.arrivals.get(cell) if node.arrivals else None
            tree.hold(node, cell, mine.copy())
            node.departed |= tree.cells[cell].bit if stored else 0
            tree.cells[cell].queue.offer(node)
            if tree.presence.needed and node.resident >> cell - tree.anchors & 1:
                tree.presence.note_ahead(node)
            # Leases that waited for an arrival of these pages have them now, and pin them.
            for lease in tree.arrivals[coming].leases if coming is not None else ():
                if lease.live:
                    self._leasing.repin(lease)

    # -- exports ----------------------------------------------------------------------------

    def depart(self, arriving: Import, adopted: Sequence[Taken]) -> Departure | None:
        """Pin pages that were adopted until the departure ends; None if none is left there.

        Called when all of them have come: a history is pinned with all pages above.
        """
        tree, prompt = self._tree, arriving.lease.prompt
        slots = {(one.cell, one.page): one.slot for one in adopted}
        cells = sorted({one.cell for one in adopted})
        pins: list[Pin] = []
        pages: list[Departing] = []
        path = [] if arriving.lease.hidden else self._matcher.match(prompt, Tier.HOST).nodes
        for node, cell in ((node, cell) for node in path for cell in cells):
            if not node.resident >> cell & 1:
                continue
            mine = {
                slot: number
                for number, slot in enumerate(node.resident_slots(cell).tolist())
                if slots.get((cell, node.depth + number)) == slot
            }
            if mine:
                pins.append(tree.pins.whole(cell, node))
                pages += self._departing(node, cell, mine)
        if not pages:
            return None
        departure = Departure(tree.next_number(), pins, pages)
        tree.departures[departure.number] = departure
        return departure

    def _departing(self, node: Node, cell: int, slots: Mapping[int, int]) -> Iterator[Departing]:
        tree, keys = self._tree, self._tree.page_keys(node)
        node.departed |= tree.cells[cell].bit if len(slots) == node.pages else 0
        name = tree.anchor_names[cell % tree.anchors]
        for slot, number in slots.items():
            absent = tree.presence.absent(Tier.HOST, name, slot)
            yield Departing(name, keys[number].key, slot, absent, keys[number].after)

    def departed(self, departure: Departure) -> None:
        """The departure was written, or dropped: unpin its pages."""
        tree = self._tree
        assert departure.live and tree.departures.pop(departure.number) is departure
        departure.live = False
        tree.tick += 1
        hidden = hidden_roots(pin.node for pin in departure.pins)
        for pin in departure.pins:
            tree.pins.unpin(pin)
        sweep(tree, hidden)


def _uniform(taken: Sequence[Taken]) -> list[tuple[int, int, dict[int, Slots]]]:
    """Runs of pages [start, end) that came for the same cells, with their slots per cell."""
    by_page: dict[int, dict[int, int]] = {}
    for one in taken:
        by_page.setdefault(one.page, {})[one.cell] = one.slot
    runs: list[tuple[int, int, dict[int, list[int]]]] = []
    for page in sorted(by_page):
        cells = by_page[page]
        if runs and runs[-1][1] == page and runs[-1][2].keys() == cells.keys():
            start, _, slots = runs.pop()
        else:
            start, slots = page, {cell: [] for cell in sorted(cells)}
        for cell, slot in cells.items():
            slots[cell].append(slot)
        runs.append((start, page + 1, slots))
    return [
        (start, end, {cell: np.array(found, np.int32) for cell, found in slots.items()})
        for start, end, slots in runs
    ]
