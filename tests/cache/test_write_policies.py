"""When pages are copied to the host, and what that promises under pressure."""

from __future__ import annotations

import pytest

from kvtide.cache import Tier
from kvtide.index import LastPage
from kvtide.transfer.strided import Way
from kvtide.transfer.timeline import HostTimeline
from tests.cache.building import Rig, text
from tests.cache.memories import FULL, PAGE, RECURRENT, V4, WINDOW, every_memory

SOME = (FULL, WINDOW, RECURRENT, V4)
some_memories = pytest.mark.parametrize("memory", SOME, ids=lambda memory: memory.model)


def on_host(rig: Rig, anchor: str = "kv") -> int:
    return rig.cache.stats().pages[Tier.HOST, anchor].resident


def free(rig: Rig, anchor: str = "kv") -> int:
    return rig.cache.stats().pages[Tier.DEVICE, anchor].free


def fill_host(rig: Rig, pages: int) -> None:
    """Fill the host with a prefix that a session holds there."""
    rig.remember_on_host(text(9, pages))
    assert rig.cache.sessions.keep("holder", rig.cache.prompt(text(9, pages)))


# -- write_through --------------------------------------------------------------------------


@some_memories
def test_write_through_copies_a_prefill_chunk_by_chunk(build, memory):
    rig = build(memory)
    lease = rig.started(text(1, 6))
    for pages in (1, 3, 6):
        rig.compute(lease, pages)
        assert on_host(rig) < pages
        rig.settle()
        assert on_host(rig) == pages
        assert rig.problems() == []


def test_write_through_copies_a_prefix_that_was_never_seen_before(build):
    rig = build()
    rig.remember(text(1, 4))
    rig.settle()
    assert on_host(rig) == 4


class Counted(HostTimeline):
    """Every fence is a number."""

    def __init__(self) -> None:
        self.fences = 0

    def fence(self):
        self.fences += 1
        return self.fences


def test_a_copy_waits_for_what_was_to_be_done_before_the_fence(build):
    rig = build()
    for hand in rig.hands.values():
        hand.timeline = Counted()
    hand = rig.hands[Way.BACKUP]
    lease = rig.started(text(1, 6))

    def after(pages: int, more: int = 0) -> int:
        """The fence that the copy of these pages comes after, if `more` follow after the fence."""
        rig.compute(lease, pages)
        rig.cache.fence()
        hand.timeline.fences += 100
        if more:
            rig.compute(lease, more)
        rig.cache.poll()
        return hand.jobs[-1].after

    assert after(1) == 1, "all that is computed is before the fence"
    assert after(2, 3) == 203, "page 3 came after the fence"
    assert after(4) == 204, "a fence is for one submission"
    rig.compute(lease, 5)
    hand.timeline.fences += 100
    rig.cache.poll()
    assert hand.jobs[-1].after == 405, "there was no fence"
    rig.settle()
    assert on_host(rig) == 5


def test_a_page_that_is_given_up_after_the_fence_was_computed_before(build):
    rig = build(device=8, write_policy="write_back", headroom=0.5)
    lease = rig.started(text(1, 6))
    rig.compute(lease)
    rig.cache.release(lease)
    assert free(rig) < 4
    hand = rig.hands[Way.BACKUP]
    hand.timeline = Counted()
    rig.cache.fence()
    hand.timeline.fences += 100
    rig.cache.poll()
    assert hand.jobs[-1].after == 1


def test_what_was_computed_on_a_prefix_on_its_way_was_so_before_the_fence(build):
    rig = build()
    rig.remember_on_host(text(1, 2))
    lease = rig.started(text(1, 4))
    rig.write(lease, 2, 4)
    rig.cache.commit(lease, 4 * PAGE)
    hand = rig.hands[Way.BACKUP]
    hand.timeline = Counted()
    rig.cache.fence()
    hand.timeline.fences += 100
    rig.hands[Way.LOAD].run()
    rig.cache.poll()
    assert hand.jobs[-1].after == 1


