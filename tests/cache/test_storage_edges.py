"""Storage when something is odd: too short, too late, too full, gone, broken, in quarantine."""

from __future__ import annotations

import time

import pytest

from kvtide.cache import FetchPatience, Namespace
from kvtide.cache.fetching import MAX_OPEN, Stage
from kvtide.index import EveryPages
from kvtide.spec import Tier
from kvtide.storage import StoreError, open_store
from kvtide.testing.faulty_store import Fault, FaultyStore
from kvtide.transfer.breaker import MAX_FAILURES
from kvtide.transfer.store_link import READERS
from kvtide.transfer.strided import Way
from tests.cache.building import Rig, text
from tests.cache.memories import (
    ALL_MEMORIES,
    FULL,
    PAGE,
    RECURRENT,
    WINDOW,
    every_memory,
)
from tests.cache.stores import (
    WAIT,
    attach,
    begun,
    faulty,
    fetched,
    in_store,
    new_url,
    opened,
    readable,
    settle,
    stored,
    until,
)

HURRIED = FetchPatience("timeout", base_s=0.02, per_1k_s=0.0, min_tokens=1)


def free(rig: Rig, tier: Tier = Tier.HOST) -> int:
    return sum(count.free for (t, _), count in rig.cache.stats().pages.items() if t is tier)


def poll(rig: Rig, times: int = 1) -> None:
    for _ in range(times):
        rig.cache.poll()
        assert rig.problems() == []


def blocked(rig: Rig, tokens: list[int]):
    """A fetch whose read does not return."""
    faulty(rig).always["read"] = Fault.BLOCK
    fetch = begun(rig, tokens)
    until(lambda: bool(rig.cache.poll()) and faulty(rig).waiting > 0)
    assert fetch.stage is Stage.READING
    return fetch


# -- what is asked for ----------------------------------------------------------------------


@every_memory
def test_a_prompt_shorter_than_a_page_has_nothing_to_fetch(url, rigs, memory):
    rig = opened(rigs, url, memory)
    for tokens in range(1, PAGE + 1):
        assert rig.cache.storage.fetch(rig.cache.prompt(range(tokens))) is None
    assert faulty(rig).calls["exists"] == 0


def test_what_is_not_worth_asking_for_is_not_asked_for(url, rigs):
    rig = opened(rigs, url, patience=FetchPatience("wait_complete", min_tokens=3 * PAGE))
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 2))) is None
    stored(rig, text(1, 4))
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 4))) is None, "it is on the device"
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 2) + text(2, 3))) is not None


def test_scratch_prompts_ask_no_store_and_are_stored_nowhere(url, rigs):
    rig = opened(rigs, url)
    prompt = rig.cache.scratch(text(1, 4))
    assert rig.cache.storage.fetch(prompt) is None
    lease = rig.cache.reserve(rig.cache.match(prompt))
    rig.compute(lease)
    rig.cache.release(lease)
    settle(rig)
    assert faulty(rig).calls == {"lend": 1}


def test_a_fetch_that_everything_is_held_for_finds_nothing(url, rigs):
    rig = opened(rigs, url, patience=FetchPatience("wait_complete", min_tokens=0))
    stored(rig, text(1, 4))
    assert fetched(rig, text(1, 4)).outcome == "nothing"


@pytest.mark.parametrize("token_s", [0.0, 1.0, 1e-12])
def test_a_fetch_that_takes_longer_than_computing_is_declined(url, rigs, token_s):
    stored(opened(rigs, url), text(1, 8))
    again = opened(rigs, url)
    link = again.cache.storage.stores[-1].link
    link.read_speed.bytes_s = 1000.0
    fetch = again.cache.storage.fetch(again.cache.prompt(text(1, 8)), token_s)
    settle(again)
    assert fetch.outcome == ("declined" if token_s == 1e-12 else "fetched")
    assert link.read_speed.bytes_s > 1000.0, "what is declined is tried again some day"


# -- stopped, aborted, late -----------------------------------------------------------------


