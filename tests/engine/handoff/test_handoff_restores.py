"""Every family: a prompt prefilled by one engine and decoded by another gives the same answer."""

from __future__ import annotations

import random

import pytest

from kvtide.engine.handoff.handoff_state import HandoffState
from tests.engine.handoff.handing_over import expected, family_pair, tokens_of
from tests.engine.restoring import ALL_NAMES, FORMS, HOT_NAMES, PAGE, text


@pytest.mark.quick(family=[*(family.name for family in FORMS), "deepseek_v32 hot:24"])
@pytest.mark.parametrize("family", [*ALL_NAMES, *HOT_NAMES])
def test_answers_are_those_of_one_engine(family: str) -> None:
    rng, pair = random.Random(3), family_pair(family)
    root = text(rng, 70)
    for length in (5 * PAGE + 3, 6 * PAGE, 6 * PAGE + 1, 7 * PAGE - 1):
        prompt = root + text(rng, length - len(root))
        request = pair.answer(prompt)
        assert tokens_of(request) == expected(family, prompt)
        handoff = request.handoff
        assert handoff is not None and handoff.state is HandoffState.DECODING, handoff
        assert handoff.first == request.output[0]
        pair.settle()
    pair.close()
