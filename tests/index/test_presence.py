"""Optional sidecars: never stale, possibly absent, carried along by every copy."""

from __future__ import annotations

from kvtide.spec import Tier
from tests.index.building import build, compute, keep, lease_for
from tests.index.memories import DRAFTED, FULL, PAGE

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
    assert index.on_device(lease)
    assert index.carries(lease, "draft").tolist() == [False, True, True, True]


def test_pages_computed_twice_keep_what_the_first_had() -> None:
    """The second copy's slots go back, so what it carried does not count."""
    index = build(DRAFTED)
    one, two = lease_for(index, TEXT), lease_for(index, TEXT)
    for lease in (one, two):
        index.reserve(lease, len(TEXT))
    index.commit(one, len(TEXT), without=("draft",))
    index.commit(two, len(TEXT))
    assert index.carries(two, "draft").tolist() == [False] * 4


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
