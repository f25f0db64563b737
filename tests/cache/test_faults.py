"""What goes wrong on the way: nothing is lost, no request reads a wrong byte, the next one works.

    PLANNED ──room──▶ RESERVED ──submitted──▶ IN_FLIGHT ──done──▶ LANDED | FAILED

One section per transition.
"""

from __future__ import annotations

import time

import pytest

from kvtide.cache import Lease, Progress, Tier, TransferError
from kvtide.testing.faults import FaultyBackend
from kvtide.transfer.lane import Lane
from kvtide.transfer.strided import Reference, Way
from kvtide.transfer.timeline import HostTimeline
from kvtide.transfer.transfers import TransferState
from tests.cache.building import Rig, text
from tests.cache.memories import FULL, OPTIONAL, PAGE, V4, WINDOW, every_memory


def places(rig: Rig) -> dict[tuple[Tier, str], object]:
    """Where every page is, and how many slots are left."""
    return dict(rig.cache.stats().pages)


def restored(rig: Rig, tokens: list[int]) -> bool:
    """Whether a new request loads the prefix from the host and reads what was computed."""
    lease = rig.started(tokens)
    loads = lease.loading
    rig.settle()
    assert not lease.failed and rig.misread(lease) == []
    rig.cache.release(lease)
    return loads


# -- PLANNED: no room, or nothing to move ---------------------------------------------------


def test_a_load_without_room_reserves_nothing(build):
    rig = build(device=8)
    rig.remember_on_host(text(1, 4))
    rig.started(text(2, 5))
    before = places(rig)
    assert rig.begin(text(1, 4)) is None
    assert places(rig) == before and rig.cache.stats().in_flight == 0
    assert rig.cache.stats().transfers == {("backup", "landed"): 1}


def test_a_prefix_that_is_all_there_needs_no_transfer(build):
    rig = build()
    rig.remember(text(1, 4))
    rig.settle()
    lease = rig.started(text(1, 4))
    assert lease.transfers == [] and not rig.hands[Way.LOAD].jobs
    assert rig.cache.stats().transfers == {("backup", "landed"): 1}


# -- RESERVED: slots for the load, but none for the rest ------------------------------------


@every_memory
def test_a_reservation_that_fails_halfway_gives_the_slots_of_its_load_back(build, memory):
    rig = build(memory, device=8)
    rig.remember_on_host(text(1, 3))
    running = rig.started(text(2, 2))
    before = places(rig)
    assert rig.begin(text(1, 9)) is None
    assert places(rig) == before and rig.cache.stats().in_flight == 0
    rig.cache.release(running)
    assert restored(rig, text(1, 3))


def test_a_reservation_that_fails_leaves_the_load_of_another_alone(build):
    rig = build(device=8)
    rig.remember_on_host(text(1, 3))
    match = rig.cache.match(rig.cache.prompt(text(1, 3)))
    first = rig.cache.reserve(match)
    assert rig.begin(text(1, 9)) is None
    rig.cache.load(first)
    rig.settle()
    assert not first.failed and rig.misread(first) == []


def test_waiting_for_a_load_that_was_never_started_is_a_programmers_error(build):
    rig = build()
    rig.remember_on_host(text(1, 3))
    lease = rig.cache.reserve(rig.cache.match(rig.cache.prompt(text(1, 3))))
    with pytest.raises(AssertionError, match="wait comes after `load`"):
        rig.cache.wait(lease, 0)


# -- IN_FLIGHT → FAILED ------------------------------------------------------------------------

BREAKS = {
    "before it copied anything": lambda lane: lane.run_raising(),
    "between two layers": lambda lane: lane.run_raising(2),
    "halfway through the first layer": lambda lane: lane.run_halfway(),
    "halfway through a later layer": lambda lane: (lane.run_legs(2), lane.run_halfway()),
    "in the last layer": lambda lane: lane.run_raising(lane.jobs[0].legs - 1),
}


def break_load(rig: Rig, how: str, tokens: list[int]) -> Lease:
    """A request whose load is going to fail."""
    lane = rig.hands[Way.LOAD]
    if how == "it could not be submitted":
        lane.refusals = 1
        return rig.started(tokens)
    lease = rig.started(tokens)
    BREAKS[how](lane)
    return lease


every_break = pytest.mark.parametrize("how", [*BREAKS, "it could not be submitted"])
MEMORIES = (FULL, WINDOW, V4)
some_memories = pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.model)


