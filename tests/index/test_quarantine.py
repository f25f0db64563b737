"""Pages that no prompt may find again, and pages that none finds to begin with."""

from __future__ import annotations

import pytest

from kvtide.index import EventKind, Index, Namespace
from kvtide.spec import ModelMemory, Tier
from kvtide.testing.naive import NaiveIndex
from tests.index.building import (
    back_up,
    build,
    clear_homes,
    compute,
    found,
    keep,
    lease_for,
    readable,
)
from tests.index.memories import ALL_MEMORIES, DRAFTED, FULL, PAGE, TWO_HISTORIES, WINDOW

TEXT = list(range(1, 6 * PAGE + 1))
every_memory = pytest.mark.parametrize("memory", ALL_MEMORIES.values(), ids=ALL_MEMORIES)


def quarantine(index: Index, tokens: list[int]) -> int:
    pages = index.quarantine(index.prompt(tokens))
    assert index.validate() == []
    return pages


def free(index: Index) -> bool:
    """Whether every slot of every tier is free, and the tree is empty."""
    pools = [(tier, pool.name) for tier in Tier for pool in index.memory.anchors]
    return (
        all(index.free_pages(*pool) == index.capacity(*pool) for pool in pools)
        and not index.tree.nodes
        and not index.tree.roots
    )


def resident(index: Index) -> int:
    return sum(index.resident_pages(tier, p.name) for tier in Tier for p in index.memory.anchors)


# -- quarantine ---------------------------------------------------------------------------------


@every_memory
def test_what_is_not_held_is_gone_from_every_tier_at_once(memory: ModelMemory) -> None:
    index = build(memory)
    keep(index, TEXT)
    back_up(index, TEXT)
    keep(index, [*TEXT[: 2 * PAGE], *[7] * (3 * PAGE)])
    pages = resident(index)
    assert quarantine(index, TEXT[: PAGE + memory.holdback]) == pages > 0
    assert free(index)


def test_what_differs_in_its_first_page_stays() -> None:
    index = build(FULL)
    keep(index, TEXT)
    other = [*TEXT[: PAGE - 1], 99, *TEXT[PAGE:]]
    keep(index, other)
    keep(index, TEXT, namespace=Namespace("a"))
    assert quarantine(index, TEXT) == 6
    assert found(index, TEXT) == 0 and found(index, other) == 6
    assert index.match(index.prompt([*TEXT, 0], Namespace("a"))).boundary == 6


def test_with_holdback_prompts_that_differ_in_their_head_are_kept_apart() -> None:
    index = build(DRAFTED)
    other = [99, *TEXT[1:]]
    keep(index, TEXT)
    keep(index, other)
    assert quarantine(index, TEXT) > 0
    assert found(index, TEXT) == 0 and found(index, other) > 0


def test_with_holdback_a_first_page_goes_whatever_comes_after_it() -> None:
    index = build(DRAFTED)
    for after in (50, 60):
        keep(index, [*TEXT[:PAGE], after, *TEXT[PAGE:]])
    keys = [page.key for page in index.keys_below(index.prompt(TEXT))]
    assert len(keys) == 12 and len(set(keys)) == 11, "one key for both first pages"
    assert quarantine(index, TEXT[:PAGE]) > 0 and free(index)


@pytest.mark.parametrize("memory", [FULL, DRAFTED], ids=["full", "drafted"])
@pytest.mark.parametrize("tokens", [0, 1, PAGE - 1])
def test_a_prompt_without_a_page_quarantines_nothing(memory: ModelMemory, tokens: int) -> None:
    index = build(memory)
    keep(index, TEXT)
    tick = index.tree.tick
    assert quarantine(index, TEXT[:tokens]) == 0
    assert found(index, TEXT) > 0 and index.tree.tick == tick


def test_a_hit_found_before_is_out_of_date() -> None:
    index = build(FULL)
    keep(index, TEXT)
    hit = index.match(index.prompt(TEXT))
    quarantine(index, TEXT)
    assert not index.current(hit)
    with pytest.raises(AssertionError, match="match again"):
        index.pin(hit)


