"""How many drafts a request gets, by what was accepted and by what rows cost."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.engine.speculation.draft_length import TRIAL_TOKENS, DraftLength, verify_cost
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.engine.speculation.round_prices import StepRows


class Asking:
    """Stands for a request: it has a length."""

    def __init__(self) -> None:
        self.length = 10


def learned(lengths: DraftLength, asking: Any, accepted: int, drafts: int) -> int:
    """The number of drafts after many steps in which so many of them were accepted."""
    lengths.of(asking)
    for _ in range(100):
        lengths.verified(asking, drafts, accepted)
    return lengths.of(asking)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_that_are_never_accepted_are_tried_again_after_a_while(device: str) -> None:
    lengths, asking = DraftLength(3, 0.07, device), Asking()
    assert learned(lengths, asking, 0, 3) == 0
    asking.length += TRIAL_TOKENS - 1
    assert lengths.of(asking) == 0
    asking.length += 1
    assert lengths.of(asking) == 1


def test_what_is_always_accepted_is_drafted_as_long_as_a_gpu_gains() -> None:
    assert learned(DraftLength(7, 0.07, "cuda"), Asking(), 7, 7) == 7


def test_a_cpu_verifies_three_rows_for_little_more_than_one() -> None:
    costs = [verify_cost("cpu", 1, drafts) for drafts in range(4)]
    assert costs[0] == 1 and costs[2] < 1.15 and costs[3] > 1.5
    lengths, asking = DraftLength(3, ModelDrafter.cost, "cpu"), Asking()
    assert learned(lengths, asking, 1, 2) == 2  # Half of what is compared is accepted.


def test_a_batch_on_a_cpu_has_its_few_rows_already() -> None:
    lengths, asking = DraftLength(3, ModelDrafter.cost, "cpu"), Asking()
    learned(lengths, asking, 1, 2)
    lengths.ran(StepRows((1, 1), 0), 2)
    assert lengths.of(asking) == 0
    assert learned(lengths, asking, 3, 3) == 3  # Unless all are accepted.
    lengths, asking = DraftLength(3, ModelDrafter.cost, "cpu"), Asking()
    drafts = learned(lengths, asking, 1, 2)
    for batch, wanted in ((2, 0), (1, drafts)):  # As requests resume, before a step of them.
        lengths.decide_for(batch)
        assert lengths.of(asking) == wanted


def test_a_fixed_number_is_drafted_whatever_was_accepted() -> None:
    assert learned(DraftLength(5, 9.9, "cpu", fixed=True), Asking(), 0, 5) == 5