@every_break
@some_memories
def test_a_failed_load_gives_everything_back_and_the_next_request_loads_again(build, memory, how):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    before = places(rig)
    lease = break_load(rig, how, text(1, 6))
    with pytest.raises(TransferError):
        rig.cache.wait(lease, memory.layers - 1)
    progress = rig.cache.poll()
    assert progress.failed == (lease,) and progress.landed == ()
    assert lease.failed and not lease.loading
    assert [transfer.state for transfer in lease.transfers] == [TransferState.FAILED]
    for layer in range(memory.layers):
        with pytest.raises(TransferError, match="could not be loaded"):
            rig.cache.wait(lease, layer)
    rig.cache.release(lease)
    assert places(rig) == before and rig.problems() == []
    assert restored(rig, text(1, 6))
    assert rig.cache.stats().transfers["load", "failed"] == 1


@every_break
def test_a_commit_on_a_load_that_fails_does_not_happen(build, how):
    rig = build(WINDOW)
    rig.remember_on_host(text(1, 2))
    lease = break_load(rig, how, text(1, 5))
    rig.write(lease, 2, 4)
    rig.cache.commit(lease, 4 * PAGE)
    rig.cache.poll()
    rig.write(lease, 4, 5)
    rig.cache.commit(lease, 5 * PAGE)
    rig.settle()
    assert rig.found(text(1, 5)) == 2 * PAGE
    assert rig.cache.stats().moved_pages["backup"] == 4, "of what was there before"


@every_break
def test_all_that_share_a_failed_load_fail_together(build, how):
    rig = build()
    rig.remember_on_host(text(1, 4))
    rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    lane = rig.hands[Way.LOAD]
    lane.refusals = int(how not in BREAKS)
    leases = {rig.started(text(1, 4)) for _ in range(2)}
    if how in BREAKS:
        BREAKS[how](lane)
    assert set(rig.cache.poll().failed) == leases
    for lease in leases:
        with pytest.raises(TransferError):
            rig.cache.wait(lease, 0)


def test_a_request_of_two_loads_fails_with_the_first_and_is_reported_once(build):
    rig = build()
    rig.remember_on_host(text(1, 6))
    first, second = rig.started(text(1, 3)), rig.started(text(1, 6))
    lane = rig.hands[Way.LOAD]
    lane.run_raising()
    assert set(rig.cache.poll().failed) == {first, second}
    lane.run()
    assert rig.cache.poll() == Progress()
    assert second.failed and rig.problems() == []


@pytest.mark.parametrize("how", ["copy", "submission"])
@some_memories
def test_a_failed_backup_leaves_its_page_on_the_device_and_the_host_free(build, memory, how):
    rig = build(memory)
    lease = rig.started(text(1, 4))
    rig.compute(lease, 2)
    lane = rig.hands[Way.BACKUP]
    lane.refusals = int(how == "submission")
    rig.cache.poll()
    if how == "copy":
        lane.run_halfway()
    assert rig.cache.poll() == Progress(), "no lease waited for it"
    pages = rig.cache.stats().pages
    assert all(pages[Tier.HOST, a.name].free == 32 for a in memory.anchors)
    assert not lease.failed and rig.misread(lease) == []
    rig.compute(lease)
    rig.settle()
    rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 4)) == 4 * PAGE, "the next commit made up for it"


def test_a_failed_demotion_leaves_the_page_where_it_was(build):
    rig = build(device=8, write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 6))
    assert rig.begin(text(2, 6)) is None
    rig.cache.poll()
    rig.hands[Way.BACKUP].run_halfway()
    rig.cache.poll()
    assert rig.found(text(1, 6), Tier.DEVICE) == 6 * PAGE
    assert rig.cache.stats().pages[Tier.HOST, "kv"].free == 32
    assert rig.begin(text(2, 6)) is None
    rig.settle()
    assert rig.begin(text(2, 6)) is not None
    assert rig.found(text(1, 6)) == 6 * PAGE


def test_failures_are_counted_by_direction(build):
    rig = build()
    rig.remember_on_host(text(1, 2))
    rig.started(text(1, 2))
    rig.hands[Way.LOAD].run_raising()
    rig.cache.poll()
    stats = rig.cache.stats()
    assert stats.lane_failures == {"load": 1, "backup": 0}
    assert stats.transfers == {("backup", "landed"): 1, ("load", "failed"): 1}
    assert stats.moved_pages == {"load": 0, "backup": 2} and stats.moved_bytes["load"] == 0


# -- IN_FLIGHT → LANDED ------------------------------------------------------------------------


