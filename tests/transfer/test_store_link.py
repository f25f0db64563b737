"""Between host and store: every byte right, every fault a miss and a count, no wait for ever.

`Desk` has a host with guard bands, a faulty store and a clock that stands still.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from kvtide.storage import open_store
from kvtide.testing.faulty_store import Draw, Fault, FaultyStore
from kvtide.tiers.layout import Layout
from kvtide.transfer.breaker import MAX_FAILURES, REST_S
from kvtide.transfer.read_speed import EWMA_DECAY
from kvtide.transfer.storage_requests import Lookup, Paging, Reading, StoredPage
from kvtide.transfer.store_link import READERS, STUCK_S
from tests.transfer.stores import GUARD_BYTE, LARGE, SMALL, SPACE, Clock, Desk, key, until

LONG_S = 1e6


def read(desk: Desk, pages: Sequence[StoredPage]) -> Reading:
    """Read pages to the end."""
    reading = desk.link.read(pages, LONG_S)
    until(lambda: reading.over and reading.quiet)
    return reading


def ended(*requests: Lookup | Paging) -> None:
    """Wait until nothing of these is being done any more."""
    until(lambda: all(one.over for one in requests))


def found(desk: Desk, pages: Sequence[StoredPage]) -> list[bool] | None:
    lookup = desk.link.look(lambda: desk.sought(pages), LONG_S)
    until(lambda: lookup.over)
    return lookup.found


# -- bytes ----------------------------------------------------------------------------------


class Watching:
    """A store that notes where the memory it is given lies."""

    def __init__(self) -> None:
        self._store = open_store("memory:", SPACE)
        self.name = "watching"
        self.block: memoryview | None = None
        self.addresses: dict[str, list[int]] = {"read": [], "write": []}

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def lend(self, block: memoryview) -> None:
        self.block = block

    def read(self, keys, targets):
        self.addresses["read"] += [np.frombuffer(t, np.uint8).ctypes.data for t in targets]
        return self._store.read(keys, targets)

    def write(self, keys, sources):
        self.addresses["write"] += [np.frombuffer(s, np.uint8).ctypes.data for s in sources]
        return self._store.write(keys, sources)


def test_large_pages_are_neither_copied_on_the_way_out_nor_in(desks) -> None:
    desk = desks(LARGE, store=Watching())
    runs, base = [desk.host.arrangement.run(pool) for pool in ("kv", "draft")], desk.host.address

    def places(first: int) -> list[int]:
        slots = range(first, first + 5)
        return [base + run.offset + slot * run.stride for slot in slots for run in runs]

    before = desk.stored(desk.pages(5, 2))
    assert desk.store.addresses["write"] == places(2)
    again = desk.pages(5, 9)
    assert read(desk, again).ready == 5 and desk.contents(again) == before
    assert sorted(desk.store.addresses["read"]) == places(9)
    assert len(desk.store.block) == desk.host.data.numel()


def test_small_pages_and_other_layouts_go_through_memory_of_their_own(desks) -> None:
    for layout, anchor in ((Layout.PAGE_FIRST_DIRECT, "swa"), (Layout.LAYER_FIRST, "kv")):
        desk = desks(LARGE, layout, store=Watching())
        desk.stored(desk.pages(5, 2, anchor))
        read(desk, desk.pages(5, 9, anchor))
        within = range(desk.host.address, desk.host.address + desk.host.data.numel())
        for addresses in desk.store.addresses.values():
            assert len(addresses) == (10 if anchor == "kv" else 5), "a draft's besides"
            assert not any(address in within for address in addresses)


@pytest.mark.parametrize("there", Layout)
@pytest.mark.parametrize("here", Layout)
def test_what_one_layout_stored_any_other_reads(desks, here: Layout, there: Layout) -> None:
    first = desks(LARGE, here, batch_bytes=1 << 17)
    pages = [*first.pages(4, 3), *first.pages(4, 3, "swa")]
    before = first.stored(pages)
    second = desks(LARGE, there, store=first.store, batch_bytes=1 << 17)
    second.wipe()
    again = [*second.pages(4, 7), *second.pages(4, 7, "swa")]
    assert read(second, again).ready == 8
    assert second.contents(again) == before
    untouched = [*second.pages(7), *second.pages(5, 11), *second.pages(7, anchor="swa")]
    assert {byte for page in second.contents(untouched) for byte in page} == {GUARD_BYTE}


def test_what_is_absent_from_a_page_is_reported_when_it_is_read(desks) -> None:
    desk = desks(LARGE)
    pages = [page._replace(without=("draft",) * (n % 2)) for n, page in enumerate(desk.pages(4))]
    desk.stored(pages)
    assert read(desk, desk.pages(4)).absent == [(), ("draft",), (), ("draft",)]


@pytest.mark.parametrize("layout", Layout)
def test_a_sidecar_whose_object_is_lost_or_corrupt_is_absent_and_its_page_whole(
    desks, layout: Layout
) -> None:
    desk = desks(LARGE, layout)
    before = desk.stored(desk.pages(4))
    objects, one = desk.store._store._objects, desk.formats["draft"]
    del objects[one.key(key(1))]
    objects[one.key(key(2))] = bytes(one.bytes)
    reading = read(desk, desk.pages(4))
    assert reading.ready == 4 and reading.absent == [(), ("draft",), ("draft",), ()]
    names = ("read", "draftless", "corrupt", "missing")
    assert [desk.link.counts[name] for name in names] == [6, 1, 1, 0]
    assert one.key(key(2)) not in objects
    size = desk.formats["kv"].payload_bytes
    contents = desk.contents(desk.pages(4))
    assert [page[:size] for page in contents] == [page[:size] for page in before]
    assert (contents[0], contents[3]) == (before[0], before[3])


def test_a_page_that_gets_its_sidecar_later_is_not_written_again(desks) -> None:
    desk = desks(LARGE)
    desk.fill(desk.pages(4))
    for absent, written in ((("draft",), 4), ((), 8), ((), 8)):
        writing = desk.link.write([page._replace(without=absent) for page in desk.pages(4)], 60.0)
        until(lambda writing=writing: writing.quiet)
        assert writing.count == 4 and desk.link.counts["written"] == written


def test_a_sidecar_is_found_after_the_same_tokens_alone(desks) -> None:
    desk = desks(LARGE)
    desk.stored([page._replace(after=b"1234") for page in desk.pages(2)])
    for after, absent in ((b"1234", ()), (b"4321", ("draft",))):
        pages = [page._replace(after=after) for page in desk.pages(2)]
        reading = read(desk, pages)
        assert reading.ready == 2 and reading.absent == [absent] * 2


def test_an_anchor_s_pages_are_not_found_under_another(desks) -> None:
    desk = desks(LARGE)
    desk.stored(desk.pages(2))
    assert found(desk, desk.pages(2, anchor="swa")) == [False, False]
    assert found(desk, desk.pages(3)) == [True, True, False]


def test_what_is_there_is_not_written_again(desks) -> None:
    desk = desks()
    before = desk.stored(desk.pages(4))
    desk.fill(desk.pages(6), seed=1)
    writing = desk.link.write(desk.pages(6), LONG_S)
    ended(writing)
    assert writing.count == 6
    assert desk.link.counts["known"] == 4 and desk.link.counts["written"] == 6
    read(desk, desk.pages(4))
    assert desk.contents(desk.pages(4)) == before


def test_batches_are_as_large_as_may_be(desks) -> None:
    desk = desks(batch_bytes=3 * Desk().formats["kv"].bytes)
    desk.stored(desk.pages(10))
    assert desk.store.calls["write"] == 4
    assert read(desk, desk.pages(10)).ready == 10
    assert desk.store.calls["read"] == 4


class Timed:
    """A store of which `together` calls read side by side, and take `read_s` of a fake clock."""

    def __init__(self, clock: Clock) -> None:
        self._store = open_store("memory:", SPACE)
        self.name, self.clock = "timed", clock
        self.together(1, 0.0)

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def together(self, calls: int, read_s: float) -> None:
        def passes() -> None:
            self.clock.now += read_s

        self._barrier = threading.Barrier(calls, passes, timeout=60.0)

    def read(self, keys, targets):
        self._barrier.wait()
        return self._store.read(keys, targets)


@pytest.mark.parametrize("readers", [1, READERS])
def test_speed_is_that_of_the_readers_that_read(desks, readers: int) -> None:
    clock, size = Clock(), Desk().formats["kv"].bytes
    desk = desks(store=Timed(clock), clock=clock, batch_bytes=2 * size)
    desk.stored(desk.pages(4))
    assert desk.link.read_speed.bytes_s is None
    desk.store.together(readers, 0.5)
    read(desk, desk.pages(2 * readers))
    assert desk.link.read_speed.bytes_s == pytest.approx(2 * readers * size / 0.5)


def test_speed_follows_what_was_read_last(desks) -> None:
    clock, size = Clock(), Desk().formats["kv"].bytes
    desk = desks(store=Timed(clock), clock=clock, batch_bytes=2 * size)
    desk.stored(desk.pages(2))
    for seconds in (0.5, 1.0):
        desk.store.together(1, seconds)
        read(desk, desk.pages(2))
    expected = EWMA_DECAY * 2 * size / 0.5 + (1 - EWMA_DECAY) * 2 * size / 1.0
    assert desk.link.read_speed.bytes_s == pytest.approx(expected)


def test_a_read_that_fails_says_nothing_of_the_speed(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    desk.store.next("read", Fault.RAISE)
    read(desk, desk.pages(2))
    assert desk.link.read_speed.bytes_s is None
    began = desk.link.read_speed.begin()
    desk.clock.now += 2.0
    desk.link.read_speed.end(began, 100)
    assert desk.link.read_speed.bytes_s == 50.0, "the failed reader counts as active no more"


# -- faults ---------------------------------------------------------------------------------

RAISING = (Fault.RAISE, Fault.CRASH, Fault.EXIT)
SPOILING = {Fault.MISSING: "missing", Fault.SHORT: "corrupt", Fault.FLIP: "corrupt"}


def works(desk: Desk) -> bool:
    """Whether everything works: for what goes wrong must not break what comes after."""
    pages = desk.pages(3, 12)
    pages = [page._replace(key=bytes([99, n]) * 16) for n, page in enumerate(pages)]
    before = desk.fill(pages, seed=7)
    writing = desk.link.write(pages, LONG_S)
    ended(writing)
    reading = read(desk, pages)
    return (
        found(desk, pages) == [True] * 3
        and reading.ready == writing.count == 3
        and (desk.contents(pages) == before)
    )


@pytest.mark.parametrize("fault", RAISING)
def test_a_lookup_that_raises_finds_nothing_and_is_counted(desks, fault: Fault) -> None:
    desk = desks()
    desk.store.next("exists", fault)
    assert found(desk, desk.pages(2)) is None
    assert desk.link.counts["errors"] == 1 and "exists" in desk.link.last_error
    assert works(desk)


@pytest.mark.parametrize("fault", RAISING)
@pytest.mark.parametrize("memory", [SMALL, LARGE], ids=("staged", "in place"))
def test_a_read_that_raises_reads_nothing_and_is_counted(desks, memory, fault: Fault) -> None:
    desk = desks(memory)
    before = desk.stored(desk.pages(4))
    desk.store.next("read", fault)
    reading = read(desk, desk.pages(4))
    assert reading.ready == reading.count == 0 and reading.error is not None
    assert desk.link.counts["errors"] == 1 and desk.link.counts["read"] == 0
    assert read(desk, desk.pages(4)).ready == 4 and desk.contents(desk.pages(4)) == before
    assert works(desk)


@pytest.mark.parametrize("fault", SPOILING)
@pytest.mark.parametrize("layout", Layout)
def test_spoiled_objects_are_misses_and_leave_the_store_if_corrupt(
    desks, layout: Layout, fault: Fault
) -> None:
    desk = desks(LARGE, layout)
    desk.stored(desk.pages(4))
    desk.store.next("read", fault)
    reading = read(desk, desk.pages(4))
    assert reading.ready == reading.count == 0 and reading.error is None
    corrupt = SPOILING[fault] == "corrupt"
    counts = desk.link.counts
    assert counts["read"] == 0 and counts["corrupt" if corrupt else "missing"] == 4 << corrupt
    assert found(desk, desk.pages(4)) == [not corrupt] * 4
    assert desk.store.calls["remove"] == 8 * corrupt, "each with its draft's"
    assert works(desk)


def test_a_spoiled_object_does_not_spoil_its_batch(desks) -> None:
    desk = desks()
    before = desk.stored(desk.pages(4))
    (spoiled,) = desk.keys(desk.pages(3))[2:]
    objects = desk.store._store._objects
    objects[spoiled] = objects[spoiled][:5] + b"?" + objects[spoiled][6:]
    reading = read(desk, desk.pages(4))
    assert reading.ready == 2 and reading.count == 3
    assert desk.contents(desk.pages(2)) == before[:2]
    assert found(desk, desk.pages(4)) == [True, True, False, True]


def test_objects_that_were_mixed_up_are_found_out(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    objects, (one, other) = desk.store._store._objects, desk.keys(desk.pages(2))
    objects[one], objects[other] = objects[other], objects[one]
    assert read(desk, desk.pages(2)).count == 0
    assert desk.link.counts["corrupt"] == 2 and not objects


@pytest.mark.parametrize("fault", RAISING)
def test_a_write_that_raises_stores_nothing_and_is_counted(desks, fault: Fault) -> None:
    desk = desks(LARGE)
    desk.store.next("write", fault)
    writing = desk.link.write(desk.pages(4), LONG_S)
    ended(writing)
    assert writing.count == 0 and desk.link.counts["errors"] == 1
    assert found(desk, desk.pages(4)) == [False] * 4
    assert works(desk)


def test_a_failed_batch_does_not_keep_others_from_being_written(desks) -> None:
    desk = desks(batch_bytes=1)
    desk.store.next("write", Fault.RAISE, Fault.REFUSE)
    writing = desk.link.write(desk.pages(4), LONG_S)
    ended(writing)
    assert found(desk, desk.pages(4)) == [False, False, True, True]
    assert writing.count == 2
    assert desk.link.counts["refused"] == 1 and desk.link.counts["written"] == 2


@pytest.mark.parametrize("fault", RAISING)
def test_callers_learn_what_went_wrong(desks, fault: Fault) -> None:
    desk = desks()
    desk.store.next("status", fault)
    with pytest.raises(BaseException, match="status"):
        desk.link.ask(lambda store: store.status()).result(5.0)
    assert desk.link.ask(lambda store: store.status()).result(5.0).objects == 0
    assert desk.link.counts["errors"] == 1


@pytest.mark.parametrize("call", ["exists", "read", "write"])
def test_an_answer_for_too_few_objects_is_an_error(desks, call: str) -> None:
    desk = desks()
    if call == "read":
        desk.stored(desk.pages(4))
    desk.store.next(call, Fault.MISCOUNT)
    if call == "exists":
        assert found(desk, desk.pages(4)) is None
    elif call == "read":
        reading = read(desk, desk.pages(4))
        assert reading.ready == reading.count == 0
    else:
        writing = desk.link.write(desk.pages(4), LONG_S)
        ended(writing)
        assert writing.count == 0
    assert desk.link.counts["errors"] == 1
    assert works(desk)


def test_a_corrupt_object_that_cannot_be_removed_does_not_spoil_its_batch(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(4))
    (spoiled,) = desk.keys(desk.pages(3))[2:]
    objects = desk.store._store._objects
    objects[spoiled] = objects[spoiled][:5] + b"?" + objects[spoiled][6:]
    desk.store.next("remove", Fault.RAISE)
    assert read(desk, desk.pages(4)).ready == 2
    assert desk.link.counts["corrupt"] == 1 and desk.link.counts["errors"] == 1


# -- memory that a call has in its hands ----------------------------------------------------


@pytest.mark.parametrize("memory", [SMALL, LARGE], ids=("staged", "in place"))
def test_a_blocked_read_is_not_quiet_however_late_or_unwanted_it_is(desks, memory) -> None:
    desk = desks(memory)
    before = desk.stored(desk.pages(4))
    desk.store.next("read", Fault.BLOCK)
    reading = desk.link.read(desk.pages(4), 1.0)
    until(lambda: desk.store.waiting == 1)
    desk.clock.now += 10
    assert reading.late and not reading.quiet and not reading.over
    reading.stop()
    assert not reading.quiet
    assert desk.contents(desk.pages(4)) != before
    desk.store.release()
    until(lambda: reading.quiet)
    assert desk.contents(desk.pages(4)) == before, "it wrote, and only then was it quiet"


def test_a_blocked_write_is_not_quiet(desks) -> None:
    desk = desks(LARGE)
    desk.fill(desk.pages(2))
    desk.store.next("write", Fault.BLOCK)
    writing = desk.link.write(desk.pages(2), 1.0)
    until(lambda: desk.store.waiting == 1)
    writing.stop()
    desk.clock.now += 10
    assert not writing.quiet
    desk.store.release()
    ended(writing)


def test_storage_requests_that_were_not_begun_are_quiet_as_soon_as_they_are_stopped(desks) -> None:
    desk = desks()
    desk.store.always["read"] = Fault.BLOCK
    stuck = [desk.link.read(desk.pages(1), LONG_S) for _ in range(READERS)]
    until(lambda: desk.store.waiting == READERS)
    behind = desk.link.read(desk.pages(2, 4), LONG_S)
    assert not behind.quiet
    behind.stop()
    assert behind.quiet and behind.over and not any(reading.quiet for reading in stuck)
    desk.store.heal()
    until(lambda: all(reading.quiet for reading in stuck))
    assert set(desk.contents(desk.pages(2, 4))) == {bytes([GUARD_BYTE]) * SMALL.slot_bytes("kv")}


def test_a_storage_request_past_its_deadline_begins_no_further_batch(desks) -> None:
    desk = desks(batch_bytes=1)
    desk.store.next("write", Fault.BLOCK)
    writing = desk.link.write(desk.pages(6), 1.0)
    until(lambda: desk.store.waiting == 1)
    desk.clock.now += 2
    desk.store.release()
    ended(writing)
    assert writing.count == 1 and desk.store.calls["write"] == 1


def test_a_stopped_storage_request_begins_no_further_batch(desks) -> None:
    desk = desks(batch_bytes=1)
    desk.stored(desk.pages(6))
    desk.store.always["read"] = Fault.BLOCK
    reading = desk.link.read(desk.pages(6), LONG_S)
    until(lambda: desk.store.waiting == READERS)
    reading.stop()
    desk.store.heal()
    until(lambda: reading.quiet)
    assert desk.store.calls["read"] == READERS and reading.ready == READERS


def test_memory_that_lingers_is_not_quiet_until_its_time_is_up(desks) -> None:
    desk = desks(LARGE)
    desk.stored(desk.pages(2))
    desk.store.lingers_s = 30.0
    desk.store.next("read", Fault.LINGER)
    reading = desk.link.read(desk.pages(2), LONG_S)
    until(lambda: reading.over)
    assert not reading.quiet and reading.ready == 0
    desk.clock.now += 29
    assert not reading.quiet
    desk.clock.now += 1
    assert reading.quiet


def test_a_late_write_to_staging_that_lingers_spoils_no_other_pages(desks) -> None:
    """The memory of a worker is as good as a slot: it is not reused while a late call may write."""
    desk = desks()
    before = desk.stored(desk.pages(4))
    desk.store.lingers_s = 60.0
    desk.store.next("read", *[Fault.LINGER] * READERS)
    for _ in range(READERS):
        reading = desk.link.read(desk.pages(4), LONG_S)
        ended(reading)
    lingering = {np.frombuffer(m, np.uint8).ctypes.data for _, m in desk.store.lingering}
    targets: set[int] = set()
    plain = desk.store._store.read

    def spied(keys, memory):
        targets.update(np.frombuffer(one, np.uint8).ctypes.data for one in memory)
        return plain(keys, memory)

    desk.store._store.read = spied
    for _ in range(4):
        assert read(desk, desk.pages(4, 8)).ready == 4
        desk.store.write_late(0x77)
        assert desk.contents(desk.pages(4, 8)) == before
    assert targets and not targets & lingering


# -- order ----------------------------------------------------------------------------------


def test_pages_come_in_order_whatever_the_readers_do(desks) -> None:
    desk = desks(batch_bytes=1)
    before = desk.stored(desk.pages(8))
    first, released, plain = desk.keys(desk.pages(1))[0], threading.Event(), desk.store._store.read

    def first_page_last(keys, targets):
        if first in keys:
            released.wait(LONG_S)
        return plain(keys, targets)

    desk.store._store.read = first_page_last
    reading = desk.link.read(desk.pages(8), LONG_S)
    until(lambda: reading.count == 7)
    assert reading.ready == 0 and not reading.over
    released.set()
    until(lambda: reading.over)
    assert reading.ready == 8 and desk.contents(desk.pages(8)) == before


def test_a_failure_ends_a_read_and_leaves_what_came_before(desks) -> None:
    desk = desks(batch_bytes=1)
    desk.stored(desk.pages(8))
    desk.store._store.remove(desk.keys(desk.pages(4))[3:])
    reading = read(desk, desk.pages(8))
    assert reading.ready == 3 and reading.count < 8


def test_storage_requests_take_turns(desks) -> None:
    """A long one does not keep a short one waiting for its end."""
    desk = desks(batch_bytes=1, slots=64)
    desk.stored(desk.pages(63))
    desk.store.next("read", *[Fault.BLOCK] * READERS)
    long = desk.link.read(desk.pages(60), LONG_S)
    until(lambda: desk.store.waiting == READERS)
    short = desk.link.read(desk.pages(1, 63), LONG_S)
    desk.store.always["read"] = Fault.SLOW
    desk.store.release()
    until(lambda: short.over)
    assert short.ready == 1 and not long.over


# -- stores that are left alone -------------------------------------------------------------


def test_a_store_that_fails_again_and_again_is_left_alone_and_tried_later(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    calls = desk.store.calls["exists"]
    desk.store.always["exists"] = Fault.RAISE
    for _ in range(MAX_FAILURES + 4):
        assert found(desk, desk.pages(2)) is None
    assert desk.store.calls["exists"] == calls + MAX_FAILURES
    assert not desk.link.available and desk.link.counts["spared"] == 4
    desk.clock.now += REST_S
    assert desk.link.available
    assert found(desk, desk.pages(2)) is None
    assert not desk.link.available, "the probe failed"
    desk.store.heal()
    assert found(desk, desk.pages(2)) is None
    desk.clock.now += REST_S
    assert found(desk, desk.pages(2)) == [True, True]
    assert desk.link.available and works(desk)


def test_reads_and_writes_spare_a_store_too(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    desk.store.always = {"exists": Fault.RAISE, "read": Fault.RAISE}
    for _ in range(MAX_FAILURES):
        found(desk, desk.pages(2))
        read(desk, desk.pages(2))
    before = sum(desk.store.calls.values())
    writing = desk.link.write(desk.pages(2), LONG_S)
    ended(writing)
    assert read(desk, desk.pages(2)).ready == writing.count == 0
    assert sum(desk.store.calls.values()) == before


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_store_that_answers_and_cannot_do_it_is_left_alone(desks, call: str) -> None:
    """A lookup that works says nothing of a read that does not: requests would wait for each."""
    desk = desks()
    desk.stored(desk.pages(2))
    desk.store.always[call] = Fault.RAISE
    before = desk.store.calls[call]
    for number in range(MAX_FAILURES + 4):
        found(desk, desk.pages(2))
        if call == "read":
            read(desk, desk.pages(2))
        else:
            pages = [StoredPage("kv", bytes([number]) * 32, 0)]
            ended(desk.link.write(pages, LONG_S))
    assert desk.store.calls[call] == before + MAX_FAILURES


def test_threads_that_do_not_return_count_as_gone(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    desk.store.always["read"] = Fault.BLOCK
    readings = [desk.link.read(desk.pages(1), LONG_S) for _ in range(READERS)]
    until(lambda: desk.store.waiting == READERS)
    assert desk.link.available
    desk.clock.now += STUCK_S + 1
    assert not desk.link.available
    assert found(desk, desk.pages(2)) is None and desk.link.counts["spared"] == 1
    desk.store.heal()
    until(lambda: all(reading.over for reading in readings))
    until(lambda: desk.link.available)
    assert found(desk, desk.pages(2)) == [True, True]


def test_one_reader_that_returns_keeps_the_store_in_use(desks) -> None:
    desk = desks()
    desk.stored(desk.pages(2))
    desk.store.next("read", Fault.BLOCK)
    desk.link.read(desk.pages(1), LONG_S)
    until(lambda: desk.store.waiting == 1)
    desk.clock.now += STUCK_S + 1
    assert desk.link.available and read(desk, desk.pages(2, 4)).ready == 2


# -- the end --------------------------------------------------------------------------------


def test_closing_with_stuck_workers_says_so_and_does_not_hang(desks) -> None:
    desk = desks()
    desk.store.next("exists", Fault.BLOCK)
    desk.link.look(lambda: desk.sought(desk.pages(1)), LONG_S)
    until(lambda: desk.store.waiting == 1)
    assert not desk.link.close(0.05)
    assert desk.store.calls["close"] == 0, "a call is still in it"
    desk.store.release()


@pytest.mark.parametrize("fault", RAISING)
def test_a_store_that_cannot_be_closed_is_closed_all_the_same(desks, fault: Fault) -> None:
    desk = desks()
    desk.store.next("close", fault)
    assert desk.link.close(5.0)
    assert desk.link.counts["errors"] == 1


def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    desk = Desk()
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert len(names) == READERS + 2 and all("kvtide-store" in name for name in names)
    desk.close()
    assert set(threading.enumerate()) <= before


# -- anything -------------------------------------------------------------------------------


def _storm(seed: int) -> Desk:
    """Nothing goes wrong until the draw has a share."""
    draw = Draw(seed, 0.0, [fault for fault in Fault if fault is not Fault.BLOCK])
    store = FaultyStore(open_store("memory:", SPACE), draw, slow_s=0.001, lingers_s=0.0)
    layout = list(Layout)[seed % 3]
    desk = Desk(LARGE, layout, slots=48, store=store, batch_bytes=1 << 17)
    draw.fraction = 0.3
    return desk


def test_whatever_goes_wrong_pages_that_are_ready_are_right() -> None:
    """Readings, writings and lookups at once, in a storm of faults, until all have struck."""
    counts: Counter[str] = Counter()
    seen = ("errors", "spared", "corrupt", "missing", "refused", "known", "read", "written")
    for seed in range(60):
        if seed >= 12 and all(counts[what] >= 5 for what in seen):
            break
        desk = _storm(seed)
        sources = [*desk.pages(12), *desk.pages(12, anchor="swa")]
        contents = desk.fill(sources)
        targets = [page._replace(slot=page.slot + 16) for page in sources]
        behind = [page._replace(slot=page.slot + 32) for page in sources]
        for _ in range(8):
            desk.clock.now += 2 * REST_S
            writing = desk.link.write(sources, LONG_S)
            readings = [desk.link.read(targets, LONG_S), desk.link.read(behind, LONG_S)]
            lookup = desk.link.look(lambda pages=sources, at=desk: at.sought(pages), LONG_S)
            ended(lookup, writing, *readings)
            for reading in readings:
                for number, page in enumerate(reading.pages[: reading.ready]):
                    (got,), wanted = desk.contents([page]), contents[number]
                    own = desk.formats[page.anchor].payload_bytes
                    assert got[:own] == wanted[:own]
                    assert reading.absent[number] or got == wanted
        desk.store.heal()
        desk.clock.now += 2 * REST_S
        assert len(found(desk, sources) or ()) == 24
        ended(desk.link.write(sources, LONG_S))
        assert read(desk, targets).ready == 24 and desk.contents(targets) == contents
        counts += desk.link.counts
        desk.close()
    assert [what for what in seen if counts[what] < 5] == []
