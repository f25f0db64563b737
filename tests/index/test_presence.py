"""Optional sidecars: never stale, possibly absent, carried along by every copy."""

from __future__ import annotations

from kvtide.spec import PageMove, Tier
from tests.index.building import build, compute, keep, lease_for
from tests.index.memories import DRAFTED, DRAFTED_TWICE, FULL, PAGE

TEXT = list(range(100, 118))


def _carries(index, text: list[int] = TEXT) -> list[bool]:
    lease = lease_for(index, [*text, 0], slowest=Tier.DEVICE)
    carried = index.carries(lease, "draft").tolist()
    index.release(lease)
    return carried


def _commit(index, lease, pages: int, without: tuple[str, ...]) -> None:
    index.commit(lease, pages * PAGE + DRAFTED.holdback, without)


def test_a_draft_is_present_where_it_was_computed() -> None:
    index = build(DRAFTED)
    lease = lease_for(index, TEXT)
    index.reserve(lease, len(TEXT))
    _commit(index, lease, 2, ())
    _commit(index, lease, 3, ("draft",))
    _commit(index, lease, 4, ())
    index.release(lease)
    assert _carries(index) == [True, True, False, True]


def test_a_reused_slot_does_not_keep_the_draft_of_its_last_page() -> None:
    index = build(DRAFTED, device=5)
    keep(index, TEXT)
    assert _carries(index) == [True] * 4
    other = [t + 50 for t in TEXT]
    lease = lease_for(index, other)
    index.reserve(lease, len(other))
    index.commit(lease, len(other), without=("draft",))
    index.release(lease)
    assert _carries(index, other) == [False] * 4


def test_presence_travels_down_and_up_again() -> None:
    index = build(DRAFTED)
    lease = lease_for(index, TEXT)
    index.reserve(lease, len(TEXT))
    _commit(index, lease, 1, ("draft",))
    _commit(index, lease, 4, ())
    for way in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.STORAGE)):
        index.land(index.copy(lease, *way))
    index.release(lease)
    for tier in (Tier.DEVICE, Tier.HOST):
        index.clear(tier)
    # Other pages, drafted the other way round, move through the same slots meanwhile.
    noise = [t + 50 for t in TEXT]
    keep(index, noise)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, TEXT)
    assert index.slowest(lease) is Tier.STORAGE
    for way in ((Tier.STORAGE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
        index.land(index.copy(lease, *way))
    assert index.at_home(lease)
    assert index.carries(lease, "draft").tolist() == [False, True, True, True]


def _computed_twice(memory, first: tuple[str, ...], second: tuple[str, ...]):
    """Two leases compute the same pages; the moves that the second one's commit asks for."""
    moves: list[PageMove] = []
    index = build(memory, copy_on_device=moves.append)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=first)
    slots = index.page_table(two, "kv").tolist()
    index.commit(two, len(TEXT), without=second)
    return index, (one, two), slots, moves


def _pages(moves, sidecar: str = "draft", anchor: str = "kv") -> tuple[list[int], list[int]]:
    """The source and target slots of moves of this sidecar; there are no other moves."""
    assert all((move.sidecar, move.anchor) == (sidecar, anchor) for move in moves)
    sources = [slot for move in moves for slot in move.source_slots.tolist()]
    return sources, [slot for move in moves for slot in move.target_slots.tolist()]


def test_a_commit_adds_the_draft_that_shared_pages_lack() -> None:
    index, leases, slots, moves = _computed_twice(DRAFTED, ("draft",), ())
    assert all(move.source is move.target is Tier.DEVICE for move in moves)
    sources, targets = _pages(moves)
    assert sources == slots[:4], "from the slots that the second one wrote"
    assert targets == index.page_table(leases[0], "kv").tolist()[:4], "tables stay"
    for lease in leases:
        assert index.carries(lease, "draft").tolist() == [True] * 4
    assert index.validate() == []


def test_a_commit_adds_nothing_that_is_there_or_that_it_lacks() -> None:
    for first, second in (((), ()), ((), ("draft",)), (("draft",), ("draft",))):
        index, leases, _, moves = _computed_twice(DRAFTED, first, second)
        assert not moves
        assert index.carries(leases[1], "draft").tolist() == ["draft" not in first] * 4


def test_sidecars_of_one_page_are_added_each_for_itself() -> None:
    index, (_, two), _, moves = _computed_twice(DRAFTED_TWICE, ("draft_kv",), ("draft_swa",))
    assert len(_pages(moves, "draft_kv")[0]) == 4
    assert index.carries(two, "draft_kv").all() and index.carries(two, "draft_swa")[-1]


def test_a_backup_gives_the_host_the_draft_that_its_copy_lacks() -> None:
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    index.land(index.copy(one, Tier.DEVICE, Tier.HOST))
    index.commit(two, len(TEXT))
    free = index.free_pages(Tier.HOST, "kv")
    arrival = index.copy(two, Tier.DEVICE, Tier.HOST)
    assert len(_pages(arrival.moves)[1]) == 4 and not arrival.parts
    assert index.free_pages(Tier.HOST, "kv") == free, "it goes to the slots that the host has"
    again = index.copy(two, Tier.DEVICE, Tier.HOST)
    assert not again.moves, "once is enough"
    for lease in (one, two):
        index.release(lease)
    assert index.evict(Tier.HOST, "kv", 9) == index.evict(Tier.DEVICE, "kv", 9) == 0, "pinned"
    departure = index.land_departing(arrival)
    keys = [page.key for page in index.page_keys(index.prompt(TEXT))][:4]
    assert [page.key for page in departure.pages] == keys
    assert all(page.absent == () for page in departure.pages)
    index.land(again)
    index.departed(departure)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, TEXT)
    index.land(index.copy(lease, Tier.HOST, Tier.DEVICE))
    assert index.carries(lease, "draft").tolist() == [True] * 4


