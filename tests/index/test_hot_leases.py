"""Leases of hot pools: host slots, a row, and what leaves for a store with the rest of a run."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvtide.index import Index, IndexLease, WantedPages
from kvtide.spec import Tier
from tests.index.building import back_up, build, compute, found, keep, lease_for
from tests.index.memories import HOT, PAGE

TEXT = list(range(100, 140))


def test_a_lease_has_host_slots_of_hot_pools_and_a_row() -> None:
    index = build(HOT)
    lease = lease_for(index, TEXT)
    assert index.reserve(lease, len(TEXT), growth=2) and lease.hot_row >= 0
    assert index.free_pages(Tier.HOST, "kv") == 40 - len(TEXT) // PAGE - 2
    assert index.free_pages(Tier.DEVICE, "kv") == index.free_pages(Tier.HOST, "index") == 40
    assert index.hot_rows == (1, 8)
    index.commit(lease, len(TEXT))
    assert index.resident_pages(Tier.HOST, "kv") == len(TEXT) // PAGE
    assert index.resident_pages(Tier.DEVICE, "kv") == 0
    index.release(lease)
    assert index.hot_rows == (0, 8) and index.validate() == []


def test_a_prefix_at_home_is_found_with_the_device_alone_and_nothing_is_loaded() -> None:
    index = build(HOT)
    keep(index, TEXT)
    assert found(index, TEXT, Tier.DEVICE) == len(TEXT) // PAGE
    lease = lease_for(index, [*TEXT, 0], slowest=Tier.HOST)
    assert index.at_home(lease) and index.slowest(lease) is Tier.DEVICE
    assert index.copy(lease, Tier.HOST, Tier.DEVICE).moves == ()


def test_only_what_the_device_lacks_is_loaded() -> None:
    index = build(HOT)
    keep(index, TEXT)
    back_up(index, TEXT)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, [*TEXT, 0])
    assert not index.at_home(lease)
    arrival = index.copy(lease, Tier.HOST, Tier.DEVICE)
    assert [move.anchor for move in arrival.moves] == ["index"]
    index.land(arrival)
    assert index.at_home(lease) and index.validate() == []


def test_a_lease_waits_where_all_rows_are_taken() -> None:
    index = build(HOT, hot_rows=1)
    first, second = lease_for(index, TEXT), lease_for(index, TEXT)
    assert index.reserve(first, len(TEXT)) and not index.reserve(second, len(TEXT))
    assert index.missing == {} and second.reserved == 0 and second.hot_row < 0
    index.release(first)
    assert index.reserve(second, len(TEXT)) and index.validate() == []


def test_the_host_decides_how_long_a_lease_grows() -> None:
    index = build(HOT, host={"index": 40, "kv": 3})
    lease = lease_for(index, TEXT)
    assert not index.reserve(lease, 4 * PAGE)
    assert index.missing == {(Tier.HOST, "kv"): 1}
    assert index.reserve(lease, 3 * PAGE)


def test_hot_pages_depart_with_those_that_land_beside_them() -> None:
    index = build(HOT)
    lease = compute(index, TEXT)
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    departure = index.land_departing(arrival)
    pages = len(TEXT) // PAGE
    assert sorted(page.anchor for page in departure.pages) == ["index"] * pages + ["kv"] * pages
    table = index.page_table(lease, "kv").tolist()
    assert [page.slot for page in departure.pages if page.anchor == "kv"] == table
    index.release(lease)
    assert index.evict(Tier.HOST, "kv", 100) == 0, "pages are pinned until they are written"
    index.departed(departure)
    assert index.evict(Tier.HOST, "kv", 100) == pages and index.validate() == []


def _leave(index: Index, lease: IndexLease) -> list[str]:
    """The anchors of the pages that depart with a backup of the lease's path."""
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None
    departure = index.land_departing(arrival)
    if departure is None:
        return []
    index.departed(departure)
    return [page.anchor for page in departure.pages]


def test_hot_pages_committed_after_a_backup_began_leave_with_the_next_one() -> None:
    """What computes them may be running when the first one lands."""
    index = build(HOT)
    keep(index, TEXT)
    index.evict(Tier.HOST, "kv", 100)
    early = index.demote(Tier.DEVICE, Tier.HOST, "index", 100)
    lease = compute(index, TEXT)
    departure = index.land_departing(early)
    assert {page.anchor for page in departure.pages} == {"index"}
    index.departed(departure)
    assert _leave(index, lease) == ["kv"] * 10 and index.validate() == []
    assert _leave(index, lease) == []


@pytest.mark.parametrize("ending", ["land", "fail"])
def test_hot_pages_whose_backup_did_not_depart_leave_with_the_next_one(ending: str) -> None:
    index = build(HOT)
    lease = compute(index, TEXT)
    getattr(index, ending)(index.copy(lease, Tier.DEVICE, Tier.HOST))
    assert _leave(index, lease).count("kv") == 10
    assert _leave(index, lease) == [] and index.validate() == []


def test_of_a_lease_that_grows_each_hot_page_leaves_once() -> None:
    index = build(HOT)
    lease = lease_for(index, TEXT)
    left = []
    for page in range(1, 9):
        assert index.reserve(lease, page * PAGE)
        index.commit(lease, page * PAGE)
        left.append(_leave(index, lease).count("kv"))
    assert left == [1] * 8 and index.validate() == []


