"""Copies between tiers: begun, landed, failed, and what happens to them on the way."""

from __future__ import annotations

import pytest

from kvtide.index import POLICIES, EveryPages, WantedPages
from kvtide.spec import Tier
from tests.index.building import back_up, build, clear_homes, compute, found, keep, lease_for
from tests.index.memories import ALL_MEMORIES, FULL, PAGE, RECURRENT, WINDOW

TEXT = list(range(100, 116))
DEVICE, HOST, STORAGE = Tier


def _free(index) -> list[int]:
    return [cell.slots.available for cell in index.tree.cells]


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_what_is_arriving_is_not_readable_until_it_landed(name: str) -> None:
    index = build(ALL_MEMORIES[name])
    lease = compute(index, [*TEXT, 0])
    arrival = index.copy(lease, DEVICE, HOST)
    index.release(lease)
    before = found(index, TEXT, HOST)
    assert index.clear(DEVICE) == 0, "the source of a copy stays"
    index.land(arrival)
    index.clear(DEVICE)
    assert found(index, TEXT, DEVICE) == 0 and found(index, TEXT, HOST) == before == 4
    assert index.validate() == []


@pytest.mark.parametrize("name", sorted(ALL_MEMORIES))
def test_a_failed_copy_gives_every_slot_back(name: str) -> None:
    index = build(ALL_MEMORIES[name])
    lease = compute(index, [*TEXT, 0])
    free = _free(index)
    arrival = index.copy(lease, DEVICE, HOST)
    assert _free(index) != free
    index.fail(arrival)
    assert _free(index) == free and index.validate() == []
    index.release(lease)
    clear_homes(index)
    assert found(index, TEXT) == 0 and index.tree.nodes == 0


def test_a_commit_overtakes_an_arrival() -> None:
    index = build(FULL)
    keep(index, TEXT)
    back_up(index, TEXT)
    index.clear(DEVICE)
    loading = lease_for(index, [*TEXT, 0])
    arrival = index.copy(loading, HOST, DEVICE)
    computing = compute(index, [*TEXT, 0])
    assert found(index, TEXT, DEVICE) == 4 and index.validate() == []
    index.land(arrival)
    assert index.at_home(loading) and index.validate() == []
    assert index.resident_pages(DEVICE, "kv") == 4
    tables = [index.page_table(lease, "kv")[:4].tolist() for lease in (loading, computing)]
    assert tables[0] == tables[1]
    assert index.tree.cells[0].slots.available == 36 - len(computing.segments)


@pytest.mark.parametrize("ending", ["land", "fail"])
def test_a_node_split_and_released_in_flight_keeps_its_slots_in_order(ending: str) -> None:
    index = build(FULL)
    lease = compute(index, [*TEXT, 0])
    arrival = index.copy(lease, DEVICE, HOST)
    index.release(lease)
    short = lease_for(index, TEXT[:9])
    assert short.boundary == 2 and index.validate() == []
    getattr(index, ending)(arrival)
    assert index.validate() == []
    index.release(short)
    index.clear(DEVICE)
    assert found(index, TEXT) == (4 if ending == "land" else 0)
    if ending == "land":
        path = index.tree.path(index.match(index.prompt([*TEXT, 0])).nodes[-1])
        slots = [slot for node in path for slot in node.resident_slots(1).tolist()]
        assert slots == arrival.moves[0].target_slots.tolist()


def test_a_demotion_frees_the_source_only_when_it_landed() -> None:
    index = build(FULL)
    keep(index, TEXT)
    arrival = index.demote(DEVICE, HOST, "kv", 4)
    assert index.resident_pages(DEVICE, "kv") == 4 and found(index, TEXT, DEVICE) == 4
    index.land(arrival)
    assert index.resident_pages(DEVICE, "kv") == 0 and found(index, TEXT, HOST) == 4
    assert index.validate() == []


def test_a_demotion_keeps_what_was_pinned_meanwhile() -> None:
    index = build(FULL)
    keep(index, TEXT)
    arrival = index.demote(DEVICE, HOST, "kv", 4)
    lease = lease_for(index, [*TEXT, 0])
    index.land(arrival)
    assert found(index, TEXT, DEVICE) == 4 and index.at_home(lease)
    assert index.validate() == []


def test_demoting_what_has_a_copy_below_drops_it_at_once() -> None:
    index = build(FULL)
    keep(index, TEXT)
    back_up(index, TEXT)
    arrival = index.demote(DEVICE, HOST, "kv", 4)
    assert index.resident_pages(DEVICE, "kv") == 0 and found(index, TEXT, HOST) == 4
    assert arrival is None or not arrival.parts
    if arrival is not None:
        index.land(arrival)
    assert index.validate() == []


def test_a_device_page_with_a_host_copy_goes_without_its_node() -> None:
    index = build(FULL)
    keep(index, TEXT)
    back_up(index, TEXT)
    assert index.evict(DEVICE, "kv", 4) == 4
    assert found(index, TEXT, DEVICE) == 0 and found(index, TEXT, HOST) == 4
    assert index.evict(HOST, "kv", 4) == 4
    assert index.tree.nodes == 0 and not index.tree.roots


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_victim_entered_twice_is_demoted_once(policy: str) -> None:
    """Queues may hold a node twice; two uses make sure of it where keys can fall."""
    index = build(RECURRENT, eviction=policy)
    keep(index, TEXT[:4])
    for _ in range(2):
        index.release(lease_for(index, TEXT[:5]))
    arrival = index.demote(DEVICE, HOST, "state", 2)
    assert arrival is not None and arrival.pages == 1 and index.validate() == []
    index.land(arrival)
    assert index.resident_pages(HOST, "state") == 1 and index.validate() == []


