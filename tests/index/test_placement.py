"""Where windows and states are kept: the plan against its definition, and branch hints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtide.index import Branches, EveryPages, Index, IndexLease, LastPage
from kvtide.index.placement.placement import plan
from kvtide.spec import ModelMemory, Tier
from tests.index.building import build, found, keep, lease_for
from tests.index.memories import PAGE, RECURRENT, WINDOW

reaches_of = st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=400)
@given(
    start=st.integers(0, 8),
    full=st.integers(0, 20),
    opened=st.integers(0, 2),
    checkpoints=st.lists(st.integers(0, 32), max_size=6),
    reaches=reaches_of,
)
def test_a_page_is_kept_where_some_checkpoint_reaches_back_to_it(
    start, full, opened, checkpoints, reaches
) -> None:
    end = start + full
    segments = plan(start, end, end + opened, checkpoints, reaches)
    planned = {page: set(a) for first, last, a in segments for page in range(first, last)}
    assert list(planned) == list(range(start, end + opened)), "in order, without gaps or overlaps"
    stops = [stop for stop in checkpoints if start < stop <= end]
    for page, anchors in planned.items():
        assert anchors == {
            number
            for number, reach in enumerate(reaches)
            if page >= end or reach is None or any(s - reach <= page < s for s in stops)
        }


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 9), st.integers(1, 20), st.lists(st.integers(1, 30)), reaches_of)
def test_segments_are_as_long_as_they_can_be(start, full, checkpoints, reaches) -> None:
    segments = plan(start, start + full, start + full, checkpoints, reaches)
    for (_, end, anchors), (first, _, others) in pairwise(segments):
        assert end == first and anchors != others
    assert all(first < last for first, last, _ in segments)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (LastPage(), {10}),
        (Branches(), {5, 7, 10}),
        (EveryPages(4), {4, 5, 7, 8, 10}),
        (EveryPages(5), {5, 7, 10}),
    ],
)
def test_placements_name_their_boundaries(placement, expected: set[int]) -> None:
    assert {s for s in placement.checkpoints(3, 10, (5, 7)) if 3 < s <= 10} == expected


@pytest.mark.parametrize("memory", [RECURRENT, WINDOW], ids=lambda memory: memory.model)
def test_the_second_prompt_leaves_a_checkpoint_where_it_parts(memory) -> None:
    index = build(memory)
    common = [1] * (5 * PAGE)
    keep(index, common + [2] * (5 * PAGE))
    second = lease_for(index, common + [3] * (5 * PAGE))
    assert (second.boundary, second.branches) == (0, (5,))
    index.reserve(second, 10 * PAGE)
    index.commit(second, 10 * PAGE)
    index.release(second)
    third = lease_for(index, common + [4] * (5 * PAGE))
    assert (third.boundary, third.branches) == (5, ())
    assert found(index, common + [3] * (5 * PAGE)) == 10


def test_without_branch_hints_the_third_prompt_starts_over() -> None:
    index = build(RECURRENT, placement=LastPage())
    common = [1] * (5 * PAGE)
    for tail in (2, 3):
        keep(index, common + [tail] * (5 * PAGE))
    assert found(index, common + [4] * (5 * PAGE)) == 0
    assert index.resident_pages(Tier.DEVICE, "state") == 2


def test_hints_name_earlier_partings_too() -> None:
    index = build(RECURRENT, placement=LastPage())
    base = [1] * (3 * PAGE)
    keep(index, base + [2] * (4 * PAGE))
    keep(index, base + [3] * (4 * PAGE))
    lease = lease_for(index, base + [2] * (2 * PAGE) + [5] * PAGE)
    assert (lease.boundary, lease.branches) == (0, (3, 5))


def test_checkpoints_given_to_reserve_override_the_placement() -> None:
    index = build(RECURRENT)
    lease = lease_for(index, [1] * (6 * PAGE))
    index.reserve_with(lease, 6 * PAGE, [2])
    index.commit(lease, 6 * PAGE)
    index.release(lease)
    assert [found(index, [1] * (n * PAGE)) for n in range(7)] == [0, 0, 2, 2, 2, 2, 2]


class Recorded(LastPage):
    """Keeps the end of what it is asked about, and remembers each time that it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        self.asked.append((start, end))
        return (end,)


def in_steps(index: Index, lease: IndexLease, tokens: int) -> None:
    """Two pages a step, as an engine computes a prompt."""
    for upto in (*range(2 * PAGE, tokens, 2 * PAGE), tokens):
        assert index.advance(lease, upto)
        index.commit(lease, upto)
        assert index.validate() == []


def test_placement_is_asked_once_about_the_whole_prompt_however_it_is_computed() -> None:
    placement = Recorded()
    index = Index(RECURRENT, {Tier.DEVICE: {"kv": 40, "state": 40}}, placement=placement)
    lease = index.pin(index.match(index.prompt(range(9 * PAGE))))
    in_steps(index, lease, 9 * PAGE)
    assert placement.asked == [(0, 9)]


@pytest.mark.parametrize("memory", [RECURRENT, WINDOW], ids=lambda memory: memory.model)
def test_steps_leave_only_the_checkpoints_that_were_wanted(memory: ModelMemory) -> None:
    """A prompt computed in steps leaves what it leaves when it is computed at once."""

    def left(running: bool) -> dict[str, int]:
        pages = {anchor.name: 40 for anchor in memory.anchors}
        index = Index(memory, {Tier.DEVICE: pages}, placement=EveryPages(5))
        lease = index.pin(index.match(index.prompt(range(13 * PAGE + 1))))
        if running:
            in_steps(index, lease, 13 * PAGE + 1)
        else:
            assert index.reserve(lease, 13 * PAGE + 1)
            index.commit(lease, 13 * PAGE + 1)
        index.release(lease)
        assert index.validate() == []
        return {name: index.resident_pages(Tier.DEVICE, name) for name in pages}

    assert left(running=True) == left(running=False)


def test_retained_lease_can_be_resumed_where_it_stood() -> None:
    pages = {Tier.DEVICE: {"kv": 40, "state": 40}}
    for retained, boundary in ((True, 4), (False, 0)):
        index = Index(RECURRENT, pages, placement=LastPage())
        prompt = index.prompt(range(9 * PAGE))
        lease = index.pin(index.match(prompt))
        in_steps(index, lease, 4 * PAGE)
        if retained:
            index.retain(lease)
        index.release(lease)
        assert index.match(prompt).boundary == boundary


@pytest.mark.parametrize("memory", [RECURRENT, WINDOW], ids=lambda memory: memory.model)
def test_a_prompt_computed_in_less_than_a_page_a_step_leaves_what_was_wanted(
    memory: ModelMemory,
) -> None:
    placement = Recorded()
    pages = {anchor.name: 40 for anchor in memory.anchors}
    index = Index(memory, {Tier.DEVICE: pages}, placement=placement)
    prompt = index.prompt(range(5 * PAGE + 1))
    lease = index.pin(index.match(prompt))
    for upto in (*range(3, 5 * PAGE, 3), 5 * PAGE + 1):
        assert index.advance(lease, upto)
        index.commit(lease, upto)
        assert index.validate() == []
    index.release(lease)
    assert placement.asked == [(0, 5)]
    assert index.match(prompt).boundary == 5