@every_memory
def test_a_lease_reads_on_and_its_release_drops_all_it_held(memory: ModelMemory) -> None:
    index = build(memory)
    lease = compute(index, TEXT)
    tables = [index.page_table(lease, pool.name).tolist() for pool in memory.anchors]
    quarantine(index, TEXT)
    assert found(index, TEXT) == 0
    for pool, table in zip(memory.anchors, tables, strict=True):
        reach = pool.reuse.reach_pages(PAGE)
        first = 0 if reach is None else lease.boundary - reach
        now = index.page_table(lease, pool.name).tolist()
        assert now[first : lease.boundary] == table[first : lease.boundary]
    index.release(lease)
    assert index.validate() == [] and free(index)


@every_memory
def test_a_lease_goes_on_committing_what_no_prompt_finds(memory: ModelMemory) -> None:
    index = build(memory)
    lease = compute(index, TEXT)
    quarantine(index, TEXT)
    more = [*TEXT, *[8] * (3 * PAGE)]
    lease.prompt.extend(more[len(TEXT) :])
    assert index.reserve(lease, len(more))
    index.commit(lease, len(more))
    assert lease.boundary == (len(more) - memory.holdback) // PAGE
    assert index.validate() == [] and found(index, more) == 0
    index.release(lease)
    assert free(index)


def test_only_what_a_lease_needs_stays_until_then() -> None:
    index = build(FULL)
    keep(index, [*TEXT[: 2 * PAGE], *[7] * (4 * PAGE)])
    keep(index, TEXT)
    lease = lease_for(index, TEXT[: 3 * PAGE + 1])
    assert quarantine(index, TEXT) == 10
    assert index.resident_pages(Tier.DEVICE, "kv") == lease.boundary == 3


@every_memory
def test_the_same_tokens_are_computed_anew_beside_what_is_held(memory: ModelMemory) -> None:
    index = build(memory)
    held = compute(index, TEXT)
    quarantine(index, TEXT)
    anew = compute(index, TEXT)
    assert index.validate() == [] and found(index, TEXT) == anew.boundary
    for pool in memory.anchors:
        tables = [index.page_table(lease, pool.name) for lease in (held, anew)]
        slots = [set(table[: held.boundary].tolist()) - {-1} for table in tables]
        assert not slots[0] & slots[1]
    index.release(held)
    assert index.validate() == [] and found(index, TEXT) == anew.boundary
    again = [*TEXT[: 3 * PAGE], *[5] * PAGE]
    held = compute(index, again)
    assert quarantine(index, TEXT) > 0, "the second branch can be quarantined like the first"
    index.release(anew)
    index.release(held)
    assert free(index)


def test_two_quarantined_branches_with_the_same_tokens_live_side_by_side() -> None:
    index = build(FULL)
    leases = []
    for _ in range(3):
        leases.append(compute(index, TEXT))
        assert quarantine(index, TEXT) == 6
    assert index.resident_pages(Tier.DEVICE, "kv") == 18
    for lease in leases:
        index.release(lease)
        assert index.validate() == []
    assert free(index)


def test_a_lease_at_the_root_builds_a_branch_that_is_found() -> None:
    index = build(FULL)
    waiting = lease_for(index, TEXT)
    assert waiting.boundary == 0
    keep(index, TEXT)
    quarantine(index, TEXT)
    assert index.reserve(waiting, len(TEXT))
    index.commit(waiting, len(TEXT))
    assert index.validate() == [] and found(index, TEXT) == 6


def test_a_root_that_only_a_lease_keeps_is_still_the_one_that_prompts_name() -> None:
    index = build(FULL)
    waiting = lease_for(index, TEXT)
    keep(index, TEXT)
    quarantine(index, TEXT)
    index.release(waiting)
    assert index.validate() == [] and free(index)