def test_a_copy_without_room_changes_nothing() -> None:
    """Host pages above a pinned host page are in no lease's way and cannot go either."""
    index = build(FULL, host=6)
    keep(index, TEXT)
    back_up(index, TEXT[:8])
    arrival = index.demote(DEVICE, HOST, "kv", 2)
    index.land(arrival)
    keep(index, [7] * 8)
    back_up(index, [7] * 8)
    hit = index.match(index.prompt([*TEXT, 0]))
    assert index.pages_by_tier(hit) == {DEVICE: 2, HOST: 2}
    index.pin(hit)
    other = compute(index, [9] * 16)
    assert index.copy(other, DEVICE, HOST) is None
    assert index.resident_pages(HOST, "kv") == 6, "pages were given up for nothing"


def test_an_overtaken_arrival_does_not_end_the_one_after_it() -> None:
    index = build(FULL)
    keep(index, TEXT)
    back_up(index, TEXT)
    index.clear(DEVICE)
    first = lease_for(index, [*TEXT, 0])
    overtaken = index.copy(first, HOST, DEVICE)
    keep(index, TEXT)
    index.release(first)
    assert index.clear(DEVICE) == 4
    second = lease_for(index, [*TEXT, 0])
    arrival = index.copy(second, HOST, DEVICE)
    index.fail(overtaken)
    assert index.validate() == [] and not index.at_home(second)
    index.land(arrival)
    assert index.at_home(second) and index.validate() == []


def test_a_demotion_keeps_pages_that_others_were_hung_on_meanwhile() -> None:
    index = build(FULL)
    keep(index, TEXT)
    arrival = index.demote(DEVICE, HOST, "kv", 4)
    keep(index, TEXT + [7] * 8)
    index.land(arrival)
    assert found(index, TEXT + [7] * 8, DEVICE) == 6 and index.validate() == []


def test_making_room_for_a_copy_does_not_cost_its_own_path() -> None:
    """Under `mru` the path's own pages, just used, would be the first to go."""
    index = build(FULL, host=4, eviction="mru")
    keep(index, [7] * 8)
    back_up(index, [7] * 8)
    keep(index, TEXT)
    back_up(index, TEXT[:8])
    back_up(index, TEXT)
    index.clear(DEVICE)
    assert found(index, TEXT) == 4 and found(index, [7] * 8) == 0


def test_a_load_brings_no_more_of_a_window_than_a_resume_needs() -> None:
    index = build(WINDOW)
    lease = lease_for(index, [*TEXT, 0])
    index.reserve_with(lease, 16, range(1, 5))
    for tokens in (4, 8, 12, 16):
        index.commit(lease, tokens)
    index.land(index.copy(lease, DEVICE, HOST))
    index.release(lease)
    index.clear(DEVICE)
    assert index.resident_pages(HOST, "swa") == 4
    lease = lease_for(index, [*TEXT, 0])
    arrival = index.copy(lease, HOST, DEVICE)
    assert {move.anchor: len(move.target_slots) for move in arrival.moves} == {"kv": 4, "swa": 2}
    index.land(arrival)
    assert index.at_home(lease)


def test_reserving_gives_nothing_up_for_pages_above_arriving_ones() -> None:
    index = build(FULL, device=6)
    keep(index, TEXT)
    back_up(index, TEXT)
    assert index.evict(DEVICE, "kv", 2) == 2
    keep(index, [7] * 8)
    loading = lease_for(index, [*TEXT, 0])
    assert index.copy(loading, HOST, DEVICE) is not None
    index.release(loading)
    assert not index.reserve(lease_for(index, [9] * 12), 12)
    assert found(index, [7] * 8) == 2 and found(index, TEXT, DEVICE) == 2
    assert index.reserve(lease_for(index, [9] * 12), 8) and index.validate() == []


def test_reserving_gives_nothing_up_for_pages_above_leaving_ones() -> None:
    index = build(FULL, device=6)
    keep(index, TEXT)
    assert index.demote(DEVICE, HOST, "kv", 2) is not None
    keep(index, [7] * 8)
    assert not index.reserve(lease_for(index, [9] * 12), 12)
    assert found(index, [7] * 8) == 2 and found(index, TEXT, DEVICE) == 4


def test_a_load_brings_the_windows_that_a_resume_needs_and_no_others() -> None:
    """Windows at every page, as storage may bring them, are one node with the history."""
    index = build(WINDOW, device={"kv": 10, "swa": 5}, placement=EveryPages(1))
    prompt = list(range(6 * PAGE + 1))
    wanted = [WantedPages(anchor, page) for page in range(6) for anchor in ("kv", "swa")]
    arriving = index.take(lease_for(index, prompt, slowest=HOST), wanted)
    assert arriving is not None
    index.adopt(arriving, arriving.taken[: len(wanted)], [()] * len(wanted))
    index.forgo(arriving)
    lease = lease_for(index, prompt, slowest=HOST)
    assert lease.boundary == 6
    needed = {"kv": 6, "swa": 2}
    assert index.needs(lease, HOST, DEVICE) == needed
    arrival = index.copy(lease, HOST, DEVICE)
    assert arrival is not None
    moved = dict.fromkeys(needed, 0)
    for move in arrival.moves:
        moved[move.anchor] += len(move.target_slots)
    assert moved == needed
    index.land(arrival)
    assert index.reserve(lease, len(prompt), growth=2), "there is room to go on"
    index.release(lease)
    assert index.validate() == []
