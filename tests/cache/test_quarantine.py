"""Prefixes that no request may read again, and prompts computed as if nothing were kept."""

from __future__ import annotations

import pytest

from kvtide.cache import Lease, Match, Tier, TransferError
from kvtide.index.tree.slots import SlotPool
from kvtide.transfer.strided import Way
from tests.cache.building import TIERS, Rig, page_names, text
from tests.cache.memories import DRAFTED, FULL, PAGE, WINDOW, every_memory

every_policy = pytest.mark.parametrize(
    "policy", ["write_through", "write_through_selective", "write_back", "none"]
)


def quarantine(rig: Rig, tokens: list[int]) -> int:
    pages = rig.quarantine(rig.cache.prompt(tokens))
    assert rig.problems() == []
    return pages


def empty(rig: Rig) -> bool:
    """Whether nothing is kept anywhere."""
    return all(count.free == count.capacity for count in rig.cache.stats().pages.values())


def on_host(rig: Rig) -> int:
    """Pages of pools whose home is the device."""
    pages = rig.cache.stats().pages
    copied = [pool.name for pool in rig.memory.anchors if not pool.hot]
    return sum(pages[Tier.HOST, name].resident for name in copied)


def scratch(rig: Rig, prompt: list[int], **options: int) -> Lease:
    lease = rig.cache.reserve(rig.cache.match(rig.cache.scratch(prompt)), **options)
    assert lease is not None
    rig.cache.load(lease)
    return lease


# -- quarantine -----------------------------------------------------------------------------


@every_memory
def test_a_prefix_in_quarantine_is_computed_anew(build, memory):
    rig = build(memory)
    rig.remember(text(1, 4))
    rig.settle()
    assert quarantine(rig, text(1, 4)) > 0
    assert empty(rig) and rig.found(text(1, 4)) == 0
    rig.remember(text(1, 4))
    assert rig.found(text(1, 4)) == 4 * PAGE


@every_memory
def test_a_reader_reads_on_and_the_next_request_reads_other_slots(build, memory):
    rig = build(memory)
    rig.remember(text(1, 4))
    reader = rig.started(text(1, 4))
    assert reader.cached_tokens == 4 * PAGE
    quarantine(rig, text(1, 4))
    anew = rig.started(text(1, 4))
    assert anew.cached_tokens == 0
    rig.compute(anew)
    assert rig.problems() == []
    assert rig.misread(reader) == [] and rig.misread(anew) == []
    rig.cache.release(reader)
    assert rig.problems() == [] and rig.found(text(1, 4)) == 4 * PAGE


def test_the_rig_notices_when_a_request_comes_to_read_a_page_in_quarantine(build):
    rig = build(FULL)
    rig.remember(text(1, 4))
    reader, other = rig.started(text(1, 4)), rig.started(text(2, 4))
    quarantine(rig, text(1, 4))
    own = other._index_lease.segments[0].slots[0][0]
    other._index_lease.segments[0].slots[0][0] = rig.cache.page_table(reader, "kv")[0]
    assert any("in quarantine" in problem for problem in rig.problems())
    other._index_lease.segments[0].slots[0][0] = own


def test_a_match_made_before_is_made_again(build):
    rig = build()
    rig.remember(text(1, 4))
    match: Match = rig.cache.match(rig.cache.prompt(text(1, 4)))
    quarantine(rig, text(1, 4))
    lease = rig.cache.reserve(match)
    assert lease is not None and lease.cached_tokens == 0


def test_a_prompt_without_a_whole_page_quarantines_nothing(build):
    rig = build(DRAFTED)
    rig.remember(text(1, 4))
    assert quarantine(rig, text(1, 0, extra=PAGE - 1)) == 0
    assert rig.found(text(1, 4)) > 0


