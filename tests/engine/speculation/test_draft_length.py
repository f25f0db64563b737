"""How many drafts a request gets, by what was accepted and by what rows cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtide.engine.speculation.draft_length import TRIAL_TOKENS, DraftLength
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.round_prices import StepRows
from tests.engine.speculation.drafting import Asking


def learned(lengths: DraftLength, asking: Any, accepted: int, drafts: int) -> int:
    """The number of drafts after many steps in which so many of them were accepted."""
    lengths.of(asking)
    for _ in range(100):
        lengths.verified(asking, drafts, accepted)
        lengths.decide_for([asking])
    return lengths.of(asking)


def steps_to_next_trial(lengths: DraftLength, running: Sequence[Any]) -> int:
    """Plain steps until all of these get one draft."""
    steps = 0
    while not lengths.of(running[0]):
        assert all(lengths.of(each) == 0 for each in running)
        lengths.ran(StepRows([1] * len(running), 0), running)
        steps += 1
    assert all(lengths.of(each) == 1 for each in running)
    return steps


def try_drafts(lengths: DraftLength, running: Sequence[Any], accepted: int) -> None:
    """A step with a draft of each, of which so many are accepted."""
    for number, each in enumerate(running):
        lengths.verified(each, 1, int(number < accepted))
    lengths.ran(StepRows([2] * len(running), len(running)), running)


def test_drafts_that_are_never_accepted_are_tried_again_after_ever_longer_pauses() -> None:
    lengths, running = DraftLength(3, 0.07), [Asking(1), Asking(2)]
    for each in running:
        learned(lengths, each, 0, 3)
    pauses = []
    for _ in range(6):
        pauses.append(steps_to_next_trial(lengths, running))
        try_drafts(lengths, running, 0)
    assert pauses == [32, 64, 128, 256, 256, 256]


def test_a_trial_that_succeeds_is_repeated_until_drafts_pay() -> None:
    lengths, running = DraftLength(3, 0.07), [Asking(1), Asking(2)]
    for each in running:
        learned(lengths, each, 0, 3)
    steps_to_next_trial(lengths, running)
    tried = 0
    while not lengths.paying(running[0]):
        assert steps_to_next_trial(lengths, running) == 0
        try_drafts(lengths, running, 2)
        tried += 1
    assert 1 < tried < TRIAL_TOKENS
    while lengths.paying(running[0]):
        try_drafts(lengths, running, 0)
    assert steps_to_next_trial(lengths, running) <= TRIAL_TOKENS, "pauses begin anew"


@pytest.mark.parametrize(("many", "pays"), [(3, True), (40, False)])
def test_one_request_whose_drafts_pay_does_not_hold_up_many(many: int, pays: bool) -> None:
    lengths = DraftLength(3, ModelDrafter.cost)
    running = [Asking(number) for number in range(many)]
    for each in running:
        learned(lengths, each, 0, 3)
    assert learned(lengths, running[0], 3, 3) == 3
    lengths.decide_for(running)
    assert [lengths.of(each) for each in running] == [3 * pays] + [0] * (many - 1)


def test_requests_that_want_no_drafts_count_as_such() -> None:
    lengths = DraftLength(3, ModelDrafter.cost)
    running = [Asking(0), *(Asking(number, speculate=False) for number in range(1, 40))]
    lengths.decide_for(running)
    assert lengths.paying(running[0]) == 0
    lengths.decide_for(running[:1])
    assert lengths.paying(running[0]) == 3


def test_in_a_batch_whose_drafts_pay_a_request_without_is_tried_alone() -> None:
    lengths, running = DraftLength(3, 0.07), [Asking(1), Asking(2)]
    learned(lengths, running[1], 0, 3)
    learned(lengths, running[0], 3, 3)
    lengths.decide_for(running)
    assert [lengths.of(each) for each in running] == [3, 0]
    running[1].length += TRIAL_TOKENS
    assert [lengths.of(each) for each in running] == [3, 1]


def test_what_is_always_accepted_is_drafted_as_long_as_it_may_be() -> None:
    assert learned(DraftLength(7, 0.07), Asking(), 7, 7) == 7


def test_the_less_is_accepted_the_less_is_drafted() -> None:
    """Behind the accepted drafts one is compared: chances of 2/3 and 1/2."""
    found = []
    for accepted in (2, 1):
        found.append(learned(DraftLength(7, ModelDrafter.cost), Asking(), accepted, accepted + 1))
    assert 7 > found[0] > found[1] > 0


def test_a_fixed_number_is_drafted_whatever_was_accepted() -> None:
    assert learned(DraftLength(5, 9.9, fixed=True), Asking(), 0, 5) == 5