def test_a_lease_that_computes_a_quarantined_page_is_not_given_the_quarantined_one() -> None:
    """It stands above the page, which another lease still reads: the tokens alone are alike."""
    index = build(FULL)
    keep(index, TEXT[: 2 * PAGE])
    above = lease_for(index, TEXT[: 2 * PAGE + 1])
    deep = compute(index, TEXT)
    quarantine(index, TEXT)
    above.prompt.extend(TEXT[2 * PAGE + 1 :])
    assert index.reserve(above, len(TEXT))
    own = index.page_table(above, "kv").tolist()
    index.commit(above, len(TEXT))
    assert index.validate() == []
    assert index.page_table(above, "kv").tolist() == own
    assert not set(own[2:]) & set(index.page_table(deep, "kv").tolist())


# -- copies in flight -----------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["land", "fail"])
@every_memory
def test_a_backup_of_quarantined_pages_ends_and_is_dropped(
    memory: ModelMemory, ending: str
) -> None:
    index = build(memory)
    lease = compute(index, TEXT)
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    index.release(lease)
    quarantine(index, TEXT)
    assert not free(index), "what is being copied stays until the copy has ended"
    getattr(index, ending)(arrival)
    assert index.validate() == [] and free(index)


@pytest.mark.parametrize("ending", ["land", "fail"])
@every_memory
def test_a_load_of_quarantined_pages_is_dropped(memory: ModelMemory, ending: str) -> None:
    index = build(memory)
    keep(index, TEXT)
    back_up(index, TEXT)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, [*TEXT, 0, 0])
    arrival = index.copy(lease, Tier.HOST, Tier.DEVICE)
    assert arrival is not None and arrival.parts
    quarantine(index, TEXT)
    getattr(index, ending)(arrival)
    assert index.validate() == []
    assert index.at_home(lease) == (ending == "land")
    if ending == "land":
        for pool in memory.anchors:
            held = lease.boundary if pool.hot else 0
            assert index.resident_pages(Tier.HOST, pool.name) == held, "the lease reads it there"
    index.release(lease)
    assert index.validate() == [] and free(index)


@pytest.mark.parametrize("ending", ["land", "fail"])
def test_a_demotion_of_quarantined_pages_leaves_nothing_behind(ending: str) -> None:
    index = build(FULL)
    keep(index, TEXT)
    keep(index, [50] * (2 * PAGE))
    arrival = index.demote(Tier.DEVICE, Tier.HOST, "kv", 8)
    assert arrival is not None and arrival.pages == 8
    quarantine(index, TEXT)
    getattr(index, ending)(arrival)
    assert index.validate() == []
    assert found(index, [50] * (2 * PAGE)) == 2 and resident(index) == 2


def test_a_lease_in_a_hidden_tree_can_still_load_what_it_needs() -> None:
    index = build(FULL)
    keep(index, TEXT)
    back_up(index, TEXT)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, [*TEXT, 0])
    quarantine(index, TEXT)
    arrival = index.copy(lease, Tier.HOST, Tier.DEVICE)
    assert arrival is not None and arrival.pages == 6
    index.land(arrival)
    assert index.at_home(lease) and index.resident_pages(Tier.HOST, "kv") == 0
    index.release(lease)
    assert free(index)


@pytest.mark.parametrize("target", [Tier.HOST, Tier.STORAGE])
def test_nothing_hidden_is_copied_down(target: Tier) -> None:
    index = build(FULL)
    lease = compute(index, TEXT)
    quarantine(index, TEXT)
    arrival = index.copy(lease, Tier.DEVICE, target)
    assert arrival is not None and not arrival.parts
    assert index.needs(lease, Tier.DEVICE, target) == {}


def test_nothing_hidden_is_demoted_where_only_copies_are_kept() -> None:
    index = build(TWO_HISTORIES, keeps=(Tier.DEVICE,))
    lease = compute(index, TEXT)
    quarantine(index, TEXT)
    assert index.demote(Tier.DEVICE, Tier.HOST, "kv", 1) is None
    index.release(lease)
    assert free(index), "the only copy of a hidden page is not worth keeping"


