"""How many drafts a request gets, by what was accepted and by what rows cost."""

from __future__ import annotations

from typing import Any

from kvtide.engine.speculation.draft_length import TRIAL_TOKENS, DraftLength
from kvtide.engine.speculation.model_drafter import ModelDrafter


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


def test_drafts_that_are_never_accepted_are_tried_again_after_a_while() -> None:
    lengths, asking = DraftLength(3, 0.07), Asking()
    assert learned(lengths, asking, 0, 3) == 0
    asking.length += TRIAL_TOKENS - 1
    assert lengths.of(asking) == 0
    asking.length += 1
    assert lengths.of(asking) == 1


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