def test_a_stopped_fetch_is_over_with_the_next_poll_and_reads_nothing(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    fetch = begun(rig, text(1, 8))
    until(lambda: fetch.lookup.over)
    fetch.stop()
    poll(rig)
    assert fetch.over and fetch.outcome == "late"
    settle(rig)
    assert faulty(rig).calls["read"] == 0 and free(rig) == 64


def test_a_lookup_that_came_late_begins_no_read(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url, patience=HURRIED)
    fetch = begun(rig, text(1, 8))
    time.sleep(0.03)
    poll(rig)
    assert fetch.over and fetch.outcome == "late" and faulty(rig).calls["read"] == 0


def test_an_aborted_read_keeps_its_slots_until_it_returns(url, rigs):
    """A read that comes late writes to memory that has no other owner by then."""
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url, host=16)
    fetch = blocked(rig, text(1, 8))
    fetch.stop()
    poll(rig, 3)
    assert fetch.over and free(rig) == 8
    rig.remember(text(2, 8))
    rig.settle()
    assert rig.problems() == [] and free(rig) == 0
    faulty(rig).heal()
    settle(rig)
    assert rig.problems() == [] and free(rig) == 8
    assert readable(rig, text(2, 8)) == 8 * PAGE
    assert rig.found(text(1, 8)) == 0, "what was not waited for is not adopted"


def test_a_fetch_that_is_over_pins_nothing_while_its_read_does_not_return(url, rigs):
    """Else a store that hangs would keep requests from the device's slots."""
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    stored(rig, text(1, 3))
    fetch = blocked(rig, text(1, 8))
    assert rig.cache.flush(Tier.DEVICE) == 0, "what the pages follow on stays while they may come"
    fetch.stop()
    poll(rig)
    assert rig.cache.flush(Tier.DEVICE) == 3
    assert rig.cache.flush(Tier.HOST) == 3