# -- events ---------------------------------------------------------------------------------


@every_memory
def test_listeners_hear_once_that_quarantined_pages_are_gone_and_nothing_later(
    memory: ModelMemory,
) -> None:
    index, naive = build(memory, fingerprint=b"model"), NaiveIndex(memory, b"model")
    keep(index, TEXT)
    back_up(index, TEXT)
    lease = lease_for(index, [*TEXT, *[9] * (2 * PAGE)])
    other = index.copy(lease, Tier.HOST, Tier.STORAGE)
    for event in readable(index):
        naive.hear(event)
    heard = []
    index.subscribe(heard.append)
    pages = resident(index)
    assert index.quarantine(index.prompt(TEXT)) == pages
    assert {event.kind for event in heard} == {EventKind.REMOVED}
    heard_of = [(event.cell, key) for event in heard for key in naive.hear(event)]
    assert len(heard_of) == len(set(heard_of)) == pages
    assert {key for _, key in heard_of} <= set(naive.page_keys(TEXT))
    before = len(heard)
    if other is not None:
        index.land(other)
    assert index.reserve(lease, lease.prompt.tokens)
    index.commit(lease, lease.prompt.tokens)
    index.release(lease)
    assert len(heard) == before and free(index)


# -- scratch --------------------------------------------------------------------------------


@every_memory
def test_a_scratch_prompt_finds_nothing_and_is_not_found(memory: ModelMemory) -> None:
    index = build(memory)
    keep(index, TEXT)
    before = found(index, TEXT)
    scratch = index.scratch([*TEXT, 0])
    lease = index.pin(index.match(scratch))
    assert lease.boundary == 0
    assert index.reserve(lease, scratch.tokens)
    index.commit(lease, scratch.tokens)
    assert index.validate() == [] and lease.boundary > 0
    assert index.match(scratch).matched == index.match(index.scratch([*TEXT, 0])).matched == 0
    clear_homes(index)
    assert before > 0 and found(index, TEXT) == 0
    index.release(lease)
    assert index.validate() == [] and free(index)


@every_memory
def test_scratch_leases_share_no_page_with_any_lease(memory: ModelMemory) -> None:
    index = build(memory)
    scratch = index.scratch(TEXT)
    leases = [compute(index, TEXT)]
    for _ in range(2):
        lease = index.pin(index.match(scratch))
        assert index.reserve(lease, len(TEXT))
        index.commit(lease, len(TEXT))
        leases.append(lease)
    for pool in memory.anchors:
        tables = [index.page_table(lease, pool.name).tolist() for lease in leases]
        slots = [slot for table in tables for slot in table if slot >= 0]
        assert len(slots) == len(set(slots))


def test_a_scratch_lease_is_copied_nowhere_and_causes_no_event() -> None:
    index, heard = build(FULL), []
    index.subscribe(heard.append)
    lease = index.pin(index.match(index.scratch(TEXT)))
    assert index.reserve(lease, len(TEXT))
    index.commit(lease, len(TEXT))
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None and not arrival.parts
    index.release(lease)
    assert heard == [] and free(index)


def test_windows_that_a_scratch_lease_left_behind_are_free_at_once() -> None:
    index = build(WINDOW)
    lease = index.pin(index.match(index.scratch(TEXT)))
    for tokens in range(PAGE, len(TEXT) + 1, PAGE):
        assert index.advance(lease, tokens)
        index.commit(lease, tokens)
        assert index.validate() == []
    assert index.resident_pages(Tier.DEVICE, "swa") == 2
    assert index.resident_pages(Tier.DEVICE, "kv") == lease.boundary == 6


def test_a_scratch_prompt_shorter_than_the_holdback_grows_into_pages() -> None:
    index = build(DRAFTED)
    lease = index.pin(index.match(index.scratch([])))
    lease.prompt.extend(TEXT)
    assert index.reserve(lease, len(TEXT))
    index.commit(lease, len(TEXT))
    assert index.validate() == [] and lease.boundary == 5
    index.release(lease)
    assert free(index)