def test_a_load_comes_beside_what_was_begun_after_the_fence_unless_that_has_its_pages(build):
    rig = build(device=32)
    for number in range(1, 6):
        rig.remember_on_host(text(number, 2))
    for hand in rig.hands.values():
        hand.timeline = Counted()
    hand = rig.hands[Way.LOAD]

    def after(number: int) -> int:
        """The fence that a load comes after, from 100 on if it is its own."""
        hand.timeline.fences = 99
        rig.started(text(number, 3))
        return hand.jobs[-1].after

    assert after(1) == 100, "there was no fence"
    busy, done, idle = (rig.started(text(6 + number, 2)) for number in range(3))
    rig.cache.fence([busy, done])
    assert after(2) < 100
    rig.cache.release(idle)
    assert after(3) < 100, "no step uses its slots"
    rig.cache.release(done)
    assert after(4) == 100
    rig.cache.fence()
    rig.compute(busy)
    assert after(5) == 100, "of a page that others have too, one is free when it is committed"


def test_a_load_comes_after_the_step_whose_pages_a_landing_gave_back(build):
    rig = build()
    for number in (1, 2):
        rig.remember_on_host(text(number, 2))
    lease = rig.started(text(1, 4))
    rig.write(lease, 2, 4)
    rig.cache.commit(lease, 4 * PAGE)
    hand = rig.hands[Way.LOAD]
    hand.run()
    for each in rig.hands.values():
        each.timeline = Counted()
    rig.cache.fence()
    rig.cache.land()
    assert not lease.loading and not lease.pending
    hand.timeline.fences = 99
    rig.started(text(2, 3))
    assert hand.jobs[-1].after == 100


def test_write_through_copies_every_page_once(build):
    rig = build()
    for pages in (2, 4, 4):
        rig.remember(text(1, pages))
        rig.settle()
    assert rig.cache.stats().moved_pages["backup"] == 4


def test_write_through_copies_generated_pages_too(build):
    rig = build()
    lease = rig.started(text(1, 2))
    rig.compute(lease)
    lease.append(text(1, 3)[2 * PAGE + 1 :])
    assert rig.cache.grow(lease, lease.prompt.tokens)
    rig.compute(lease)
    rig.settle()
    assert on_host(rig) == 3


def test_an_aborted_request_leaves_the_pages_it_had_committed_on_the_host(build):
    rig = build()
    lease = rig.started(text(1, 6))
    rig.compute(lease, 2)
    rig.cache.release(lease)
    rig.settle()
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 6)) == 2 * PAGE


def test_pages_being_copied_to_the_host_stay_on_the_device_until_they_are_there(build):
    rig = build(device=8)
    rig.remember(text(1, 6))
    rig.cache.poll()
    assert rig.begin(text(2, 6)) is None
    assert rig.cache.flush(Tier.DEVICE) == 0
    rig.settle()
    assert rig.begin(text(2, 6)) is not None
    assert rig.found(text(1, 6)) == 6 * PAGE


def test_a_full_host_gives_up_what_was_used_longest_ago(build):
    rig = build(device=6, host=8, eviction="lru")
    for number in (1, 2, 3):
        rig.remember(text(number, 4))
        rig.settle()
        assert rig.problems() == []
    rig.cache.flush(Tier.DEVICE)
    assert [rig.found(text(number, 4)) for number in (1, 2, 3)] == [0, 4 * PAGE, 4 * PAGE]


def test_a_copy_for_which_the_host_has_no_room_is_skipped_and_counted(build):
    rig = build(host=6)
    fill_host(rig, 6)
    rig.remember(text(1, 4))
    rig.settle()
    assert rig.cache.stats().skipped_backups == 1
    assert rig.found(text(1, 4)) == 4 * PAGE
    rig.cache.sessions.forget("holder")
    rig.remember(text(1, 5))
    rig.settle()
    assert on_host(rig) >= 5