def test_what_came_before_a_fetch_was_stopped_is_of_use(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    rig.cache.storage.stores[-1].link._batch_bytes = 1
    faulty(rig).next("read", *[Fault.SLOW] * 4, Fault.BLOCK, Fault.BLOCK)
    fetch = begun(rig, text(1, 8))
    until(lambda: bool(rig.cache.poll()) and faulty(rig).waiting == READERS)
    assert not fetch.over and fetch.reading.ready == 4
    fetch.stop()
    poll(rig)
    assert fetch.outcome == "late" and fetch.tokens == 4 * PAGE
    assert readable(rig, text(1, 8)) == 4 * PAGE


def test_leaving_fetches_go_however_many_others_wait(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    fetch = begun(rig, text(1, 8))
    until(lambda: bool(rig.cache.poll()) and fetch.stage is Stage.READING)
    reading = fetch.reading
    assert reading is not None
    until(lambda: reading.over)
    faulty(rig).always["exists"] = Fault.BLOCK
    others = [begun(rig, text(number, 8)) for number in range(2, MAX_OPEN + 10)]
    poll(rig, 4)
    assert fetch.over and not any(other.over for other in others)
    assert not rig.cache.index.imports, "it holds its slots and its lease no longer"
    faulty(rig).heal()
    settle(rig)


# -- meanwhile ------------------------------------------------------------------------------


@every_memory
def test_a_prompt_that_was_computed_meanwhile_is_kept_once(url, rigs, memory):
    stored(opened(rigs, url, memory), text(1, 8))
    rig = opened(rigs, url, memory)
    fetch = blocked(rig, text(1, 8))
    rig.remember(text(1, 8))
    rig.settle()
    before = free(rig)
    faulty(rig).heal()
    settle(rig)
    assert fetch.over and rig.problems() == []
    assert free(rig) >= before and readable(rig, text(1, 8)) == 8 * PAGE


@every_memory
def test_pages_may_come_while_they_are_being_backed_up(url, rigs, memory):
    stored(opened(rigs, url, memory), text(1, 8))
    rig = opened(rigs, url, memory)
    fetch = blocked(rig, text(1, 8))
    lease = rig.started(text(1, 8))
    rig.compute(lease)
    rig.cache.poll()
    assert rig.hands[Way.BACKUP].jobs
    faulty(rig).heal()
    until(lambda: bool(rig.cache.poll()) and fetch.over)
    assert rig.problems() == [] and fetch.outcome == "fetched"
    rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    settle(rig)
    assert readable(rig, text(1, 8)) == 8 * PAGE


def test_a_prompt_may_grow_while_it_is_fetched(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    prompt = rig.cache.prompt(text(1, 8)[: 5 * PAGE + 1])
    fetch = rig.cache.storage.fetch(prompt)
    until(lambda: fetch.lookup.over)
    prompt.extend(text(1, 8)[5 * PAGE + 1 :])
    settle(rig)
    assert fetch.outcome == "fetched" and rig.found(text(1, 8)) == 5 * PAGE


def test_pages_stored_twice_are_written_once(url, rigs):
    rig, other = opened(rigs, url), opened(rigs, url)
    stored(rig, text(1, 4))
    stored(other, text(1, 4))
    stats = [one.cache.storage.stats() for one in (rig, other)]
    assert [one.objects.get("written", 0) for one in stats] == [4, 0]
    assert [one.stored_pages for one in stats] == [4, 4] and stats[1].objects["known"] == 4


def test_a_fetch_does_not_evict_what_it_builds_on(url, rigs):
    """The history is on the host, its states are not: they must not take the history's place."""
    stored(opened(rigs, url, RECURRENT, placement=EveryPages(1)), text(1, 6))
    rig = opened(rigs, url, RECURRENT, host={"kv": 8, "state": 8}, placement=EveryPages(2))
    tree = rig.cache.index.tree
    rig.remember_on_host(text(1, 6))
    settle(rig)
    rig.cache.index.evict(Tier.HOST, "state", 100)
    assert rig.found(text(1, 6)) == 0
    rig.remember_on_host(text(2, 2))
    settle(rig)
    assert rig.cache.index.free_pages(Tier.HOST, "kv") == 0 and tree.nodes
    longer = text(1, 6)[:-1] + text(3, 2)
    stored(opened(rigs, url, RECURRENT, placement=EveryPages(1)), longer)
    fetch = fetched(rig, longer)
    assert fetch.outcome in ("fetched", "nothing") and rig.problems() == []
    if fetch.outcome == "fetched":
        assert rig.found(longer) >= 6 * PAGE


# -- faults ---------------------------------------------------------------------------------

READ_FAULTS = {
    Fault.RAISE: "errors", Fault.CRASH: "errors", Fault.EXIT: "errors", Fault.LINGER: "errors",
    Fault.MISCOUNT: "errors", Fault.MISSING: "missing", Fault.SHORT: "corrupt",
    Fault.FLIP: "corrupt",
}  # fmt: skip


@pytest.mark.parametrize("fault", READ_FAULTS)
@pytest.mark.parametrize("memory", [FULL, WINDOW], ids=["full", "window"])
def test_a_read_that_goes_wrong_is_a_miss_and_a_count(url, rigs, memory, fault):
    stored(opened(rigs, url, memory), text(1, 8))
    rig = opened(rigs, url, memory)
    faulty(rig).next("read", fault)
    if fault is Fault.MISSING:
        faulty(rig).next("exists", None)
        faulty(rig).next("exists", Fault.RAISE)  # or it would be looked for again, and found
    fetch = fetched(rig, text(1, 8))
    failed = READ_FAULTS[fault] == "errors"
    assert fetch.outcome == ("failed" if failed else "partly") and fetch.tokens == 0
    stats = rig.cache.storage.stats()
    assert stats.objects[READ_FAULTS[fault]] > 0 and stats.fetched_pages == 0
    assert rig.found(text(1, 8)) == 0 and free(rig) == 64 * len(memory.anchors)
    corrupt = READ_FAULTS[fault] == "corrupt"
    assert in_store(rig, url, text(1, 8)) == [not corrupt] * 8
    assert fetched(rig, text(1, 8)).outcome == ("nothing" if corrupt else "fetched")
    assert readable(rig, text(1, 8)) == (0 if corrupt else 8 * PAGE)


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.CRASH, Fault.EXIT, Fault.MISCOUNT])
def test_a_lookup_that_goes_wrong_is_a_miss_and_a_count(url, rigs, fault):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    faulty(rig).next("exists", fault)
    assert fetched(rig, text(1, 8)).outcome == "failed"
    assert rig.cache.storage.stats().objects == {"errors": 1}
    assert fetched(rig, text(1, 8)).outcome == "fetched"


@pytest.mark.parametrize(
    "fault", [Fault.RAISE, Fault.CRASH, Fault.EXIT, Fault.LINGER, Fault.REFUSE, Fault.MISCOUNT]
)
def test_a_write_that_goes_wrong_leaves_the_page_on_the_host(url, rigs, fault):
    rig = opened(rigs, url)
    faulty(rig).next("write", fault)
    stored(rig, text(1, 4))
    stats = rig.cache.storage.stats()
    assert (stats.stored_pages, stats.failed_pages, stats.waiting_pages) == (0, 4, 0)
    assert rig.found(text(1, 4)) == 4 * PAGE and not rig.cache.index.departures
    stored(rig, text(2, 4))
    assert in_store(rig, url, text(2, 4)) == [True] * 4


def test_a_store_that_is_dead_costs_a_few_calls_and_nothing_else(url, rigs):
    rig = opened(rigs, url)
    faulty(rig).always["exists"] = Fault.RAISE
    for number in range(12):
        assert fetched(rig, text(number, 4)).outcome == "failed"
        rig.remember(text(number, 4))
        settle(rig)
        assert rig.found(text(number, 4)) == 4 * PAGE
    assert faulty(rig).calls["exists"] == MAX_FAILURES
    stats = rig.cache.storage.stats()
    assert not stats.answers and "exists" in stats.last_error
    assert rig.cache.flush(Tier.HOST) > 0, "nothing stays pinned for it"


# -- little room ----------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("host", [1, 2, 3])
@every_memory
def test_a_host_of_a_few_pages_holds_little_and_breaks_nothing(url, rigs, memory, host):
    stored(opened(rigs, url, memory), text(1, 8))
    rig = opened(rigs, url, memory, host=host)
    fetch = fetched(rig, text(1, 8))
    assert fetch.outcome in ("fetched", "nothing", "no_room")
    assert rig.found(text(1, 8)) <= host // 2 * PAGE or memory is ALL_MEMORIES["window_only"]
    fits = 2 if not memory.hot_pools else min(2, host - 1)
    if fits:
        rig.remember(text(2, fits))
    else:
        assert rig.begin(text(2, 2)) is None, "a hot pool's host is the longest sequence"
    settle(rig)
    assert rig.problems() == []


def test_a_fetch_takes_half_of_the_host_at_most_and_the_best_part_of_the_prompt(url, rigs):
    stored(opened(rigs, url), text(1, 20))
    rig = opened(rigs, url, host=20)
    assert fetched(rig, text(1, 20)).outcome == "fetched"
    assert 8 * PAGE <= rig.found(text(1, 20)) <= 10 * PAGE


def test_a_fetch_that_finds_no_room_is_over_and_holds_nothing(url, rigs):
    stored(opened(rigs, url), text(1, 4))
    rig = opened(rigs, url, host=8)
    faulty(rig).always["write"] = Fault.BLOCK
    for number in (2, 3):
        rig.remember(text(number, 4))
        rig.settle()
    assert free(rig) == 0
    fetch = begun(rig, text(1, 4))
    until(lambda: bool(rig.cache.poll()) and fetch.over)
    assert fetch.outcome == "no_room" and rig.problems() == []
    assert not rig.cache.index.imports and not rig.cache.index.leases


def test_a_line_that_is_too_long_loses_its_oldest_pages(url, rigs):
    rig = opened(rigs, url, host=24, device=64)
    faulty(rig).always["write"] = Fault.BLOCK
    for number in range(9):
        rig.remember(text(number, 2))
        rig.settle()
        assert rig.problems() == []
    stats = rig.cache.storage.stats()
    assert stats.dropped_pages > 0 and stats.waiting_pages <= 12
    faulty(rig).heal()
    settle(rig)
    written = [all(in_store(rig, url, text(number, 2))) for number in range(9)]
    assert written[0] and written[-1] and not all(written), "what waits longest goes first"
    stats = rig.cache.storage.stats()
    assert stats.stored_pages + stats.dropped_pages == 18 and stats.waiting_pages == 0


# -- optional sidecars ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drafted", "v4_drafted", "last_stage"])
def test_what_a_draft_did_not_compute_is_absent_through_a_store_and_back(url, rigs, name):
    memory = ALL_MEMORIES[name]
    (draft,) = {p.name for p in memory.pools if p.follows and not p.reuse.required}
    first = opened(rigs, url, memory)
    for number, without in ((1, ()), (2, (draft,))):
        lease = first.started(text(number, 6))
        first.compute(lease, without=without)
        first.cache.release(lease)
        settle(first)
    again = opened(rigs, url, memory)
    for number, carried in ((1, True), (2, False)):
        assert fetched(again, text(number, 6)).outcome == "fetched"
        lease = again.started(text(number, 6))
        again.settle()
        assert lease.cached_tokens > 0 and again.misread(lease) == []
        assert again.cache.carries(lease, draft).tolist() == [carried] * lease.committed_pages
        again.cache.release(lease)


# -- attaching and detaching ----------------------------------------------------------------


def test_a_store_that_cannot_be_attached_leaves_the_one_that_is(url, rigs):
    rig = opened(rigs, url)
    broken = FaultyStore(open_store(new_url(), rig.cache.storage.space))
    broken.next("lend", Fault.RAISE)
    with pytest.raises(StoreError):
        rig.cache.storage.attach(broken)
    assert rig.problems() == []
    stored(rig, text(1, 4))
    assert in_store(rig, url, text(1, 4)) == [True] * 4


def test_two_stores_replaced_in_a_row_leave_when_they_can(url, rigs):
    rig = opened(rigs, url)
    stores = [faulty(rig)]
    for number in range(3):
        stores[-1].always["write"] = Fault.BLOCK
        rig.remember(text(number, 2))
        rig.settle()
        until(lambda: bool(stores[-1].waiting))
        stores.append(attach(rig, new_url()))
        assert rig.problems() == []
    assert len(rig.cache.storage.stores) == 4
    stored_before = rig.cache.storage.stats().stored_pages
    stores[1].heal()
    until(lambda: bool(rig.cache.poll()) and len(rig.cache.storage.stores) == 3)
    assert rig.problems() == [] and stored_before == 0
    for store in stores:
        store.heal()
    until(lambda: bool(rig.cache.poll()) and len(rig.cache.storage.stores) == 1)
    assert [store.calls["close"] for store in stores] == [1, 1, 1, 0]
    assert in_store(rig, url, text(0, 2)) == [True] * 2


def test_detaching_ends_fetches_with_what_has_come(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    fetch = blocked(rig, text(1, 8))
    assert rig.cache.storage.detach(0.0)
    poll(rig, 2)
    assert fetch.over and rig.cache.storage.stats().state == "leaving"
    assert rig.cache.storage.fetch(rig.cache.prompt(text(2, 8))) is None
    store = faulty(rig)
    store.heal()
    until(lambda: bool(rig.cache.poll()) and rig.cache.storage.stats() is None)
    assert store.calls["close"] == 1 and not rig.cache.storage.detach()


def test_detaching_gives_up_what_was_not_begun_when_the_time_is_up(url, rigs):
    rig = opened(rigs, url, host=64, device=64)
    link = rig.cache.storage.stores[-1].link
    link._batch_bytes = 1
    faulty(rig).always["write"] = Fault.BLOCK
    rig.remember(text(1, 8))
    rig.settle()
    until(lambda: faulty(rig).waiting == 1)
    rig.cache.storage.detach(0.0)
    poll(rig, 2)
    faulty(rig).heal()
    settle(rig)
    assert sum(in_store(rig, url, text(1, 8))) == 1, "the one that was with the store by then"


def test_detaching_writes_what_is_in_line_while_there_is_time(url, rigs):
    rig = opened(rigs, url, device=64)
    faulty(rig).always["write"] = Fault.SLOW
    for number in range(6):
        rig.remember(text(number, 2))
        rig.settle()
    rig.cache.storage.detach(10.0)
    until(lambda: bool(rig.cache.poll()) and rig.cache.storage.stats() is None)
    assert all(all(in_store(rig, url, text(number, 2))) for number in range(6))


@pytest.mark.parametrize("call", ["exists", "read", "write", "close"])
def test_closing_a_cache_whose_store_hangs_does_not_hang(url, rigs, call):
    stored(opened(rigs, url), text(1, 4))
    rig = Rig(FULL, host=64, patience=WAIT)
    store = attach(rig, url)
    store.always[call] = Fault.BLOCK
    rig.remember(text(2, 4))
    rig.settle()
    begun(rig, text(1, 4))
    time.sleep(0.02)
    rig.cache.poll()
    began = time.monotonic()
    rig.cache.close(0.2)
    assert time.monotonic() - began < 30
    store.heal()


def test_nothing_is_left_of_fetches_and_stores_that_are_over(url, rigs):
    first = opened(rigs, url, device=64, host=256)
    rig = opened(rigs, url, host=16, device=16)
    for number in range(12):
        stored(first, text(number, 3))
    for number in range(24):
        fetched(rig, text(number, 3))
        stored(rig, text(100 + number, 2))
    tree, one = rig.cache.index.tree, rig.cache.storage.stores[-1]
    assert not tree.imports and not tree.departures and not tree.leases
    assert not list(one.fetches.open) and not list(one.fetches.leaving)
    assert not one.fetches.coming and len(one.storing) == 0 and not rig.cache._in_flight.departures
    assert sum(one.fetches.ended.values()) == 24


# -- quarantine -----------------------------------------------------------------------------


@every_memory
def test_what_is_in_quarantine_leaves_the_store_too(url, rigs, memory):
    rig = opened(rigs, url, memory)
    stored(rig, text(1, 8))
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    settle(rig)
    for anchor in memory.anchors:
        assert not any(in_store(rig, url, text(1, 8), anchor.name))
    assert fetched(rig, text(1, 8)).outcome == "nothing"
    stored(rig, text(1, 8))
    assert any(in_store(rig, url, text(1, 8), memory.anchors[0].name))


def test_quarantine_of_a_scratch_prompt_is_nothing_with_a_store_too(url, rigs):
    rig = opened(rigs, url)
    assert rig.cache.quarantine(rig.cache.scratch(text(1, 4))) == 0


def test_a_fetch_does_not_bring_what_is_put_in_quarantine_meanwhile(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    fetch = blocked(rig, text(1, 8))
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    assert fetch.over and fetch.outcome == "discarded"
    faulty(rig).heal()
    settle(rig)
    assert rig.found(text(1, 8)) == 0 and free(rig) == 64


def test_quarantine_of_less_than_a_page_leaves_fetches_alone(url, rigs):
    stored(opened(rigs, url), text(1, 8))
    rig = opened(rigs, url)
    fetch = begun(rig, text(1, 8))
    for tokens in ([], text(1, 8)[: PAGE - 1]):
        assert rig.quarantine(rig.cache.prompt(tokens)) == 0
    settle(rig)
    assert fetch.outcome == "fetched"


def test_pages_in_quarantine_are_not_written_after_they_were_removed(url, rigs):
    """A write of several batches takes turns with the removal."""
    rig = opened(rigs, url)
    rig.cache.storage.stores[-1].link._batch_bytes = 1
    faulty(rig).next("write", Fault.BLOCK)
    rig.remember(text(1, 8))
    rig.settle()
    until(lambda: faulty(rig).waiting == 1)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    faulty(rig).release()
    settle(rig)
    rig.cache.storage.ask(lambda store: store.status()).result(5.0)
    assert not any(in_store(rig, url, text(1, 8)))


def test_pages_in_quarantine_are_not_written_with_others_of_their_line(url, rigs):
    rig = opened(rigs, url, write_policy="write_back", device=8, headroom=0.0)
    faulty(rig).always["write"] = Fault.BLOCK
    for number in (7, 8):
        rig.remember(text(number, 1))
        rig.cache._in_flight.demote("kv", 1)
        rig.settle()
    for number in (1, 2):
        rig.remember(text(number, 2))
    rig.cache._in_flight.demote("kv", 4)
    rig.settle()
    mixed = list(rig.cache.storage.stores[-1].storing.queued)
    assert len(mixed) == 1 and len(mixed[0].pages) == 4
    rig.quarantine(rig.cache.prompt(text(1, 2)))
    faulty(rig).heal()
    settle(rig)
    assert in_store(rig, url, text(2, 2)) == [True] * 2
    assert in_store(rig, url, text(1, 2)) == [False] * 2


@pytest.mark.parametrize("fault", [Fault.BLOCK, Fault.RAISE])
def test_what_could_not_be_removed_yet_is_not_fetched_again(url, rigs, fault):
    rig = opened(rigs, url)
    stored(rig, text(1, 8))
    faulty(rig).next("remove", fault)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    until(lambda: faulty(rig).met["remove", fault] == 1)
    fetch = rig.cache.storage.fetch(rig.cache.prompt(text(1, 8)))
    poll(rig, 3)
    time.sleep(0.02)
    poll(rig, 3)
    assert rig.found(text(1, 8)) == 0 and (fetch is None or fetch.over)
    other = begun(rig, text(2, 4))
    until(lambda: bool(rig.cache.poll()) and other.over)
    assert other.outcome == "nothing", "others are asked for as ever"
    faulty(rig).heal()
    settle(rig)
    if fault is Fault.BLOCK:
        stored(rig, text(1, 8))
        rig.cache.flush(Tier.DEVICE)
        rig.cache.flush(Tier.HOST)
        assert fetched(rig, text(1, 8)).outcome == "fetched", "removed, and computed anew"


def test_a_store_that_leaves_does_not_bring_back_what_the_next_one_removed(url, rigs):
    """Both may be the same: what the first one is writing comes after the second one's removal."""
    rig = opened(rigs, url)
    leaving = faulty(rig)
    leaving.next("write", Fault.BLOCK)
    leaving.next("remove", Fault.BLOCK)
    rig.remember(text(1, 8))
    rig.settle()
    until(lambda: leaving.waiting == 1)
    attach(rig, url)
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    until(lambda: bool(rig.cache.poll()) and not len(rig.cache.storage.stores[-1].removals))
    leaving.release()
    until(lambda: all(in_store(rig, url, text(1, 8))) and leaving.waiting == 1)
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 8))) is None
    leaving.release()
    settle(rig)
    assert fetched(rig, text(1, 8)).outcome == "nothing"