def test_sessions_let_go_of_a_prefix_in_quarantine_and_others_stay(build):
    rig = build(host=0)
    for number in (1, 2):
        rig.remember(text(number, 3))
        assert rig.cache.sessions.keep(f"session {number}", rig.cache.prompt(text(number, 3)))
    quarantine(rig, text(1, 3))
    assert rig.cache.stats().sessions.pinned == 1
    assert rig.found(text(2, 3)) == 3 * PAGE
    assert rig.cache.stats().pages[Tier.DEVICE, "kv"].resident == 3
    assert rig.cache.sessions.forget("session 2")


@pytest.mark.quick
@pytest.mark.parametrize("ending", ["run", "run_halfway", "run_raising"])
@every_memory
def test_a_load_under_way_ends_for_its_lease_and_leaves_nothing(build, memory, ending):
    rig = build(memory)
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 6))
    rig.hands[Way.LOAD].run_legs(min(1, len(rig.cache.hardware.copier.groups) - 1))
    quarantine(rig, text(1, 4))
    rig.write(lease, lease.committed_pages, 6 - bool(memory.holdback))
    rig.cache.commit(lease, 6 * PAGE)
    getattr(rig.hands[Way.LOAD], ending)()
    progress = rig.cache.poll()
    assert rig.problems() == []
    if lease in progress.landed:
        assert ending == "run" and rig.misread(lease) == []
        assert rig.found(text(1, 6)) == 0 and lease.committed_pages * PAGE > lease.cached_tokens
    else:
        assert lease in progress.failed
        with pytest.raises(TransferError):
            rig.cache.wait(lease, rig.cache.hardware.copier.groups[0][0])
    rig.cache.release(lease)
    assert rig.problems() == [] and empty(rig)


def test_a_backup_that_has_not_left_never_does(build):
    rig = build()
    lease = rig.started(text(1, 4))
    rig.compute(lease)
    rig.cache.release(lease)
    assert rig.cache.busy
    quarantine(rig, text(1, 4))
    assert not rig.cache.busy and empty(rig)
    rig.settle()
    assert rig.cache.stats().moved_pages["backup"] == 0


