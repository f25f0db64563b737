"""Learned checkpoints: where prompts parted before, within a budget, and nowhere in vain."""

from __future__ import annotations

import random

import pytest

from kvtide.index import Branches, CostBased, Index
from kvtide.index.costs import ALIGNMENTS, _alignment, _bucket, _count, _deepest
from kvtide.spec import Tier
from tests.index.memories import PAGE, RECURRENT


def test_before_anything_is_learned_the_end_of_a_request_is_kept() -> None:
    assert list(CostBased().checkpoints(0, 40, ())) == [40]


def test_known_branches_are_always_taken() -> None:
    assert set(CostBased().checkpoints(10, 40, (20, 30, 5))) >= {20, 30}


def place(placement: CostBased, start: int, end: int) -> list[int]:
    """What a request does: choose, and tell what came of it."""
    chosen = list(placement.checkpoints(start, end, ()))
    placement.placed(start, end, len(chosen))
    return chosen


def test_conversations_that_go_on_from_their_end_keep_one_checkpoint_there() -> None:
    placement = CostBased()
    for _ in range(500):
        chosen = place(placement, 20, 97)
        placement.parted(97, 97)
    assert chosen == [97]


def test_prompts_that_part_at_aligned_places_teach_where_to_keep_checkpoints() -> None:
    """Ends are anywhere, partings at the last multiple of 8 before them: that is kept, not ends."""
    placement, draw = CostBased(per_request=1.0), random.Random(1)
    hits = 0
    for number in range(3000):
        end = draw.randrange(40, 400)
        chosen = place(placement, 0, end)
        placement.parted(end // 8 * 8, end)
        hits += number >= 1000 and end // 8 * 8 in chosen
    assert hits / 2000 > 0.9


@pytest.mark.parametrize("budget", [1.0, 2.0, 4.0])
def test_spending_stays_within_the_budget(budget: float) -> None:
    placement, draw = CostBased(budget), random.Random(2)
    spent = []
    for _ in range(6000):
        end = draw.randrange(50, 600)
        spent.append(len(place(placement, 0, end)))
        placement.parted(draw.randrange(1, end), end)
    assert sum(spent[2000:]) / 4000 < 1.1 * budget


def test_checkpoints_that_hardly_help_are_not_bought_whatever_the_budget() -> None:
    placement = CostBased(per_request=50.0)
    for _ in range(3000):
        chosen = place(placement, 0, 64)
        placement.parted(64, 64)
    assert chosen == [64]


def test_a_reservation_that_finds_no_room_teaches_nothing() -> None:
    placement = CostBased()
    index = Index(RECURRENT, {Tier.DEVICE: {"kv": 4, "state": 4}}, placement=placement)
    lease = index.pin(index.match(index.prompt([1] * 100)))
    before = (placement._price, placement._requests)
    for _ in range(20):
        assert not index.reserve(lease, 100)
    assert (placement._price, placement._requests) == before
    assert lease.planned == 0


def test_boundaries_are_counted_by_alignment_as_by_hand() -> None:
    for upto in (0, 1, 7, 64, 129, 1000):
        for alignment in range(ALIGNMENTS):
            alike = [b for b in range(1, upto + 1) if _alignment(b) == alignment]
            assert _count(upto, alignment) == len(alike)
            assert max(_deepest(upto, alignment), 0) == max(alike, default=0)


def test_distances_part_the_boundaries_without_gap_or_overlap() -> None:
    spans = [_bucket(distance, 3, 500) for distance in range(16)]
    covered = [b for nearest, past in spans for b in range(past + 1, nearest + 1)]
    assert sorted(covered) == list(range(4, 501))


def test_learned_placement_finds_more_than_branches_when_ends_are_not_shared() -> None:
    """Turns repeat their prompt only up to a multiple of 8 pages, as recorded traces do."""

    def found(placement: Branches | CostBased) -> int:
        index = Index(
            RECURRENT, {Tier.DEVICE: {"kv": 200_000, "state": 20_000}}, placement=placement
        )
        draw, total = random.Random(3), 0
        for user in range(40):
            history: list[int] = [user]
            for _ in range(8):
                prompt = history + [draw.randrange(9) for _ in range(draw.randrange(40, 200))]
                hit = index.match(index.prompt(prompt))
                lease = index.pin(hit)
                total += hit.boundary
                assert index.reserve(lease, len(prompt))
                index.commit(lease, len(prompt))
                index.release(lease)
                history = prompt[: len(prompt) // (8 * PAGE) * 8 * PAGE]
        return total

    assert found(CostBased()) > 1.15 * found(Branches())