def test_what_a_store_did_not_remove_before_it_left_the_next_one_removes(url, rigs):
    rig = opened(rigs, url)
    stored(rig, text(1, 8))
    faulty(rig).always["remove"] = Fault.RAISE
    rig.quarantine(rig.cache.prompt(text(1, 8)))
    settle(rig)
    rig.cache.storage.detach(0.0)
    until(lambda: bool(rig.cache.poll()) and rig.cache.storage.stats() is None)
    assert all(in_store(rig, url, text(1, 8)))
    attach(rig, url)
    assert rig.cache.storage.fetch(rig.cache.prompt(text(1, 8))) is None
    settle(rig)
    assert not any(in_store(rig, url, text(1, 8)))
    assert fetched(rig, text(1, 8)).outcome == "nothing"


def test_quarantine_is_of_a_namespace(url, rigs):
    rig = opened(rigs, url)
    for salt in "ab":
        stored(rig, text(1, 4), namespace=Namespace(cache_salt=salt))
    rig.quarantine(rig.cache.prompt(text(1, 4), Namespace(cache_salt="a")))
    settle(rig)
    again = opened(rigs, url)
    assert fetched(again, text(1, 4), namespace=Namespace(cache_salt="a")).outcome == "nothing"
    assert fetched(again, text(1, 4), namespace=Namespace(cache_salt="b")).outcome == "fetched"
