"""Learned checkpoints: where prompts parted before, within a budget, and nowhere in vain."""

from __future__ import annotations

import random

import pytest

from kvtide.index import Branches, CostBased, Index
from kvtide.index.placement import learned_placement
from kvtide.index.placement.learned_placement import ALIGNMENTS, ZONES, kind, kinds, listed_kinds
from kvtide.spec import Tier
from tests.index.memories import PAGE, RECURRENT


def test_before_anything_is_learned_the_end_of_a_request_is_kept() -> None:
    assert 40 in CostBased().checkpoints(0, 40, ())


def test_before_anything_is_learned_the_budget_is_spent_all_the_same() -> None:
    placement = CostBased()
    spent = [len(place(placement, 0, 200)) for _ in range(40)]
    assert 1.5 < sum(spent) / len(spent) < 3.0


def test_known_branches_are_always_taken() -> None:
    assert set(CostBased().checkpoints(10, 40, (20, 30, 5))) >= {20, 30}


def place(placement: CostBased, start: int, end: int) -> list[int]:
    """What a request does: choose, and tell what came of it."""
    chosen = list(placement.checkpoints(start, end, ()))
    placement.note_placed(start, end, len(chosen))
    return chosen


def test_conversations_that_go_on_from_their_end_keep_one_checkpoint_there() -> None:
    placement = CostBased()
    for _ in range(500):
        chosen = place(placement, 20, 97)
        placement.note_branch(97, 97)
    assert chosen == [97]


def test_prompts_that_part_at_aligned_places_teach_where_to_keep_checkpoints() -> None:
    """Ends are anywhere, partings at the last multiple of 8 before them: that is kept, not ends."""
    placement, draw = CostBased(per_request=1.0), random.Random(1)
    hits = 0
    for number in range(3000):
        end = draw.randrange(40, 400)
        chosen = place(placement, 0, end)
        placement.note_branch(end // 8 * 8, end)
        hits += number >= 1000 and end // 8 * 8 in chosen
    assert hits / 2000 > 0.9


@pytest.mark.parametrize("budget", [1.0, 2.0, 4.0])
def test_spending_stays_within_the_budget(budget: float) -> None:
    placement, draw = CostBased(budget), random.Random(2)
    spent = []
    for _ in range(6000):
        end = draw.randrange(50, 600)
        spent.append(len(place(placement, 0, end)))
        placement.note_branch(draw.randrange(1, end), end)
    assert sum(spent[2000:]) / 4000 < 1.1 * budget


def test_checkpoints_that_hardly_help_are_not_bought_whatever_the_budget() -> None:
    placement = CostBased(per_request=50.0)
    for _ in range(3000):
        chosen = place(placement, 0, 64)
        placement.note_branch(64, 64)
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


def test_kinds_of_many_boundaries_are_those_of_each() -> None:
    for start, end in ((0, 1), (0, 40), (3, 500), (499, 500), (100, 1025)):
        of_each = [kind(b, end) for b in range(start + 1, end + 1)]
        assert kinds(start, end).tolist() == listed_kinds(start, end) == of_each


def test_lists_and_arrays_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two counts and adds up depends on the length alone: ranks must not differ."""

    def choices(short: int) -> list[object]:
        monkeypatch.setattr(learned_placement, "SHORT", short)
        placement, draw = CostBased(), random.Random(4)
        chosen: list[object] = []
        for _ in range(400):
            start = draw.randrange(0, 400)
            end = start + draw.randrange(1, 200)
            branches = [draw.randrange(start + 1, end + 1)] if draw.random() < 0.3 else []
            found = list(placement.checkpoints(start, end, branches))
            placement.note_placed(start, end, len(found))
            placement.note_branch(draw.randrange(1, end + 1), end)
            chosen += [found, placement._price]
        return [*chosen, placement._rates.tolist()]

    some = learned_placement.SHORT // 2
    assert choices(0) == choices(some) == choices(1000)


def test_kinds_say_how_far_the_nearer_end_is_and_how_aligned_a_boundary_is() -> None:
    def zone(boundary: int, end: int) -> int:
        return kind(boundary, end) // ALIGNMENTS

    assert [zone(b, 1000) for b in (1000, 999, 997, 993)] == [0, 1, 2, 3]
    assert [zone(b, 1000) for b in (1, 2, 5, 9)] == [ZONES + 1, ZONES + 2, ZONES + 3, ZONES + 4]
    assert [kind(b, 1000) % ALIGNMENTS for b in (1, 2, 12, 128, 512)] == [0, 1, 2, 7, 7]


def test_only_the_first_prompt_to_part_somewhere_teaches_anything() -> None:
    """Those that follow find the checkpoint that it left."""
    placement = CostBased()
    index = Index(RECURRENT, {Tier.DEVICE: {"kv": 900, "state": 900}}, placement=placement)
    shared = list(range(1, 10 * PAGE + 1))
    for user in range(8):
        lease = index.pin(index.match(index.prompt([*shared, *[100 + user] * 20 * PAGE])))
        assert index.reserve(lease, 30 * PAGE)
        index.commit(lease, 30 * PAGE)
        index.release(lease)
    assert placement._branched.sum() == 1.0


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
