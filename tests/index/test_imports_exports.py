"""Pages that come from outside, and pages that go there: one by one."""

from __future__ import annotations

import pytest

from kvtide.index import Index, WantedPages
from kvtide.spec import Tier
from tests.index.building import back_up, build, compute, found, keep, lease_for
from tests.index.memories import DRAFTED, FULL, PAGE, RECURRENT, WINDOW

TEXT = list(range(1, 8 * PAGE + 1))


def take(index: Index, tokens: list[int], *pages: tuple[str, int]):
    lease = lease_for(index, [*tokens, 0], slowest=Tier.HOST)
    return index.take(lease, [WantedPages(*page) for page in pages])


def test_what_is_taken_is_not_found_before_it_is_adopted() -> None:
    index = build(FULL)
    arriving = take(index, TEXT, *(("kv", page) for page in range(8)))
    assert found(index, TEXT) == 0 and index.free_pages(Tier.HOST, "kv") == 32
    index.adopt(arriving, arriving.taken[:3], [()] * 3)
    assert found(index, TEXT) == 3
    index.adopt(arriving, arriving.taken[:5], [()] * 5)
    assert found(index, TEXT) == 8 and index.validate() == []
    index.forgo(arriving)
    assert found(index, TEXT) == 8 and index.free_pages(Tier.HOST, "kv") == 32


def test_what_is_not_adopted_goes_back() -> None:
    index = build(FULL)
    arriving = take(index, TEXT, *(("kv", page) for page in range(8)))
    index.adopt(arriving, arriving.taken[:2], [()] * 2)
    index.forgo(arriving)
    assert index.free_pages(Tier.HOST, "kv") == 38 and not index.tree.leases
    assert index.validate() == []


def test_no_room_changes_nothing() -> None:
    index = build(FULL, host=4)
    keep(index, TEXT[: 2 * PAGE])
    back_up(index, TEXT[: 2 * PAGE])
    lease = lease_for(index, TEXT, slowest=Tier.HOST)
    assert index.take(lease, [WantedPages("kv", page) for page in range(2, 8)]) is None
    assert index.validate() == [] and index.free_pages(Tier.HOST, "kv") == 2
    index.release(lease)
    assert index.tree.cells[index.tree.cell(Tier.HOST, 0)].pinned_pages == 0


def test_doubles_go_back() -> None:
    index = build(FULL)
    arriving = take(index, TEXT, *(("kv", page) for page in range(8)))
    keep(index, TEXT[: 4 * PAGE])
    back_up(index, TEXT[: 4 * PAGE])
    index.adopt(arriving, arriving.taken[:8], [()] * 8)
    index.forgo(arriving)
    assert index.resident_pages(Tier.HOST, "kv") == 8 and index.validate() == []


def test_what_comes_below_absent_pages_is_found_when_they_come() -> None:
    index = build(FULL)
    below = take(index, TEXT, *(("kv", page) for page in range(4, 8)))
    index.adopt(below, below.taken[:4], [()] * 4)
    assert found(index, TEXT) == 0 and index.validate() == []
    above = take(index, TEXT, *(("kv", page) for page in range(4)))
    index.adopt(above, above.taken[:4], [()] * 4)
    assert found(index, TEXT) == 8 and index.validate() == []


def test_an_import_keeps_what_it_builds_on_until_it_is_abandoned() -> None:
    """Beyond the boundary, too: a history whose states are on their way."""
    index = build(RECURRENT)
    keep(index, TEXT, checkpoints=[8])
    back_up(index, TEXT)
    index.evict(Tier.DEVICE, "kv", 100)
    index.evict(Tier.DEVICE, "state", 100)
    index.evict(Tier.HOST, "state", 100)
    assert found(index, TEXT) == 0
    arriving = take(index, TEXT, ("state", 7))
    assert index.evict(Tier.HOST, "kv", 100) == 0
    index.adopt(arriving, arriving.taken[:1], [()])
    assert found(index, TEXT) == 8
    index.abandon(arriving)
    assert index.evict(Tier.HOST, "kv", 100) == 8 and index.validate() == []
    index.forgo(arriving)
    assert index.validate() == []


def test_nothing_is_adopted_after_it_was_abandoned() -> None:
    index = build(FULL)
    arriving = take(index, TEXT, ("kv", 0))
    index.abandon(arriving)
    index.abandon(arriving)
    with pytest.raises(AssertionError):
        index.adopt(arriving, arriving.taken[:1], [()])
    index.forgo(arriving)


def test_a_landing_that_departs_stays_until_it_has_departed() -> None:
    index = build(WINDOW)
    keep(index, TEXT)
    lease = lease_for(index, [*TEXT, 0])
    departure = index.land_departing(index.copy(lease, Tier.DEVICE, Tier.HOST))
    index.release(lease)
    assert {page.anchor for page in departure.pages} == {"kv", "swa"}
    assert index.clear(Tier.HOST) == 0 and index.validate() == []
    longer = compute(index, TEXT[: 3 * PAGE] + [99] * PAGE)
    index.release(longer)
    assert index.clear(Tier.HOST) == 0 and index.validate() == [], "it was split, and stays"
    index.departed(departure)
    assert index.clear(Tier.HOST) == len(departure.pages) and index.validate() == []


def test_nothing_departs_twice() -> None:
    index = build(FULL)
    keep(index, TEXT)
    lease = lease_for(index, [*TEXT, 0])
    first = index.land_departing(index.copy(lease, Tier.DEVICE, Tier.HOST))
    again = index.land_departing(index.copy(lease, Tier.DEVICE, Tier.HOST))
    assert len(first.pages) == 8 and again is None
    index.departed(first)
    with pytest.raises((AssertionError, KeyError)):
        index.departed(first)


def test_what_is_quarantined_while_it_departs_goes_when_it_has_departed() -> None:
    index = build(FULL)
    keep(index, TEXT)
    lease = lease_for(index, [*TEXT, 0])
    departure = index.land_departing(index.copy(lease, Tier.DEVICE, Tier.HOST))
    index.release(lease)
    index.quarantine(index.prompt(TEXT))
    assert index.validate() == [] and index.resident_pages(Tier.HOST, "kv") == 8
    index.departed(departure)
    assert index.resident_pages(Tier.HOST, "kv") == 0 and not index.tree.roots


def test_what_came_without_a_draft_is_loaded_without_it() -> None:
    index = build(DRAFTED)
    (draft,) = (p.name for p in DRAFTED.pools if p.follows and not p.reuse.required)
    tokens = TEXT[: 4 * PAGE]
    lease = lease_for(index, [*tokens, *[0] * DRAFTED.holdback], slowest=Tier.HOST)
    pages = [*(("kv", page) for page in range(4)), ("swa", 2), ("swa", 3)]
    arriving = index.take(lease, [WantedPages(*page) for page in pages])
    index.adopt(arriving, arriving.taken[:6], [(), (draft,), (), (draft,), (), ()])
    index.forgo(arriving)
    again = lease_for(index, [*tokens, *[0] * DRAFTED.holdback], slowest=Tier.HOST)
    index.land(index.copy(again, Tier.HOST, Tier.DEVICE))
    assert index.carries(again, draft).tolist() == [True, False, True, False]