def test_nothing_of_a_load_can_be_found_on_the_device_before_all_of_it_landed(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    rig.started(text(1, 4))
    for _ in range(FULL.layers):
        assert rig.found(text(1, 4), Tier.DEVICE) == 0
        rig.hands[Way.LOAD].run_legs(1)
        assert rig.problems() == []
    rig.cache.poll()
    assert rig.found(text(1, 4), Tier.DEVICE) == 4 * PAGE


def test_a_copy_on_the_host_can_be_found_only_when_it_landed(build):
    rig = build(write_policy="write_back", device=8, headroom=0.0)
    rig.remember(text(1, 6))
    assert rig.begin(text(2, 6)) is None
    rig.cache.poll()
    assert rig.cache.stats().pages[Tier.HOST, "kv"].resident == 0
    assert rig.cache.match(rig.cache.prompt(text(1, 6))).by_tier == {Tier.DEVICE: 6 * PAGE}


@every_memory
def test_a_commit_while_loading_happens_when_the_load_has_landed(build, memory):
    rig = build(memory)
    rig.remember_on_host(text(1, 2))
    lease = rig.started(text(1, 5))
    rig.write(lease, 2, 5)
    rig.cache.commit(lease, 5 * PAGE + memory.holdback)
    assert lease.loading and rig.found(text(1, 5)) == 2 * PAGE
    rig.hands[Way.LOAD].run()
    assert rig.found(text(1, 5)) == 2 * PAGE
    rig.cache.poll()
    assert rig.found(text(1, 5), Tier.DEVICE) == 5 * PAGE
    rig.settle()
    rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 5)) == 5 * PAGE, "and then it was backed up"


@pytest.mark.parametrize("moment", ["before it left", "before a layer", "between layers", "done"])
@some_memories
def test_a_request_may_go_at_any_moment_of_its_load(build, memory, moment):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    lease = rig.cache.reserve(rig.cache.match(rig.cache.prompt(text(1, 6))))
    rig.write(lease, 4, 6)
    rig.cache.commit(lease, 6 * PAGE)
    if moment != "before it left":
        rig.cache.load(lease)
        steps = {"before a layer": 0, "between layers": 2, "done": memory.layers}
        rig.hands[Way.LOAD].run_legs(steps[moment])
    rig.cache.release(lease)
    assert rig.problems() == []
    assert rig.cache.flush(Tier.DEVICE) == 0, "a copy may still be writing there"
    rig.settle()
    assert rig.found(text(1, 6), Tier.DEVICE) == 4 * PAGE


# -- past the deadline ----------------------------------------------------------------------


def late_load(rig: Rig, tokens: list[int]) -> Lease:
    """A request whose load is in flight and will not end in time."""
    lease, lane = rig.started(tokens), rig.hands[Way.LOAD]
    lane.run_legs(min(1, lane.jobs[0].legs - 1))
    lane.expire()
    return lease


def test_a_late_load_is_an_error_for_its_waiter_and_poll_reports_it_once(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    lease = late_load(rig, text(1, 4))
    rig.cache.wait(lease, 0)
    with pytest.raises(TransferError, match="deadline"):
        rig.cache.wait(lease, 1)
    assert rig.cache.poll().failed == (lease,)
    assert rig.cache.poll().failed == ()
    assert lease.failed and rig.cache.stats().overdue == 1


def test_slots_of_a_late_load_are_not_free_until_its_copy_has_ended(build):
    rig = build(device=8)
    rig.remember_on_host(text(1, 4))
    rig.cache.release(late_load(rig, text(1, 4, extra=2)))
    rig.cache.poll()
    assert rig.cache.stats().pages[Tier.DEVICE, "kv"].free == 4
    assert rig.begin(text(2, 5)) is None
    other = rig.started(text(2, 3))
    rig.compute(other)
    rig.settle()
    assert rig.problems() == [] and rig.misread(other) == []
    assert rig.cache.stats().overdue == 0
    assert rig.begin(text(3, 3)) is not None


@every_memory
def test_a_request_does_not_wait_for_a_load_that_is_late_already(build, memory):
    rig = build(memory)
    rig.remember_on_host(text(1, 3))
    late = late_load(rig, text(1, 3))
    rig.cache.poll()
    lease = rig.started(text(1, 3))
    assert not lease.loading and lease.cached_tokens == 0
    rig.compute(lease)
    assert rig.problems() == [] and rig.misread(lease) == []
    rig.settle()
    assert late.failed and not lease.failed
    assert rig.problems() == [] and rig.misread(lease) == []


def test_a_request_falls_back_to_what_the_device_has(build):
    rig = build()
    rig.remember(text(1, 5))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "kv", 3)
    late_load(rig, text(1, 5))
    rig.cache.poll()
    lease = rig.started(text(1, 5))
    assert lease.cached_tokens == 2 * PAGE and lease.by_tier == {Tier.DEVICE: 2 * PAGE}
    assert {stop.reason for stop in lease.why} == {"pages are still arriving"}