def test_a_backup_that_lands_does_not_change_what_a_request_goes_on_with(build):
    """The host has a window where this request has none on the device, and needs none."""
    rig = build(WINDOW, placement=LastPage())
    rig.remember(text(1, 2))
    rig.settle()
    rig.cache.index.evict(Tier.DEVICE, "swa", 2)
    rig.cache.index.evict(Tier.HOST, "kv", 2)
    lease = rig.started(text(1, 6), slowest=Tier.DEVICE)
    rig.compute(lease, 2)
    rig.settle()
    assert on_host(rig) == 2 and rig.problems() == []
    rig.compute(lease)
    assert rig.misread(lease) == []


# -- write_through_selective ----------------------------------------------------------------


@every_memory
def test_selective_copies_a_prefix_when_a_second_prompt_finds_it(build, memory):
    rig = build(memory, write_policy="write_through_selective")
    rig.remember(text(1, 4))
    rig.settle()
    assert rig.cache.stats().moved_pages["backup"] == 0
    rig.started(text(1, 6))
    rig.settle()
    assert all(on_host(rig, anchor.name) for anchor in memory.anchors)
    for lease in list(rig.cache._leases.values()):
        rig.cache.release(lease)
    rig.cache.flush(Tier.DEVICE)
    assert rig.found(text(1, 6)) == 4 * PAGE


def test_selective_copies_only_what_was_found_twice(build):
    rig = build(write_policy="write_through_selective")
    rig.remember(text(1, 2))
    rig.remember(text(1, 5))
    rig.settle()
    assert on_host(rig) == 2


# -- write_back -----------------------------------------------------------------------------


def test_write_back_copies_nothing_while_there_is_room(build):
    rig = build(write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 5))
    rig.remember(text(2, 5))
    rig.settle()
    assert rig.cache.stats().moved_pages["backup"] == 0


def admit(rig: Rig, tokens: list[int]) -> None:
    """Ask until there is room, one step after another, and compute."""
    for _ in range(20):
        lease = rig.begin(tokens)
        if lease is not None:
            break
        rig.settle()
    assert lease is not None
    rig.settle()
    rig.compute(lease)
    rig.cache.release(lease)


@pytest.mark.parametrize("headroom", [0.0, 0.3])
@every_memory
def test_write_back_never_loses_the_only_copy_while_the_host_has_room(build, memory, headroom):
    rig = build(memory, device=10, host=64, write_policy="write_back", headroom=headroom)
    numbers = range(1, 7)
    for number in numbers:
        admit(rig, text(number, 5))
        assert rig.problems() == []
        assert [rig.found(text(n, 5)) for n in range(1, number + 1)] == [5 * PAGE] * number
    assert rig.cache.stats().skipped_backups == 0


def test_write_back_refuses_rather_than_waits_while_copies_are_under_way(build):
    """Nothing runs the lanes here: had `reserve` to wait for a copy, it would wait for ever."""
    rig = build(device=16, write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 6))
    rig.remember(text(2, 6))
    for _ in range(4):
        assert rig.begin(text(3, 7)) is None
        rig.cache.poll()
    assert [rig.found(text(number, 6), Tier.DEVICE) for number in (1, 2)] == [6 * PAGE] * 2
    rig.settle()
    assert rig.begin(text(3, 7)) is not None
    assert rig.cache.stats().moved_pages["backup"] == 4, "what is leaving is not demoted again"
    assert [rig.found(text(number, 6)) for number in (1, 2)] == [6 * PAGE] * 2


def test_write_back_begins_to_demote_before_a_request_needs_the_room(build):
    rig = build(device=20, write_policy="write_back", headroom=0.25)
    rig.remember(text(1, 8))
    rig.remember(text(2, 6))
    rig.cache.poll()
    assert rig.cache.stats().in_flight == 0
    lease = rig.started(text(3, 4))
    rig.compute(lease)
    rig.cache.release(lease)
    assert free(rig) < 5
    rig.cache.poll()
    assert rig.cache.stats().in_flight == 1
    rig.settle()
    assert free(rig) >= 5
    assert rig.begin(text(4, 4)) is not None
    assert [rig.found(text(n, p)) for n, p in ((1, 8), (2, 6), (3, 4))] == [32, 24, 16]


