"""The tree in outline: what is counted where, and that no call visits more than it may."""

from __future__ import annotations

import random

from kvtide.index import Index
from kvtide.index.tree.tree_survey import MAX_LEVELS, NARROWEST, TreeBranch, TreeSurvey
from kvtide.spec import Tier
from tests.index.building import build, compute, keep
from tests.index.memories import FULL, PAGE, WINDOW

STEM = list(range(1, 4 * PAGE + 1))


def _complete(survey: TreeSurvey, nodes: int = 10_000) -> TreeBranch:
    while not survey.advance(nodes):
        pass
    assert survey.found is not None
    return survey.found


def _kept(*prompts: list[int], memory=FULL, **options: int) -> Index:
    index = build(memory, **options)
    for prompt in prompts:
        keep(index, prompt)
    return index


def _below(branch: TreeBranch) -> list[TreeBranch]:
    return [one for _, one in branch.widest(10_000)]


def test_a_branch_counts_its_own_tokens_and_all_below_it() -> None:
    left, right = STEM + [91] * 2 * PAGE, STEM + [92] * 3 * PAGE
    top = _complete(_kept([*left, 0], [*right, 0]).survey())
    (stem,) = top.children
    assert (stem.start, stem.tokens, stem.width) == (0, 4 * PAGE, 9 * PAGE)
    assert sorted((one.start, one.width) for one in stem.children) == [
        (4 * PAGE, 2 * PAGE),
        (4 * PAGE, 3 * PAGE),
    ]
    assert top.width == 9 * PAGE


def test_it_says_where_the_pages_are() -> None:
    index = _kept([*STEM, 0])
    (branch,) = _complete(index.survey()).children
    assert branch.tiers == (Tier.DEVICE,)
    lease = index.pin(index.match(index.prompt([*STEM, 0])))
    arrival = index.copy(lease, Tier.DEVICE, Tier.HOST)
    assert arrival is not None
    (branch,) = _complete(index.survey()).children
    assert branch.arriving
    index.land(arrival)
    index.release(lease)
    (branch,) = _complete(index.survey()).children
    assert (branch.tiers, branch.arriving) == ((Tier.DEVICE, Tier.HOST), False)
    index.clear(Tier.DEVICE)
    (branch,) = _complete(index.survey()).children
    assert branch.tiers == (Tier.HOST,)


def test_hits_and_the_last_use_are_those_of_the_node() -> None:
    index = _kept([*STEM, 0])
    before = _complete(index.survey()).children[0]
    compute(index, [*STEM, 0])
    after = _complete(index.survey()).children[0]
    assert after.hits == before.hits + 1
    assert before.last < after.last <= index.tick


def test_a_call_visits_no_more_nodes_than_it_may() -> None:
    prompts = [[n] * 2 * PAGE + [0] for n in range(1, 13)]
    index = _kept(*prompts, device=64)
    survey = index.survey()
    calls = 1
    while not survey.advance(3):
        assert survey.visited <= 3 * calls
        calls += 1
    assert calls == 5  # Twelve nodes, and a last call that finds no other.
    assert (survey.nodes, len(survey.found.children)) == (12, 12)


def test_what_changes_between_two_calls_does_no_harm() -> None:
    dice = random.Random(7)
    index = _kept(device=48, host=0, storage=0)
    survey = index.survey()
    for _ in range(400):
        length = dice.randrange(1, 6)
        prompt = dice.choices((1, 2), k=length)
        keep(index, [token for token in prompt for _ in range(PAGE)] + [0])
        if dice.random() < 0.2:
            index.evict(Tier.DEVICE, "kv", dice.randrange(1, 20))
        survey.advance(dice.randrange(1, 4))
        for one in _below(survey.found) if survey.found else ():
            assert one.width >= one.tokens + sum(child.width for child in one.children)
    index.clear(Tier.DEVICE)
    _complete(survey)
    assert _complete(survey).width == 0
    assert index.validate() == []


def test_hidden_branches_are_left_out() -> None:
    index = _kept([*STEM, 0])
    lease = compute(index, [*STEM, 0])
    index.quarantine(index.prompt([*STEM, 0]))
    assert _complete(index.survey()).width == 0
    index.release(lease)


def test_narrow_branches_are_counted_in_the_one_above() -> None:
    wide = [1] * (2 * NARROWEST * PAGE)
    index = build(FULL, device=2 * NARROWEST + 8)
    keep(index, [*wide, 0])
    keep(index, [2] * PAGE + [0])
    top = _complete(index.survey())
    assert [one.start + one.tokens for one in _below(top)][-1] == len(wide)
    assert (top.width, sum(one.width for one in top.children)) == (len(wide) + PAGE, len(wide))


def test_deep_branches_are_counted_in_the_last_level() -> None:
    index = build(WINDOW, device=400)
    tokens: list[int] = []
    for turn in range(MAX_LEVELS + 10):
        keep(index, [*tokens, 200 + turn] + [1] * PAGE)  # A fork, so that nodes do not join.
        tokens += [turn + 1] * PAGE
    keep(index, [*tokens, 0])
    top = _complete(index.survey())
    levels, here = 0, top
    while here.children:
        here = max(here.children, key=lambda one: one.width)
        levels += 1
    assert levels == MAX_LEVELS
    assert here.width > here.tokens
    counted = sum(node.pages for node in index.tree.walk()) * PAGE
    assert top.width == counted


def test_names_are_counted_up_to_the_top() -> None:
    index = _kept([*STEM, *[91] * PAGE, 0], [*STEM, *[92] * PAGE, 0])
    leaves = {id(n): ("a", "b") for n in index.tree.walk() if not n.children}
    top = _complete(index.survey(lambda: leaves))
    (stem,) = top.children
    assert (stem.standing, len(stem.names)) == (4, 3)
    assert [(one.standing, one.names) for one in stem.children] == [(2, ("a", "b"))] * 2


def test_the_widest_branches_stand_behind_their_parents() -> None:
    index = _kept(*[[*STEM, *[n] * n * PAGE, 0] for n in range(1, 5)])
    found = _complete(index.survey()).widest(4)
    assert [(parent, one.width // PAGE) for parent, one in found] == [
        (-1, 14),
        (0, 4),
        (0, 3),
        (0, 2),
    ]