def test_a_late_load_of_what_is_optional_keeps_no_request_waiting(build):
    rig = build(OPTIONAL)
    rig.remember(text(1, 4))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "draft", 4)
    late_load(rig, text(1, 4))
    rig.cache.poll()
    lease = rig.started(text(1, 4))
    assert lease.cached_tokens == 4 * PAGE and not lease.loading
    assert rig.misread(lease) == []


@pytest.mark.parametrize("end", ["lands", "breaks"])
def test_a_late_load_that_ends_after_all_does_so_cleanly(build, end):
    rig = build(WINDOW)
    rig.remember_on_host(text(1, 4))
    before = places(rig)
    lease = late_load(rig, text(1, 4))
    rig.cache.poll()
    rig.write(lease, 4, 4)
    rig.cache.commit(lease, 4 * PAGE)
    rig.cache.release(lease)
    if end == "lands":
        rig.hands[Way.LOAD].run()
    else:
        rig.hands[Way.LOAD].run_halfway()
    assert rig.cache.poll().landed == ()
    assert rig.problems() == []
    if end == "lands":
        assert rig.found(text(1, 4), Tier.DEVICE) == 4 * PAGE
    else:
        assert places(rig) == before
    assert restored(rig, text(1, 4)) == (end == "breaks")


def test_a_lease_whose_load_was_late_stays_failed_when_it_lands_after_all(build):
    rig = build()
    rig.remember_on_host(text(1, 2))
    lease = late_load(rig, text(1, 4))
    rig.cache.poll()
    rig.settle()
    rig.cache.commit(lease, 4 * PAGE)
    with pytest.raises(TransferError):
        rig.cache.wait(lease, 0)
    assert rig.found(text(1, 4)) == 2 * PAGE


# -- real lanes -----------------------------------------------------------------------------


def threads(**faults: object) -> tuple[dict[Way, Lane], FaultyBackend]:
    """A lane each way, of which the one that loads is going to break."""
    faulty = FaultyBackend(Reference(), **faults)
    backends = {Way.LOAD: faulty, Way.BACKUP: Reference()}
    lanes = {way: Lane(way.name, HostTimeline(), backends[way]) for way in Way}
    return lanes, faulty


@pytest.mark.parametrize("fault", ["raises", "halves", "kills"])
def test_whatever_a_copy_raises_fails_its_load_and_the_next_one_works(build, fault):
    lanes, _ = threads(**{fault: {2}})
    rig = build(lanes=lanes)
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 4))
    with pytest.raises(TransferError, match="the copy failed"):
        rig.cache.wait(lease, 3)
    rig.settle()
    assert lease.failed and rig.cache.stats().lane_failures == {"load": 1, "backup": 0}
    rig.cache.release(lease)
    assert restored(rig, text(1, 4))


def test_a_copy_that_never_ends_keeps_no_request_waiting_and_nothing_is_reused(build):
    lanes, faulty = threads()
    rig = build(lanes=lanes, device=8, transfer_timeout_s=0.05)
    rig.remember_on_host(text(1, 4))
    faulty.hold.clear()
    lease = rig.started(text(1, 4, extra=2))
    started = time.monotonic()
    with pytest.raises(TransferError, match="deadline"):
        rig.cache.wait(lease, 0)
    assert time.monotonic() - started < 30
    rig.cache.release(lease)
    rig.cache.poll()
    other = rig.started(text(1, 3))
    assert not other.loading and other.cached_tokens == 0
    rig.compute(other)
    assert rig.problems() == [] and rig.cache.stats().overdue == 1
    faulty.hold.set()
    assert rig.cache.drain(10)
    assert rig.problems() == [] and rig.misread(other) == []


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_backups_that_never_end_do_not_keep_requests_out(build, policy):
    rig = build(device=16, write_policy=policy, transfer_timeout_s=0.01, headroom=0.0)
    rig.remember(text(1, 6))
    assert rig.begin(text(2, 13)) is None
    rig.cache.poll()
    time.sleep(0.02)
    rig.cache.poll()
    assert rig.cache.stats().overdue
    for number in range(3, 9):
        lease = rig.begin(text(number, 2))
        assert lease is not None
        rig.compute(lease)
        rig.cache.release(lease)
        rig.cache.poll()