def test_a_prefetch_that_has_not_left_never_does(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    assert rig.cache.prefetch(rig.cache.prompt(text(1, 4)))
    quarantine(rig, text(1, 4))
    assert not rig.cache.busy and empty(rig)


def test_a_load_that_has_not_left_still_does_for_its_lease(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    lease = rig.cache.reserve(rig.cache.match(rig.cache.prompt(text(1, 4))))
    assert lease is not None
    quarantine(rig, text(1, 4))
    rig.settle()
    assert not lease.loading and not lease.failed and rig.misread(lease) == []
    rig.cache.release(lease)
    assert empty(rig)


@pytest.mark.parametrize("ending", ["run", "run_halfway"])
def test_a_backup_under_way_ends_and_leaves_nothing(build, ending):
    rig = build()
    rig.remember(text(1, 4))
    rig.cache.poll()
    quarantine(rig, text(1, 4))
    assert rig.cache.busy and not empty(rig)
    getattr(rig.hands[Way.BACKUP], ending)()
    rig.cache.poll()
    assert rig.problems() == [] and empty(rig)


def test_slots_of_a_late_copy_stay_its_own_in_quarantine(build):
    rig = build()
    rig.remember_on_host(text(1, 4))
    lease = rig.started(text(1, 4))
    rig.hands[Way.LOAD].expire()
    assert rig.cache.poll().failed == (lease,)
    quarantine(rig, text(1, 4))
    rig.cache.release(lease)
    assert rig.problems() == [] and not empty(rig)
    rig.hands[Way.LOAD].run()
    rig.cache.poll()
    assert rig.problems() == [] and empty(rig)


@every_policy
def test_what_is_committed_in_quarantine_is_copied_nowhere(build, policy):
    rig = build(WINDOW, write_policy=policy)
    lease = rig.started(text(1, 3))
    rig.compute(lease)
    quarantine(rig, text(1, 3))
    rig.settle()
    before = rig.cache.stats().moved_pages["backup"]
    lease.append(text(1, 6)[len(text(1, 3)) :])
    assert rig.cache.grow(lease, lease.prompt.tokens)
    rig.compute(lease)
    rig.settle()
    assert rig.misread(lease) == [] and lease.committed_pages == 6
    assert rig.cache.stats().moved_pages["backup"] == before and on_host(rig) == 0
    rig.cache.release(lease)
    assert rig.problems() == [] and empty(rig)


def test_write_back_does_not_wait_to_demote_what_is_in_quarantine(build):
    rig = build(device=8, write_policy="write_back", headroom=0.0)
    lease = rig.started(text(1, 6))
    rig.compute(lease)
    quarantine(rig, text(1, 6))
    assert rig.begin(text(2, 6)) is None
    rig.cache.release(lease)
    assert rig.begin(text(2, 6)) is not None
    assert not rig.cache.busy


# -- scratch --------------------------------------------------------------------------------


@pytest.mark.quick
@every_policy
@every_memory
def test_scratch_is_computed_as_if_nothing_were_kept_and_leaves_nothing(build, memory, policy):
    rig = build(memory, write_policy=policy)
    lease = scratch(rig, text(1, 6), tokens=2 * PAGE, growth_pages=2)
    assert lease.cached_tokens == 0
    for pages in range(1, 7):
        assert rig.cache.grow(lease, min(pages * PAGE + 1, lease.prompt.tokens))
        whole = min(pages, len(page_names(lease.prompt)))
        rig.compute(lease, whole)
        rig.cache.shrink(lease, lease.committed_pages * PAGE + 1)
        for layer in range(memory.end_layer):
            rig.cache.wait(lease, layer)
        rig.settle()
        assert rig.problems() == [] and rig.misread(lease) == []
        assert rig.found(text(1, 6)) == 0
    assert rig.cache.match(lease.prompt).tokens == 0
    assert rig.cache.stats().moved_pages["backup"] == 0 and on_host(rig) == 0
    rig.cache.release(lease)
    assert rig.problems() == [] and empty(rig)


@every_memory
def test_scratch_shares_nothing_with_the_same_tokens_kept_on_device_or_host(build, memory):
    rig = build(memory)
    rig.remember(text(1, 4))
    rig.settle()
    kept = rig.started(text(1, 4))
    lease = scratch(rig, text(1, 4))
    assert lease.cached_tokens == 0 and not lease.transfers
    rig.compute(lease)
    assert rig.problems() == []
    assert rig.misread(lease) == [] and rig.misread(kept) == []
    rig.cache.release(lease)
    assert rig.problems() == []
    assert rig.found(text(1, 4)) == 4 * PAGE, "what others keep stays"


def test_two_leases_of_one_scratch_prompt_have_pages_of_their_own(build):
    rig = build()
    prompt = rig.cache.scratch(text(1, 3))
    leases = []
    for _ in range(2):
        leases.append(rig.cache.reserve(rig.cache.match(prompt)))
        rig.compute(leases[-1])
    tables = [rig.cache.page_table(lease, "kv").tolist() for lease in leases]
    assert not set(tables[0]) & set(tables[1])


def test_scratch_that_is_aborted_before_any_commit_leaves_nothing(build):
    rig = build(DRAFTED)
    lease = scratch(rig, text(1, 3), growth_pages=2)
    rig.cache.release(lease)
    assert rig.problems() == [] and empty(rig)


def test_scratch_is_no_traffic_and_not_prefetched(build):
    rig = build()
    rig.remember_on_host(text(1, 3))
    before = rig.cache.stats()
    assert not rig.cache.prefetch(rig.cache.scratch(text(1, 3)))
    rig.cache.release(scratch(rig, text(1, 3)))
    assert rig.cache.quarantine(rig.cache.scratch(text(1, 3))) == 0
    after = rig.cache.stats()
    assert (after.prompt_tokens, after.misses) == (before.prompt_tokens, before.misses)
    assert rig.found(text(1, 3)) == 3 * PAGE


def test_both_tiers_are_watched(build):
    """Else a rig could not tell which request reads what in quarantine."""
    rig = build()
    watched = [cell.slots for cell in rig.cache.index.tree.cells if cell.tier in TIERS]
    assert all(type(slots) is not SlotPool for slots in watched)