def test_split_and_joined_runs_remember_which_hot_pages_left() -> None:
    index = build(HOT)
    lease = compute(index, TEXT)
    _leave(index, lease)
    index.release(lease)
    index.release(lease_for(index, TEXT[:9]))
    longer = compute(index, [*TEXT, *range(8)])
    assert _leave(index, longer).count("kv") == 2 and index.validate() == []


def test_quarantined_hot_pages_do_not_leave_and_go_with_the_copy() -> None:
    index = build(HOT)
    lease = compute(index, TEXT)
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    index.release(lease)
    index.quarantine(index.prompt(TEXT))
    assert arrival.pointless and index.resident_pages(Tier.HOST, "kv") == 10
    assert index.land_departing(arrival) is None
    assert index.resident_pages(Tier.HOST, "kv") == 0 and index.validate() == []


def test_hot_pages_that_came_from_a_store_do_not_go_back_there() -> None:
    index = build(HOT)
    prompt = index.prompt(TEXT)
    wanted = [WantedPages(name, page) for name in ("index", "kv") for page in range(9)]
    arriving = index.take(index.pin(index.match(prompt)), wanted)
    index.adopt(arriving, arriving.taken[:18], [()] * 18)
    index.forgo(arriving)
    lease = lease_for(index, TEXT)
    index.land(index.copy(lease, Tier.HOST, Tier.DEVICE))
    assert lease.boundary == 9 and _leave(index, lease) == []


def test_a_running_lease_keeps_its_hot_pages_on_the_host() -> None:
    index = build(HOT, host={"index": 40, "kv": 12})
    keep(index, list(range(2 * PAGE)))
    lease = compute(index, TEXT)
    other = lease_for(index, [7] * (3 * PAGE))
    assert not index.reserve(other, 3 * PAGE) and index.missing == {(Tier.HOST, "kv"): 3}
    assert index.reserve(other, 2 * PAGE), "of those that nothing reads"
    assert (index.page_table(lease, "kv") >= 0).all() and index.at_home(lease)
    assert index.evict(Tier.HOST, "kv", 100) == index.clear(Tier.HOST) == 0


def test_pages_of_a_hit_count_for_the_tier_of_what_is_loaded() -> None:
    index = build(HOT)
    keep(index, TEXT)
    hit = index.match(index.prompt([*TEXT, 0]))
    assert index.pages_by_tier(hit) == {Tier.DEVICE: 10}
    back_up(index, TEXT)
    index.clear(Tier.DEVICE)
    hit = index.match(index.prompt([*TEXT, 0]))
    assert index.pages_by_tier(hit) == {Tier.HOST: 10}


def test_hot_pages_that_were_given_up_are_named_whatever_tiers_are_asked() -> None:
    index = build(HOT)
    keep(index, TEXT)
    index.evict(Tier.HOST, "kv", 4)
    for slowest in Tier:
        hit = index.match(index.prompt([*TEXT, 0]), slowest)
        assert hit.boundary == 6
        assert [str(stop) for stop in index.why(hit)] == [
            "kv: pages were given up, resumable up to 24"
        ]


def test_hot_pages_on_their_way_from_storage_are_named_so() -> None:
    index = build(HOT)
    keep(index, TEXT)
    lease = lease_for(index, [*TEXT, 0])
    index.land(index.copy(lease, Tier.HOST, Tier.STORAGE))
    index.release(lease)
    index.clear(Tier.HOST)
    coming = lease_for(index, [*TEXT, 0])
    assert not index.at_home(coming) and index.slowest(coming) is Tier.STORAGE
    arrival = index.copy(coming, Tier.STORAGE, Tier.HOST)
    (stop,) = index.why(index.match(index.prompt([*TEXT, 0]), Tier.DEVICE))
    assert (stop.pool, stop.reason) == ("kv", "pages are still arriving")
    assert (index.arriving_table(coming, "kv") >= 0).all()
    index.land(arrival)
    assert index.at_home(coming) and index.validate() == []


def test_no_row_is_lost_however_leases_end() -> None:
    index, chance = build(HOT, hot_rows=3), random.Random(3)
    leases: list[IndexLease] = []
    met = Counter[bool]()
    for _ in range(4000):
        lease = lease_for(index, [chance.randrange(3)] * chance.randrange(1, 30))
        got = index.reserve(lease, lease.prompt.tokens + chance.choice((0, 300)))
        met[got] += 1
        assert got == (lease.hot_row >= 0)
        if got and chance.random() < 0.5:
            index.commit(lease, lease.prompt.tokens)
        leases.append(lease)
        while leases and chance.random() < 0.6:
            index.release(leases.pop(chance.randrange(len(leases))))
        rows = [lease.hot_row for lease in leases if lease.hot_row >= 0]
        assert index.hot_rows == (len(set(rows)), 3) and len(set(rows)) == len(rows)
        assert index.has_row == (len(rows) < 3)
    assert index.validate() == [] and min(met.values()) > 100
    for lease in leases:
        index.release(lease)
    assert index.hot_rows == (0, 3)