def test_write_back_keeps_free_what_others_may_need_while_requests_run(build):
    rig = build(device=20, write_policy="write_back", headroom=0.25)
    rig.remember(text(1, 8))
    lease = rig.started(text(2, 10))
    rig.settle()
    assert free(rig) >= 5
    assert rig.cache.page_table(lease, "kv").min() >= 0


def test_a_page_that_has_a_copy_leaves_the_device_without_another(build):
    rig = build(device=8, write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 6))
    admit(rig, text(2, 6))
    admit(rig, text(1, 6))
    moved = rig.cache.stats().moved_pages["backup"]
    admit(rig, text(2, 6))
    assert rig.cache.stats().moved_pages["backup"] == moved
    assert [rig.found(text(n, 6)) for n in (1, 2)] == [6 * PAGE] * 2


def test_a_demoted_page_that_is_needed_again_meanwhile_stays_on_the_device(build):
    rig = build(device=12, write_policy="write_back", headroom=0.0)
    rig.remember(text(1, 6))
    assert rig.begin(text(2, 8)) is None
    lease = rig.started(text(1, 6))
    assert not lease.loading
    rig.settle()
    assert rig.misread(lease) == []
    assert rig.found(text(1, 6), Tier.DEVICE) == 6 * PAGE


def test_with_the_host_full_of_what_must_stay_pages_are_dropped(build):
    rig = build(device=8, host=3, write_policy="write_back", headroom=0.0, session_share=1.0)
    rig.remember(text(9, 4))
    admit(rig, text(1, 7, extra=0))
    assert rig.cache.sessions.keep("holder", rig.cache.prompt(text(9, 4)))
    assert rig.begin(text(2, 7, extra=0)) is not None
    assert rig.cache.stats().skipped_backups == 1
    assert rig.found(text(1, 7)) < rig.found(text(9, 4)) == 4 * PAGE


def test_with_little_room_on_the_host_only_the_rest_is_dropped(build):
    """Four pages are in the way, and the host has three slots without a hold."""
    rig = build(device=8, host=4, write_policy="write_back", headroom=0.0)
    rig.remember(text(9, 2))
    admit(rig, text(1, 7, extra=0))
    assert rig.cache.sessions.keep("holder", rig.cache.prompt(text(9, 2)))
    assert rig.cache.stats().pages[Tier.HOST, "kv"].free == 3
    admit(rig, text(2, 4, extra=0))
    assert rig.found(text(1, 7)) == 6 * PAGE
    assert rig.cache.match(rig.cache.prompt(text(1, 7))).by_tier[Tier.HOST] == 3 * PAGE


def test_write_back_makes_room_on_the_host_by_dropping_the_oldest_there(build):
    rig = build(device=8, host=8, write_policy="write_back", headroom=0.0, eviction="lru")
    for number in range(1, 6):
        admit(rig, text(number, 5))
        assert rig.problems() == []
    assert rig.found(text(1, 5)) == 0
    assert rig.found(text(4, 5)) == 5 * PAGE


# -- none -----------------------------------------------------------------------------------


def test_the_policy_none_copies_nothing(build):
    rig = build(device=8, write_policy="none")
    for number in (1, 2, 1, 1):
        rig.remember(text(number, 6))
        rig.settle()
    assert rig.cache.stats().moved_pages == {"load": 0, "backup": 0}
    assert rig.cache.stats().skipped_backups == 0


# -- the bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_nothing_is_copied_before_it_was_computed(build, policy):
    """Slots of a request that has computed nothing yet are full of poison, as a copy would be."""
    rig = build(device=12, write_policy=policy, headroom=0.5)
    rig.remember(text(1, 3))
    lease = rig.started(text(1, 6))
    rig.settle()
    assert rig.problems() == []
    rig.compute(lease, 4)
    rig.hands[Way.BACKUP].run()
    assert rig.problems() == []
