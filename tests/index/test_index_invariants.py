"""Every check of the validator can fail: each is shown a broken index."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.index import Index, LackingPage, SidecarImport
from kvtide.index import index_invariants as checks
from kvtide.index.keys import SCRATCH
from kvtide.index.tree.node import Node, Root
from kvtide.index.tree.presence import SidecarSlots
from kvtide.spec import Tier, with_draft
from tests.index.building import build, compute, keep, lease_for
from tests.index.memories import FULL, PAGE, WINDOW

TEXT = list(range(1, 6 * PAGE + 1))
Case = tuple[Callable[..., object], Callable[[Index], None], str]


def _busy() -> Index:
    """Pages kept, pages leased, pages in flight, slots reserved and promised."""
    index = build(with_draft(WINDOW, FULL, holdback=0))
    keep(index, [90] * (2 * PAGE))
    keep(index, TEXT, checkpoints=[3, 6])
    lease = lease_for(index, TEXT[: 3 * PAGE] + [7] * (2 * PAGE))
    index.reserve(lease, 5 * PAGE, growth=2)
    flying = compute(index, [50] * (2 * PAGE))
    assert index.copy(flying, Tier.DEVICE, Tier.HOST) is not None
    return index


def _node(index: Index, first: int) -> Node:
    return next(n for n in index.tree.walk() if n.tokens[0] == first)


def _kept(index: Index) -> Node:
    return _node(index, 90)


def _flying(index: Index) -> Node:
    return _node(index, 50)


def _lease(index: Index):
    return next(iter(index.tree.leases.values()))


def _unlink(index: Index) -> None:
    parent = _kept(index).parent
    parent.children[b"wrong"] = parent.children.pop(_kept(index).tokens[: index.tree.page_bytes])


def _shift(index: Index) -> None:
    _kept(index).depth += 1


def _lose_tokens(index: Index) -> None:
    _kept(index).tokens = _kept(index).tokens[:-4]


def _miscount_nodes(index: Index) -> None:
    index.tree.nodes += 1


def _empty_node(index: Index) -> None:
    node = index.tree.add_leaf(_kept(index), b"\1" * index.tree.page_bytes, 1)
    assert not node.resident


def _both(index: Index) -> None:
    _flying(index).resident |= _flying(index).arriving


def _empty_root(index: Index) -> None:
    root = Root((index.prompt([]).namespace._replace(adapter="x"), b""), len(index.tree.cells))
    index.tree.roots[root.name] = root


def _resident_without_slots(index: Index) -> None:
    _kept(index).slots[0] = None


def _short_slots(index: Index) -> None:
    _kept(index).slots[0] = _kept(index).resident_slots(0)[:-1]


def _two_owners(index: Index) -> None:
    _kept(index).resident_slots(0)[0] = _flying(index).resident_slots(0)[0]


def _leak(index: Index) -> None:
    lease = _lease(index)
    for segment in lease.segments:
        segment.slots.pop(0)


def _beyond(index: Index) -> None:
    _kept(index).resident_slots(0)[0] = 1000


def _promise(index: Index) -> None:
    index.tree.cells[0].slots.promised += 1


def _promise_below(index: Index) -> None:
    index.tree.cells[-1].slots.promised += 1


def _too_many_promises(index: Index) -> None:
    index.tree.cells[0].slots.promised += 1000


def _too_few_available(index: Index) -> None:
    index.tree.cells[0].slots.available -= 1


def _shared_row(index: Index) -> None:
    _lease(index).hot_row = 7


def _lost_row(index: Index) -> None:
    index.tree.hot_rows.reserve(1)
    index.tree.hot_rows.take(1)


def _promised_row(index: Index) -> None:
    index.tree.hot_rows.reserve(1)


def _given(index: Index) -> None:
    _kept(index).departed = 1 << 2


def _kids(index: Index) -> None:
    _kept(index).kids[0] += 1


def _root_kids(index: Index) -> None:
    next(iter(index.tree.roots.values())).kids[0] -= 1


def _pin(index: Index) -> None:
    _flying(index).pins[0] += 1


def _lost_pin(index: Index) -> None:
    _lease(index).pins.pop()


def _pinned_but_absent(index: Index) -> None:
    lease = _lease(index)
    lease.pins.append(lease.pins[0]._replace(cell=2))


def _resident_count(index: Index) -> None:
    index.tree.cells[0].resident_pages += 1


def _pinned_count(index: Index) -> None:
    index.tree.cells[0].pinned_pages -= 1


def _unknown_arrival(index: Index) -> None:
    node = _flying(index)
    node.arrivals = dict.fromkeys(node.arrivals, 12345)


def _arriving_bit(index: Index) -> None:
    _flying(index).arrivals.popitem()


def _unqueued(index: Index) -> None:
    index.tree.cells[0].queue._heap.clear()


def _renamed_root(index: Index) -> None:
    next(iter(index.tree.roots.values())).name = (SCRATCH, b"")


def _half_hidden(index: Index) -> None:
    _kept(index).hidden = True


def _hidden_unpinned(index: Index) -> None:
    _kept(index).hidden = _kept(index).parent.hidden = True


def _lease_count(index: Index) -> None:
    _kept(index).leases += 1


def _lease_boundary(index: Index) -> None:
    _lease(index).boundary += 1


def _lost_draft(index: Index) -> None:
    for arrival in list(index.tree.arrivals.values()):
        index.land(arrival)
    slots = _flying(index).resident_slots(index.tree.cell(Tier.HOST, 0))
    index.tree.presence.mark(Tier.HOST, "kv", slots, without=["draft"])


def _expected_of_nothing(index: Index) -> None:
    slots = _flying(index).resident_slots(index.tree.cell(Tier.DEVICE, 0))
    index.tree.presence.expect([SidecarSlots(Tier.DEVICE, "kv", "draft", slots)])


def _brought_twice(index: Index) -> None:
    page = LackingPage("kv", 0, 0, ("draft",))
    for number in (901, 902):
        index.tree.sidecar_imports[number] = SidecarImport(number, [page], [])


CASES: list[Case] = [
    (checks.tree_is_linked_both_ways, _unlink, "does not know it by its first page"),
    (checks.tree_is_linked_both_ways, _shift, "does not begin where its parent ends"),
    (checks.tree_is_linked_both_ways, _lose_tokens, "has tokens for"),
    (checks.tree_is_linked_both_ways, _miscount_nodes, "its count says"),
    (checks.nodes_live_while_held, _empty_node, "nothing holds it"),
    (checks.nodes_live_while_held, _both, "resident and arriving"),
    (checks.nodes_live_while_held, _empty_root, "it has a root"),
    (checks.cells_have_slots_iff_resident, _resident_without_slots, "its slots disagree"),
    (checks.cells_have_slots_iff_resident, _short_slots, "1 slots in cell 0"),
    (checks.every_slot_has_one_owner, _two_owners, "have two owners"),
    (checks.every_slot_has_one_owner, _leak, "have no owner"),
    (checks.every_slot_has_one_owner, _beyond, "have no owner"),
    (checks.promises_are_covered, _promise, "leases hold"),
    (checks.promises_are_covered, _promise_below, "leases hold 0"),
    (checks.promises_are_covered, _too_many_promises, "more slots promised than free"),
    (checks.promises_are_covered, _too_few_available, "slots free, and"),
    (checks.every_hot_row_has_one_owner, _shared_row, "hot rows [7] have two owners"),
    (checks.every_hot_row_has_one_owner, _lost_row, "hot rows [0] have no owner"),
    (checks.every_hot_row_has_one_owner, _promised_row, "1 hot rows promised"),
    (checks.only_pages_that_are_there_were_given_to_a_store, _given, "departed from cells 100"),
    (checks.kids_are_counted, _kids, "1 children in cell 0, really 0"),
    (checks.kids_are_counted, _root_kids, "children in cell 0, really"),
    (checks.pins_are_those_of_their_holders, _pin, "pins in cell 0, holders"),
    (checks.pins_are_those_of_their_holders, _lost_pin, "holders"),
    (checks.pins_are_those_of_their_holders, _pinned_but_absent, "but not resident"),
    (checks.page_counts_are_sums, _resident_count, "cell 0: it counts"),
    (checks.page_counts_are_sums, _pinned_count, "cell 0: it counts"),
    (checks.arrivals_are_expected, _unknown_arrival, "does not bring it"),
    (checks.arrivals_are_expected, _arriving_bit, "arriving bits and arrivals disagree"),
    (checks.evictable_nodes_are_queued, _unqueued, "but in no queue"),
    (checks.leases_stand_at_their_boundary, _lease_count, "leases stand here, really 0"),
    (checks.leases_stand_at_their_boundary, _lease_boundary, "does not end at its boundary"),
    (checks.hidden_trees_hang_on_roots_without_a_name, _renamed_root, "it says otherwise"),
    (checks.hidden_trees_hang_on_roots_without_a_name, _half_hidden, "than the page before"),
    (checks.hidden_pages_are_needed, _hidden_unpinned, "although nothing pins it"),
    (checks.sidecars_the_host_lacks_are_noted, _lost_draft, "lacks draft, and nothing notes it"),
    (checks.sidecars_that_come_are_brought_once, _expected_of_nothing, "expected, or brought"),
    (checks.sidecars_that_come_are_brought_once, _brought_twice, "draft is brought twice"),
]


def test_a_busy_index_is_healthy() -> None:
    assert _busy().validate() == []


@pytest.mark.parametrize(
    ("check", "corrupt", "sentence"),
    CASES,
    ids=[f"{check.__name__}-{corrupt.__name__[1:]}" for check, corrupt, _ in CASES],
)
def test_a_check_reports_what_it_is_for(check, corrupt, sentence: str) -> None:
    index = _busy()
    corrupt(index)
    found = list(check(index.tree))
    assert any(sentence in problem for problem in found), found
    assert set(found) <= set(index.validate()), "validate collects the sentences of every check"


def test_every_check_has_a_case_that_breaks_it() -> None:
    assert {check for check, _, _ in CASES} == set(checks.CHECKS)
    defined = {
        value
        for name, value in vars(checks).items()
        if callable(value) and getattr(value, "__module__", "") == checks.__name__
        and not name.startswith("_")
    }  # fmt: skip
    assert defined - {checks.violations} == set(checks.CHECKS), "a check that is not in the table"
