"""What must hold between any two verbs, as a table of small checks.

Each check yields sentences. `violations` collects those of all checks, so that one broken count
shows with everything it broke. docs/INVARIANTS.md explains them in prose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kvtide.index.keys import Hidden
from kvtide.index.tree.holds import Pin
from kvtide.index.tree.node import Node
from kvtide.index.tree.presence import SidecarSlots
from kvtide.index.tree.tree import Tree
from kvtide.spec import Tier


def violations(tree: Tree) -> list[str]:
    return [sentence for check in CHECKS for sentence in check(tree)]


def _name(node: Node) -> str:
    return f"pages {node.depth}..{node.depth + node.pages}"


def tree_is_linked_both_ways(tree: Tree) -> Iterator[str]:
    count = 0
    for node in tree.walk():
        count += 1
        assert node.parent is not None
        if node.parent.children.get(node.tokens[: tree.page_bytes]) is not node:
            yield f"{_name(node)}: its parent does not know it by its first page"
        if node.depth != node.parent.depth + node.parent.pages:
            yield f"{_name(node)}: does not begin where its parent ends"
        if not node.pages or len(node.tokens) != node.pages * tree.page_bytes:
            yield f"{_name(node)}: has tokens for {len(node.tokens) / tree.page_bytes} pages"
    if count != tree.nodes:
        yield f"the tree has {count} nodes, its count says {tree.nodes}"


def nodes_live_while_held(tree: Tree) -> Iterator[str]:
    for node in tree.walk():
        if not (node.resident or node.arriving or node.children or node.leases):
            yield f"{_name(node)}: nothing holds it, yet it is in the tree"
        if node.resident & node.arriving:
            yield f"{_name(node)}: resident and arriving in the same cell"
    for root in tree.roots.values():
        if not root.children and not root.leases:
            yield f"namespace {root.name[0]}: empty, yet it has a root"


def cells_have_slots_iff_resident(tree: Tree) -> Iterator[str]:
    for node in tree.walk():
        for cell in range(len(tree.cells)):
            slots = node.slots[cell]
            if (node.resident >> cell & 1) != (slots is not None):
                yield f"{_name(node)}: residency in cell {cell} and its slots disagree"
            elif slots is not None and len(slots) != node.pages:
                yield f"{_name(node)}: {len(slots)} slots in cell {cell}"


def every_slot_has_one_owner(tree: Tree) -> Iterator[str]:
    owners: list[Counter[int]] = [Counter(cell.slots.free_slots().tolist()) for cell in tree.cells]
    for node in tree.walk():
        for cell, slots in enumerate(node.slots):
            if slots is not None:
                owners[cell].update(slots.tolist())
    for arrival in tree.arrivals.values():
        for part in arrival.parts:
            owners[part.cell].update(part.slots.tolist())
    for arriving in tree.imports.values():
        for taken in arriving.taken:
            owners[taken.cell][taken.slot] += 1
    for lease in tree.leases.values():
        for segment in lease.segments:
            for cell, slots in segment.slots.items():
                owners[cell].update(slots.tolist())
    for cell, owned in enumerate(owners):
        capacity = tree.cells[cell].slots.capacity
        shared = [slot for slot, count in owned.items() if count > 1]
        lost = set(range(capacity)) - owned.keys()
        if shared:
            yield f"cell {cell}: slots {shared[:4]} have two owners"
        if lost:
            yield f"cell {cell}: slots {sorted(lost)[:4]} have no owner"
        if len(owned) > capacity:
            yield f"cell {cell}: slots beyond its capacity of {capacity}"


def promises_are_covered(tree: Tree) -> Iterator[str]:
    for number, cell in enumerate(tree.cells):
        promised = sum(lease.growth.get(number, 0) for lease in tree.leases.values())
        if cell.slots.promised != promised:
            yield f"cell {number}: {cell.slots.promised} slots promised, leases hold {promised}"
        free = len(cell.slots.free_slots())
        if cell.slots.promised > free:
            yield f"cell {number}: more slots promised than free"
        if cell.slots.available != free - cell.slots.promised:
            yield f"cell {number}: {free} slots free, and {cell.slots.available} available"


def every_hot_row_has_one_owner(tree: Tree) -> Iterator[str]:
    rows = Counter(tree.hot_rows.free_slots().tolist())
    rows.update(lease.hot_row for lease in tree.leases.values() if lease.hot_row >= 0)
    if shared := [row for row, count in rows.items() if count > 1]:
        yield f"hot rows {shared[:4]} have two owners"
    if lost := set(range(tree.hot_rows.capacity)) - rows.keys():
        yield f"hot rows {sorted(lost)[:4]} have no owner"
    if tree.hot_rows.promised:
        yield f"{tree.hot_rows.promised} hot rows promised, and never taken"


def kids_are_counted(tree: Tree) -> Iterator[str]:
    for node in (*tree.walk(), *tree.roots.values()):
        for cell in range(len(tree.cells)):
            held = sum((k.resident | k.arriving) >> cell & 1 for k in node.children.values())
            if node.kids[cell] != held:
                yield f"{_name(node)}: {node.kids[cell]} children in cell {cell}, really {held}"


def pins_are_those_of_their_holders(tree: Tree) -> Iterator[str]:
    counts: Counter[tuple[int, int]] = Counter()
    pins_held = [pin for lease in tree.leases.values() for pin in lease.pins]
    for arrival in tree.arrivals.values():
        pins_held += (*arrival.pins, *arrival.guards, *arrival.computed)
    pins_held += [pin for departure in tree.departures.values() for pin in departure.pins]
    pins_held += [pin for arriving in tree.imports.values() for pin in arriving.guards]
    pins_held += [pin for arriving in tree.sidecar_imports.values() for pin in arriving.pins]
    for pin in pins_held:
        for node in pin.nodes():
            counts[id(node), pin.cell] += 1
            if not node.resident >> pin.cell & 1:
                yield f"{_name(node)}: pinned in cell {pin.cell}, but not resident there"
    for node in tree.walk():
        for cell, pins in enumerate(node.pins):
            if pins != counts[id(node), cell]:
                yield f"{_name(node)}: {pins} pins in cell {cell}, holders {counts[id(node), cell]}"


def page_counts_are_sums(tree: Tree) -> Iterator[str]:
    for number, cell in enumerate(tree.cells):
        nodes = [node for node in tree.walk() if node.resident >> number & 1]
        resident = sum(node.pages for node in nodes)
        pinned = sum(node.pages for node in nodes if node.pins[number])
        if (cell.resident_pages, cell.pinned_pages) != (resident, pinned):
            yield (
                f"cell {number}: it counts {cell.resident_pages} resident and "
                f"{cell.pinned_pages} pinned pages, the tree has {resident} and {pinned}"
            )


def arrivals_are_expected(tree: Tree) -> Iterator[str]:
    for node in tree.walk():
        arrivals = node.arrivals or {}
        if sum(1 << cell for cell in arrivals) != node.arriving:
            yield f"{_name(node)}: arriving bits and arrivals disagree"
        for cell, number in arrivals.items():
            arrival = tree.arrivals.get(number)
            parts = arrival.parts if arrival is not None else []
            if not any(
                part.cell == cell and node in Pin(cell, part.node, part.start).nodes()
                for part in parts
            ):
                yield f"{_name(node)}: waits in cell {cell} for an arrival that does not bring it"


def evictable_nodes_are_queued(tree: Tree) -> Iterator[str]:
    for number, cell in enumerate(tree.cells):
        queued = cell.queue.nodes()
        for node in tree.walk():
            if cell.queue.evictable(node) and id(node) not in queued:
                yield f"{_name(node)}: evictable in cell {number}, but in no queue"


def leases_stand_at_their_boundary(tree: Tree) -> Iterator[str]:
    standing = Counter(id(lease.node) for lease in tree.leases.values())
    for node in (*tree.walk(), *tree.roots.values()):
        if node.leases != standing[id(node)]:
            yield f"{_name(node)}: {node.leases} leases stand here, really {standing[id(node)]}"
    for lease in tree.leases.values():
        if lease.node.depth + lease.node.pages != lease.boundary:
            yield f"lease {lease.number}: its node does not end at its boundary {lease.boundary}"


def hidden_trees_hang_on_roots_without_a_name(tree: Tree) -> Iterator[str]:
    for root in tree.roots.values():
        if root.hidden != isinstance(root.name[0], Hidden):
            yield f"root {root.name}: a prompt may name it or not, it says otherwise"
    for node in tree.walk():
        if node.parent is not None and node.hidden != node.parent.hidden:
            yield f"{_name(node)}: hidden, or not, otherwise than the page before"


def hidden_pages_are_needed(tree: Tree) -> Iterator[str]:
    for node in tree.walk():
        for number, cell in enumerate(tree.cells):
            if node.hidden and cell.queue.evictable(node):
                yield f"{_name(node)}: hidden, and in cell {number} although nothing pins it"


def sidecars_the_host_lacks_are_noted(tree: Tree) -> Iterator[str]:
    for node in tree.walk() if tree.presence.needed else ():
        for anchor, name in enumerate(tree.anchor_names):
            ours, theirs = node.slots[anchor], node.slots[tree.cell(Tier.HOST, anchor)]
            if node.ahead or ours is None or theirs is None:
                continue
            for move in tree.presence.additions(name, Tier.DEVICE, ours, Tier.HOST, theirs):
                yield f"{_name(node)}: the host lacks {move.sidecar}, and nothing notes it"


def sidecars_that_come_are_brought_once(tree: Tree) -> Iterator[str]:
    brought = Counter(
        (where.tier, where.anchor, where.sidecar, slot)
        for arrival in tree.arrivals.values()
        for where in SidecarSlots.of(arrival.moves)
        for slot in where.slots.tolist()
    )
    brought.update(
        (Tier.HOST, page.anchor, sidecar, page.slot)
        for arriving in tree.sidecar_imports.values()
        for page in arriving.pages
        for sidecar in page.sidecars
    )
    expected = {
        (where.tier, where.anchor, where.sidecar, slot)
        for where in tree.presence.expected()
        for slot in where.slots.tolist()
    }
    for tier, anchor, sidecar, slot in expected ^ brought.keys():
        yield f"{tier.name}: {sidecar} of slot {slot} of {anchor} is expected, or brought, only"
    for tier, anchor, sidecar, slot in (one for one, count in brought.items() if count > 1):
        yield f"{tier.name}: {sidecar} is brought twice to slot {slot} of {anchor}"


def only_pages_that_are_there_were_given_to_a_store(tree: Tree) -> Iterator[str]:
    for node in tree.walk():
        if gone := node.departed & ~node.resident:
            yield f"{_name(node)}: departed from cells {gone:b} (bits), and not resident there"


IndexCheck = Callable[[Tree], Iterator[str]]

CHECKS: tuple[IndexCheck, ...] = (
    tree_is_linked_both_ways,
    nodes_live_while_held,
    cells_have_slots_iff_resident,
    every_slot_has_one_owner,
    promises_are_covered,
    every_hot_row_has_one_owner,
    kids_are_counted,
    pins_are_those_of_their_holders,
    page_counts_are_sums,
    arrivals_are_expected,
    evictable_nodes_are_queued,
    leases_stand_at_their_boundary,
    hidden_trees_hang_on_roots_without_a_name,
    hidden_pages_are_needed,
    sidecars_the_host_lacks_are_noted,
    sidecars_that_come_are_brought_once,
    only_pages_that_are_there_were_given_to_a_store,
)
