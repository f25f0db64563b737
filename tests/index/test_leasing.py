"""Pin, reserve, commit, release: what a lease holds, and what it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.index import Namespace
from kvtide.spec import Tier, with_draft
from tests.index.building import back_up, build, clear_homes, compute, found, keep, lease_for
from tests.index.memories import (
    ALL_MEMORIES,
    DRAFTED,
    FULL,
    HOT,
    OPTIONAL,
    PAGE,
    TWO_HISTORIES,
    WINDOW,
)

TEXT = list(range(100, 140))


def _free(index) -> list[int]:
    return [cell.slots.available for cell in index.tree.cells]


# -- misuse ---------------------------------------------------------------------------------


def test_releasing_twice_is_harmless() -> None:
    index = build(FULL)
    lease = lease_for(index, TEXT)
    index.reserve(lease, 8)
    index.release(lease)
    free = _free(index)
    index.release(lease)
    assert _free(index) == free and index.validate() == []


def test_releasing_a_foreign_lease_asserts() -> None:
    ours, theirs = build(FULL), build(FULL)
    lease_for(ours, TEXT)
    lease = lease_for(theirs, TEXT)
    with pytest.raises(AssertionError, match="not this index's"):
        ours.release(lease)
    assert lease.live and ours.validate() == theirs.validate() == []


def test_committing_unreserved_pages_asserts() -> None:
    index = build(FULL)
    lease = lease_for(index, TEXT)
    index.reserve(lease, 2 * PAGE)
    with pytest.raises(AssertionError, match="not reserved"):
        index.commit(lease, 3 * PAGE)
    index.commit(lease, 2 * PAGE)
    assert index.validate() == []


def test_committing_unknown_tokens_asserts() -> None:
    index = build(FULL)
    lease = lease_for(index, TEXT[:PAGE])
    index.reserve(lease, 2 * PAGE)
    with pytest.raises(AssertionError, match="not known"):
        index.commit(lease, 2 * PAGE)


def test_committing_on_top_of_pages_not_on_the_device_asserts() -> None:
    index = build(FULL)
    keep(index, TEXT[:8])
    back_up(index, TEXT[:8])
    index.clear(Tier.DEVICE)
    lease = lease_for(index, TEXT)
    assert lease.boundary == 2 and not index.at_home(lease)
    index.reserve(lease, 16)
    with pytest.raises(AssertionError, match="have yet to be loaded"):
        index.commit(lease, 16)


def test_a_stale_hit_asserts() -> None:
    index = build(FULL)
    hit = index.match(index.prompt(TEXT))
    keep(index, TEXT)
    with pytest.raises(AssertionError, match="match again"):
        index.pin(hit)
    with pytest.raises(AssertionError, match="match again"):
        index.why(hit)


# -- all or none ----------------------------------------------------------------------------


def test_reserve_without_room_in_one_anchor_changes_nothing() -> None:
    index = build(TWO_HISTORIES, device={"kv": 10, "other": 3})
    keep(index, TEXT[:8])
    lease = lease_for(index, [7] * 16)
    free = _free(index)
    assert not index.reserve(lease, 16)
    assert _free(index) == free and not lease.segments and found(index, TEXT[:8]) == 2
    assert index.reserve(lease, 12)
    assert index.validate() == []


def test_promised_growth_cannot_fail() -> None:
    index = build(FULL, device=8)
    lease = lease_for(index, TEXT)
    assert index.reserve(lease, 8, growth=4)
    other = lease_for(index, [7] * 40)
    assert not index.reserve(other, 12) and index.reserve(other, 8)
    assert index.reserve(lease, 24)
    index.commit(lease, 24)
    assert lease.boundary == 6 and index.validate() == []
    index.release(lease)
    assert index.tree.cells[0].slots.promised == 0


def test_growth_promises_a_window_what_two_reaches_need() -> None:
    index = build(WINDOW)
    lease = lease_for(index, TEXT)
    index.advance(lease, 2 * PAGE, growth=9)
    assert _free(index)[:2] == [40 - 2 - 9, 40 - 2 - 4]
    index.reserve(lease, 3 * PAGE)
    assert _free(index)[:2] == [40 - 2 - 9, 40 - 2 - 4], "taken from the promise"
    index.release(lease)
    assert _free(index)[:2] == [40, 40] and index.validate() == []


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_lease_that_grows_keeps_its_windows_and_lets_go_of_the_rest(name: str) -> None:
    memory = ALL_MEMORIES[name]
    index = build(memory)
    lease = lease_for(index, TEXT)
    for page in range(1, 8):
        tokens = page * PAGE + memory.holdback
        assert index.reserve_with(lease, tokens, range(9))
        index.commit(lease, tokens)
        clear_homes(index)
        assert index.match(index.prompt(TEXT[: tokens + 1])).boundary == page
        for pool in memory.anchors:
            needed = min(page, pool.reuse.reach_pages(PAGE) or page)
            assert index.resident_pages(pool.home, pool.name) == needed
            others = (tier for tier in Tier if tier is not pool.home)
            assert not any(index.resident_pages(tier, pool.name) for tier in others)
    assert index.validate() == []


def test_with_holdback_the_last_full_page_is_a_checkpoint() -> None:
    """16 tokens are three pages and one that still needs the token after it."""
    index = build(DRAFTED)
    lease = compute(index, TEXT[: 4 * PAGE])
    assert lease.boundary == 3 and lease.reserved == 4
    assert (index.page_table(lease, "swa") >= 0).tolist() == [False, True, True, True]
    index.release(lease)
    assert found(index, TEXT[: 4 * PAGE - 1]) == 3


def test_a_window_smaller_than_the_prompt_is_enough_to_decode() -> None:
    """Pages behind the window must not stay pinned while a request grows page by page."""
    index = build(WINDOW, device={"kv": 40, "swa": 6})
    lease = lease_for(index, [1] * PAGE)
    for page in range(1, 30):
        assert index.reserve(lease, page * PAGE), f"no room at page {page}"
        lease.prompt.extend([page] * (page * PAGE - lease.prompt.tokens))
        index.commit(lease, page * PAGE)
    assert index.validate() == []


# -- two leases, one prompt -----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_pages_computed_twice_at_once_are_shared(name: str) -> None:
    index = build(ALL_MEMORIES[name])
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, 17)
    index.commit(one, 17)
    free = _free(index)
    index.commit(two, 17)
    for anchor, pool in enumerate(index.memory.anchors):
        ours, theirs = index.page_table(one, pool.name), index.page_table(two, pool.name)
        assert np.array_equal(ours[:4], theirs[:4])
        home = index.tree.homes[anchor]
        assert _free(index)[home] == free[home] + np.count_nonzero(theirs[:4] >= 0)
    assert index.validate() == []


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_lease_behind_does_not_move_when_another_goes_further(name: str) -> None:
    index = build(ALL_MEMORIES[name])
    ahead, behind = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (ahead, behind):
        index.reserve(lease, 17)
    index.commit(behind, 9)
    index.commit(ahead, 17)
    assert index.validate() == []
    index.commit(behind, 17)
    assert index.validate() == []
    kv = index.memory.anchors[0].name
    tables = [index.page_table(lease, kv)[:4] for lease in (ahead, behind)]
    assert np.array_equal(*tables)


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_committing_page_by_page_equals_committing_at_once(name: str) -> None:
    memory = ALL_MEMORIES[name]
    tables = []
    for steps in ([25], range(1, 26)):
        index = build(memory)
        lease = lease_for(index, TEXT)
        index.reserve(lease, 25)
        for tokens in steps:
            index.commit(lease, tokens)
        assert lease.boundary == 6 and index.validate() == []
        index.release(lease)
        tables.append([index.resident_pages(Tier.DEVICE, p.name) for p in memory.anchors])
        tables.append([found(index, TEXT[:n]) for n in range(len(TEXT))])
    assert tables[:2] == tables[2:]


def test_namespaces_never_share() -> None:
    index = build(FULL)
    spaces = [Namespace(), Namespace(adapter="a"), Namespace(cache_salt="a"), Namespace("a", "a")]
    leases = [compute(index, TEXT[:8], namespace=space) for space in spaces]
    slots = [slot for lease in leases for slot in index.page_table(lease, "kv").tolist()]
    assert len(set(slots)) == 8


def test_a_head_completed_after_the_pin_still_names_the_pages() -> None:
    """A prompt shorter than the holdback: the tokens that complete it part the prompts."""
    index = build(with_draft(FULL, FULL, holdback=2))
    tables = []
    for second in (6, 7):
        lease = lease_for(index, [5])
        lease.prompt.extend([second] + [1] * 9)
        index.reserve(lease, 11)
        index.commit(lease, 11)
        tables.append(set(index.page_table(lease, "kv")[:2].tolist()))
        assert index.validate() == []
        index.release(lease)
        assert index.match(index.prompt([5, second] + [1] * 9)).boundary == 2
    assert not tables[0] & tables[1]


# -- what is elsewhere ----------------------------------------------------------------------


def test_optional_pages_in_the_host_tier_do_not_hinder_a_resume() -> None:
    index = build(OPTIONAL)
    keep(index, TEXT[:16])
    arrival = index.demote(Tier.DEVICE, Tier.HOST, "draft", 4)
    assert arrival is not None
    index.land(arrival)
    lease = lease_for(index, TEXT, slowest=Tier.DEVICE)
    assert lease.boundary == 4 and index.at_home(lease)
    index.reserve(lease, 24)
    index.commit(lease, 24)
    assert index.validate() == []


def test_windows_met_in_the_host_tier_do_not_stop_a_lease_that_computes() -> None:
    index = build(WINDOW)
    lease = lease_for(index, TEXT)
    index.reserve(lease, 40)
    keep(index, TEXT[:16])
    arrival = index.demote(Tier.DEVICE, Tier.HOST, "swa", 4)
    assert arrival is not None
    index.land(arrival)
    index.commit(lease, 16)
    index.commit(lease, 40)
    assert lease.boundary == 10 and index.validate() == []


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
@pytest.mark.parametrize("kept", [0, 3, 7, 8, 16])
def test_shrinking_gives_slots_back_and_keeps_them_promised(name: str, kept: int) -> None:
    index = build(ALL_MEMORIES[name])
    free = [cell.slots.available for cell in index.tree.cells]
    lease = index.pin(index.match(index.prompt(list(range(16)))))
    assert index.advance(lease, 16, growth=2)
    left = [cell.slots.available for cell in index.tree.cells]
    index.shrink(lease, kept)
    assert lease.reserved == -(-kept // 4) and index.validate() == []
    assert [cell.slots.available for cell in index.tree.cells] == left, "others cannot take them"
    assert index.advance(lease, 16) and index.validate() == []
    index.release(lease)
    assert [cell.slots.available for cell in index.tree.cells] == free


# -- hot pools: pages of running requests on the host ---------------------------------------


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