def test_a_backup_that_fails_is_tried_again() -> None:
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    index.land(index.copy(one, Tier.DEVICE, Tier.HOST))
    index.commit(two, len(TEXT))
    index.fail(index.copy(two, Tier.DEVICE, Tier.HOST))
    assert index.validate() == []
    assert len(_pages(index.copy(two, Tier.DEVICE, Tier.HOST).moves)[1]) == 4


def test_a_draft_that_comes_while_its_page_is_backed_up_follows_with_the_next_backup() -> None:
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    arrival = index.copy(one, Tier.DEVICE, Tier.HOST)
    index.commit(two, len(TEXT))
    assert not index.copy(two, Tier.DEVICE, Tier.HOST).moves
    index.land(arrival)
    assert index.validate() == []
    assert len(_pages(index.copy(two, Tier.DEVICE, Tier.HOST).moves)[1]) == 4


def test_a_demoted_page_gives_its_draft_to_the_copy_below() -> None:
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    index.land(index.copy(one, Tier.DEVICE, Tier.HOST))
    index.commit(two, len(TEXT))
    for lease in (one, two):
        index.release(lease)
    for left in (2, 0):
        arrival = index.demote(Tier.DEVICE, Tier.HOST, "kv", 4)
        assert len(_pages(arrival.moves)[1]) == arrival.pages == 2
        assert index.resident_pages(Tier.DEVICE, "kv") == left + 2, "until that has landed"
        index.land(arrival)
        assert index.resident_pages(Tier.DEVICE, "kv") == left
    lease = lease_for(index, TEXT)
    index.land(index.copy(lease, Tier.HOST, Tier.DEVICE))
    assert index.carries(lease, "draft").tolist() == [True] * 4


def test_a_demotion_takes_along_the_drafts_of_its_own_anchor_alone() -> None:
    index = build(DRAFTED_TWICE)
    absent = ("draft_kv", "draft_swa")
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=absent)
    index.land(index.copy(one, Tier.DEVICE, Tier.HOST))
    index.commit(two, len(TEXT))
    for lease in (one, two):
        index.release(lease)
    arrival = index.demote(Tier.DEVICE, Tier.HOST, "kv", 4)
    _pages(arrival.moves, "draft_kv")
    index.land(arrival)
    assert index.validate() == [] and index.resident_pages(Tier.DEVICE, "swa") == 2
    arrival = index.demote(Tier.DEVICE, Tier.HOST, "swa", 4)
    assert len(_pages(arrival.moves, "draft_swa", "swa")[1]) == 2


def test_pages_that_are_not_on_the_device_carry_nothing_there() -> None:
    index = build(DRAFTED)
    lease = compute(index, TEXT)
    index.land(index.copy(lease, Tier.DEVICE, Tier.HOST))
    index.release(lease)
    index.clear(Tier.DEVICE)
    lease = lease_for(index, TEXT)
    assert lease.boundary == 4 and index.carries(lease, "draft").tolist() == [False] * 4


def test_memories_without_optional_sidecars_keep_no_bits() -> None:
    assert not build(FULL).tree.presence.needed and build(DRAFTED).tree.presence.needed
