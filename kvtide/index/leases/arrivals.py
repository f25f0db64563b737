"""Arrivals: copies between tiers as the index sees them, begun, then landed or failed.

Nothing is readable in the target until it has landed. Until then the arrival owns the target's
slots and pins the source. Either end is a walk over what it recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvtide.index.evict.allocation import Allocator
from kvtide.index.leases.leasing import Leasing
from kvtide.index.leases.quarantine import hidden_roots, sweep
from kvtide.index.tree.holds import (
    AnchorNode,
    Arrival,
    ArrivalPart,
    Departing,
    Departure,
    IndexLease,
    Pin,
)
from kvtide.index.tree.node import Node
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import Tree
from kvtide.spec import PageMove, Slots, Tier

NodeRun = list[Node]
"""Nodes that follow each other on one path, topmost first."""


class Arrivals:
    def __init__(self, tree: Tree, allocator: Allocator, leasing: Leasing) -> None:
        self._tree = tree
        self._allocator = allocator
        self._leasing = leasing

    def copy(self, lease: IndexLease, source: Tier, target: Tier) -> Arrival | None:
        """Begin to copy the lease's path; None when the target has no room.

        Upwards (a load, a fetch) it copies what the lease needs to resume and no faster tier has.
        Downwards (a backup, a store) it copies all that the path has in the source, with all
        checkpoints, but not what serves only the lease's next step, and no hidden pages. A backup
        also brings the sidecars that the host's copies lack, and names the pages computed there.
        """
        tree = self._tree
        assert lease.live and self._leasing.owns(lease) and source is not target
        tree.tick += 1
        guards = self._guard(lease, target)
        if target < source:
            self._cut_at_reaches(lease, source)
        runs = self._runs(lease, source, target)
        needs = {tree.cell(target, anchor): _pages(of_anchor) for anchor, of_anchor in runs.items()}
        arrival = None
        if self._allocator.reserve(needs):
            arrival = self._begin(runs, source, target)
            if target < source:
                # No lease waits for a copy downwards, and it does not change what leases pin.
                arrival.leases.append(lease)
                arrival.behind = self._awaited(lease, arrival)
            elif not lease.hidden:
                if tree.presence.uneven:
                    self._add_sidecars(arrival, _ahead(lease.node), range(tree.anchors))
                self._add_computed(arrival, tree.path(lease.node))
        for pin in guards:
            tree.pins.unpin(pin)
        return arrival

    def needs(self, lease: IndexLease, source: Tier, target: Tier) -> dict[str, int]:
        """How many slots of the target a copy of the lease's path would take, by anchor."""
        tree, needs = self._tree, {}
        for anchor, runs in self._runs(lease, source, target).items():
            reach, before = tree.cells[tree.cell(source, anchor)].reach, 0
            if reach is not None and target < source:
                before = max(0, lease.boundary - reach - runs[0][0].depth)
            needs[tree.anchor_names[anchor]] = _pages(runs) - before
        return needs

    def demote(self, source: Tier, target: Tier, anchor: int, pages: int) -> Arrival | None:
        """Begin to move the next victims of a cell down, as many of them as fit there.

        Victims with a copy below, or out of every reach, are dropped at once; those whose copy
        lacks sidecars give it these first. None when nothing is evictable or the target has no
        room. Landing frees the source. An arrival without moves has nothing to move.
        """
        tree = self._tree
        tree.tick += 1
        here, there = tree.cell(source, anchor), tree.cell(target, anchor)
        victims, found = self._victims(here, there, pages)
        nodes = [pin.node for pin in victims]
        lost = [node for node in nodes if not node.resident >> there & 1]
        arrival = None
        if found and self._allocator.reserve({there: sum(node.pages for node in lost)}):
            arrival = self._begin({anchor: [[n] for n in lost]} if lost else {}, source, target)
            arrival.leaves_source = True
            self._add_sidecars(arrival, nodes, (anchor,))
            self._add_computed(arrival, nodes)
        for pin in victims:
            tree.pins.unpin(pin)
        return arrival

    def supplement(self, nodes: Iterable[AnchorNode], max_pages: int) -> Arrival | None:
        """Begin to bring the sidecars that the device lacks of these nodes and the host has, of up
        to so many pages; None if there are none."""
        tree, room = self._tree, max_pages
        found: list[tuple[AnchorNode, list[PageMove]]] = []
        for one in nodes:
            here, there = (tree.cell(tier, one.anchor) for tier in (Tier.HOST, Tier.DEVICE))
            moves = [_cut(move, room) for move in self._missed(one.node, here, there)]
            if moves:
                found.append((one, moves))
                room -= max(len(move.target_slots) for move in moves)
            if not room:
                break
        if not found:
            return None
        tree.tick += 1
        number = tree.next_number()
        arrival = tree.arrivals[number] = Arrival(number, Tier.HOST, Tier.DEVICE, [], [], [], ())
        for (node, anchor), moves in found:
            self._join(arrival, node, anchor, moves)
        return arrival

    def land(self, arrival: Arrival) -> None:
        """The bytes are there: the pages become readable in the target."""
        self._keep_computed(arrival)
        self._let_go(arrival, self._receive(arrival))

    def land_departing(self, arrival: Arrival) -> Departure | None:
        """Land the arrival, and pin its new pages until the departure ends; None without any."""
        hidden = self._receive(arrival)
        departure = self._depart(arrival)
        self._let_go(arrival, hidden)
        return departure

    def _receive(self, arrival: Arrival) -> list[Node]:
        """Make the pages readable; returns the hidden trees that may be swept afterwards."""
        tree = self._tree
        hidden = hidden_roots(pin.node for pin in (*arrival.pins, *arrival.computed))
        self._close(arrival)
        tree.presence.add(SidecarSlots.of(arrival.moves))
        for part in arrival.parts:
            for node, slots in self._slices(part):
                if self._expects(node, part.cell, arrival):
                    tree.hold(node, part.cell, slots.copy())
                    tree.cells[part.cell].queue.offer(node)
                else:
                    tree.cells[part.cell].slots.free(slots)
        return hidden

    def _let_go(self, arrival: Arrival, hidden: list[Node]) -> None:
        """Unpin all that the arrival held; its leases pin the new pages instead."""
        tree = self._tree
        for pin in arrival.pins:
            nodes = list(pin.nodes())
            tree.pins.unpin(pin)
            if arrival.leaves_source:
                self._leave(nodes, pin.cell)
        for pin in (*arrival.computed, *arrival.guards):
            tree.pins.unpin(pin)
        for lease in arrival.leases:
            if lease.live:
                self._leasing.repin(lease)
        sweep(tree, hidden)

    def fail(self, arrival: Arrival) -> None:
        """The copy failed: every slot goes back; nothing was ever readable."""
        tree = self._tree
        hidden = hidden_roots(pin.node for pin in (*arrival.pins, *arrival.computed))
        self._keep_computed(arrival)
        self._close(arrival)
        for part in arrival.parts:
            for node, slots in self._slices(part):
                tree.cells[part.cell].slots.free(slots)
                if self._expects(node, part.cell, arrival):
                    tree.give_up(node, part.cell)
        tree.presence.forgo(SidecarSlots.of(arrival.moves))
        for part in arrival.additions if arrival.target > arrival.source else ():
            for node, _ in self._slices(part):
                node.ahead = True
        for pin in (*arrival.pins, *arrival.computed, *arrival.guards):
            tree.pins.unpin(pin)
        sweep(tree, hidden)

    # -- the steps --------------------------------------------------------------------------

    def _depart(self, arrival: Arrival) -> Departure | None:
        """Pin what the arrival brought: a history with all pages above, which must stay too."""
        tree = self._tree
        departure = Departure(tree.next_number(), [], [])
        added = [move for move in arrival.moves if move.sidecar is not None]
        drafted = {(move.anchor, slot) for move in added for slot in move.target_slots.tolist()}
        for number, part in enumerate((*arrival.parts, *arrival.additions)):
            for node, slots in self._slices(part):
                if node.hidden or node.slots[part.cell] is None:
                    continue
                if not np.array_equal(node.resident_slots(part.cell), slots):
                    continue
                departure.pins.append(tree.pins.whole(part.cell, node))
                pages = self._departing(node, part.cell % tree.anchors, slots)
                if number >= len(arrival.parts):
                    pages = [page for page in pages if (page.anchor, page.slot) in drafted]
                departure.pages += pages
        for pin in arrival.computed:
            for node in () if pin.node.hidden else pin.nodes():
                departure.pins.append(tree.pins.whole(pin.cell, node))
                slots = node.resident_slots(pin.cell)
                departure.pages += self._departing(node, pin.cell % tree.anchors, slots)
        if not departure.pages:
            return None
        tree.departures[departure.number] = departure
        return departure

    def _add_computed(self, arrival: Arrival, nodes: Iterable[Node]) -> None:
        """Let pages that were computed on the host depart when a backup lands.

        They must have been computed before it began: its copy waits for all that computed them.
        Pages that are committed meanwhile leave with the next one.
        """
        if (arrival.source, arrival.target) != (Tier.DEVICE, Tier.HOST):
            return
        tree = self._tree
        for cell in (home for home in tree.homes if home >= tree.anchors):
            before: Node | None = None
            for node in nodes:
                if not node.resident >> cell & 1 or node.departed >> cell & 1:
                    continue
                node.departed |= 1 << cell
                arrival.computed.append(tree.pins.span(cell, node, node.depth))
                if node.parent is not before:
                    arrival.guards += self._pin_above(cell, node)
                before = node

    @staticmethod
    def _keep_computed(arrival: Arrival) -> None:
        """The pages computed in the target do not depart this time."""
        for pin in arrival.computed:
            for node in pin.nodes():
                node.departed &= ~(1 << pin.cell)

    def _departing(self, node: Node, anchor: int, slots: Slots) -> list[Departing]:
        name, presence = self._tree.anchor_names[anchor], self._tree.presence
        return [
            Departing(name, page.key, slot, presence.absent(Tier.HOST, name, slot), page.after)
            for page, slot in zip(self._tree.page_keys(node), slots.tolist(), strict=True)
        ]

    def _add_sidecars(
        self, arrival: Arrival, nodes: Iterable[Node], anchors: Collection[int]
    ) -> None:
        """Let a backup bring the sidecars that the device carries and the host's copies lack.

        They go to the slots that the host has: readers of these use no sidecar that is absent.
        """
        tree = self._tree
        if (arrival.source, arrival.target) != (Tier.DEVICE, Tier.HOST):
            return
        for node in nodes:
            if not node.ahead or node.arriving >> tree.anchors:
                continue
            node.ahead = False
            for anchor in range(tree.anchors):
                here, there = tree.cell(arrival.source, anchor), tree.cell(arrival.target, anchor)
                moves = self._missed(node, here, there)
                if moves and anchor not in anchors:
                    node.ahead = True
                elif moves:
                    self._join(arrival, node, anchor, moves)

    def _join(self, arrival: Arrival, node: Node, anchor: int, moves: Sequence[PageMove]) -> None:
        """Let an arrival bring these sidecars of a node, whose pages stay where they are."""
        tree = self._tree
        here, there = tree.cell(arrival.source, anchor), tree.cell(arrival.target, anchor)
        slots = node.resident_slots(there)
        arrival.moves += tuple(moves)
        arrival.additions.append(ArrivalPart(there, node, node.depth, node.end, slots))
        arrival.pins.append(tree.pins.span(here, node, node.depth))
        arrival.guards += self._pin_above(here, node)
        arrival.guards.append(tree.pins.whole(there, node))
        tree.presence.expect(SidecarSlots.of(moves))

    def _missed(self, node: Node, here: int, there: int) -> list[PageMove]:
        """The moves of sidecars that the node carries in one cell and lacks in another."""
        tree = self._tree
        sources, targets = node.slots[here], node.slots[there]
        if sources is None or targets is None:
            return []
        name = tree.anchor_names[here % tree.anchors]
        source, target = tree.cells[here].tier, tree.cells[there].tier
        return tree.presence.additions(name, source, sources, target, targets)

    def _victims(self, here: int, there: int, pages: int) -> tuple[list[Pin], int]:
        """The next victims, pinned, that have to be copied; and how many pages leave in all."""
        tree, allocator, queue = self._tree, self._allocator, self._tree.cells[here].queue
        fits = allocator.max_slots(there)
        victims: list[Pin] = []
        found = 0
        while found < pages and (node := queue.pop()) is not None:
            count = allocator.pages_to_take(node, here, pages - found)
            lost = not node.arriving >> there & 1 and allocator.would_be_lost(node, here)
            if lost and tree.cells[here].reach is None:
                count = min(count, fits)
            if lost and not 0 < count <= fits:
                queue.offer(node)
                break
            node = allocator.tail(node, count)
            found += count
            if lost:
                fits -= count
            behind = node.ahead and here < tree.anchors and self._missed(node, here, there)
            if lost or behind:
                victims.append(tree.pins.span(here, node, node.depth))
            else:
                tree.drop(node, here)
        return victims, found

    def _guard(self, lease: IndexLease, target: Tier) -> list[Pin]:
        """Pin what the path has in the target while pages are evicted there."""
        tree = self._tree
        cells = range(tree.cell(target, 0), tree.cell(target, tree.anchors))
        return [pin for cell in cells for pin in tree.pins.resident(cell, lease.node)]

    def _cut_at_reaches(self, lease: IndexLease, source: Tier) -> None:
        """Split the nodes in which a reach begins, so that windows before it are not copied."""
        tree = self._tree
        for anchor in range(tree.anchors):
            cell = tree.cell(source, anchor)
            reach = tree.cells[cell].reach
            start = 0 if reach is None else lease.boundary - reach
            for node in tree.path(lease.node) if start > 0 else ():
                if node.depth < start < node.end and node.resident >> cell & 1:
                    tree.split(node, start - node.depth)

    def _runs(self, lease: IndexLease, source: Tier, target: Tier) -> dict[int, list[NodeRun]]:
        """Per anchor, the runs of nodes to copy: in the source, not held by the target."""
        tree = self._tree
        if lease.hidden and target > source:
            return {}
        path = tree.path(lease.node)
        runs: dict[int, list[NodeRun]] = {}
        for anchor in range(tree.anchors):
            here = tree.cell(source, anchor)
            if target < tree.cells[tree.homes[anchor]].tier:
                continue
            reach, start, held_by = tree.cells[here].reach, 0, 1 << tree.cell(target, anchor)
            if target < source:
                start = 0 if reach is None else lease.boundary - reach
                held_by = sum(1 << tree.cell(tier, anchor) for tier in Tier if tier < source)
            found: list[NodeRun] = []
            joined = False
            for node in path:
                held = (node.resident | node.arriving) & held_by
                wanted = not held and node.resident >> here & 1 and node.end > start
                if wanted and target > source and reach is not None:
                    wanted = not lease.passing(node, reach)
                if wanted and joined:
                    found[-1].append(node)
                elif wanted:
                    found.append([node])
                joined = bool(wanted)
            if found:
                runs[anchor] = found
        return runs

    def _awaited(self, lease: IndexLease, own: Arrival) -> tuple[Arrival, ...]:
        """The other arrivals that bring pages of the lease's path to the same tier.

        Each of them records the lease, and pins its pages for the lease when it lands.
        """
        tree, numbers = self._tree, dict[int, None]()
        for anchor in range(tree.anchors):
            cell = tree.cell(own.target, anchor)
            reach = tree.cells[cell].reach
            start = 0 if reach is None else lease.boundary - reach
            for node in tree.path(lease.node):
                coming = node.arriving >> cell & 1 and node.end > start
                if coming and node.arrivals is not None:
                    numbers[node.arrivals[cell]] = None
        others = tuple(tree.arrivals[n] for n in numbers if n != own.number)
        for other in others:
            other.leases.append(lease)
        return others

    def _begin(self, runs: dict[int, list[NodeRun]], source: Tier, target: Tier) -> Arrival:
        """Take the promised slots, mark the pages ARRIVING, pin their source."""
        tree = self._tree
        number = tree.next_number()
        parts: list[ArrivalPart] = []
        pins: list[Pin] = []
        guards: list[Pin] = []
        moves: list[PageMove] = []
        for anchor, of_anchor in runs.items():
            here, there = tree.cell(source, anchor), tree.cell(target, anchor)
            for run in of_anchor:
                start, end = run[0].depth, run[-1].depth + run[-1].pages
                slots = tree.cells[there].slots.take(end - start)
                for node in run:
                    tree.arrive(node, there, number)
                parts.append(ArrivalPart(there, run[-1], start, end, slots))
                pins.append(tree.pins.span(here, run[-1], start))
                guards += self._pin_above(here, run[0]) + self._pin_above(there, run[0])
            move = self._move(anchor, source, target, of_anchor, parts)
            name, sources, targets = move.anchor, move.source_slots, move.target_slots
            tree.presence.copy(name, source, sources, target, targets)
            moves.append(move)
        arrival = Arrival(number, source, target, parts, pins, guards, tuple(moves))
        tree.arrivals[number] = arrival
        return arrival

    def _pin_above(self, cell: int, node: Node) -> list[Pin]:
        """A history must not lose the pages above others: pin them, too."""
        above = node.parent
        if above is None or self._tree.cells[cell].reach is not None:
            return []
        return [self._tree.pins.upwards(cell, above)] if above.resident >> cell & 1 else []

    def _move(
        self, anchor: int, source: Tier, target: Tier, runs: list[NodeRun], parts: list[ArrivalPart]
    ) -> PageMove:
        here = self._tree.cell(source, anchor)
        there = self._tree.cell(target, anchor)
        return PageMove(
            self._tree.anchor_names[anchor],
            source,
            target,
            np.concatenate([node.resident_slots(here) for run in runs for node in run]),
            np.concatenate([part.slots for part in parts if part.cell == there]),
        )

    def _close(self, arrival: Arrival) -> None:
        known = self._tree.arrivals.pop(arrival.number, None)
        assert arrival.live and known is arrival, "this arrival is over, or another index's"
        arrival.live = False
        self._tree.tick += 1

    @staticmethod
    def _expects(node: Node, cell: int, arrival: Arrival) -> bool:
        """False when the pages were computed meanwhile: the arrival's are duplicates then."""
        return node.arrivals is not None and node.arrivals.get(cell) == arrival.number

    @staticmethod
    def _slices(part: ArrivalPart) -> list[tuple[Node, Slots]]:
        """The part's nodes as they are now, topmost first, each with its slots."""
        nodes = list(Pin(part.cell, part.node, part.start).nodes())
        return [
            (node, part.slots[node.depth - part.start : node.depth + node.pages - part.start])
            for node in reversed(nodes)
        ]

    def _leave(self, nodes: list[Node], cell: int) -> None:
        """Drop the source copies of a demotion, deepest first, unless they are pinned again."""
        queue = self._tree.cells[cell].queue
        for node in nodes:
            if queue.evictable(node):
                self._tree.drop(node, cell)


def _ahead(node: Node) -> list[Node]:
    """The nodes on the path that may carry sidecars which the host's copies lack, top down."""
    found, above = [], node
    while above.parent is not None:
        if above.ahead:
            found.append(above)
        above = above.parent
    return found[::-1]


def _cut(move: PageMove, pages: int) -> PageMove:
    """The first pages of a move."""
    sources, targets = move.source_slots[:pages], move.target_slots[:pages]
    return replace(move, source_slots=sources, target_slots=targets)


def _pages(runs: list[NodeRun]) -> int:
    return sum(node.pages for run in runs for node in run)
