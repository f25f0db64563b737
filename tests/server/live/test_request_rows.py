"""How a request stands, in a word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engine.request import Activity
from kvtide.server.live.request_rows import MAX_ROWS, STATES, request_rows, request_state
from kvtide.spec import Tier


def request(activity: Activity = Activity.DECODE, **fields: Any) -> Any:
    """A request that does this, but for these fields."""
    params = SimpleNamespace(tokens=(1,) * 10, max_tokens=5, priority=0, session=None, alone=False)
    usual = {
        "number": 1,
        "params": params,
        "computed": 10,
        "admissions": 1,
        "output": [],
        "tokens": [1] * 10,
        "by_tier": {Tier.HOST: 4},
    }
    return SimpleNamespace(activity=activity, **{**usual, **fields})


@pytest.mark.parametrize("activity", Activity)
def test_a_request_has_the_state_of_what_it_does(activity: Activity) -> None:
    assert request_state(request(activity, admissions=0)) == activity.value
    assert activity.value in STATES


def test_one_that_waits_for_slots_and_had_some_is_retracted() -> None:
    assert request_state(request(Activity.QUEUED, admissions=2)) == "retracted"
    assert request_state(request(Activity.FETCHING, admissions=2)) == "fetching"


def test_all_are_counted_and_the_first_are_listed() -> None:
    present = [request(number=n) for n in range(MAX_ROWS)] + [
        request(Activity.QUEUED, admissions=0)
    ] * 1000
    found = request_rows(present, tokens=False)
    assert found["states"] == {"decode": MAX_ROWS, "queued": 1000}
    assert (found["total"], len(found["rows"])) == (MAX_ROWS + 1000, MAX_ROWS)
    assert found["rows"][3]["number"] == 3
    assert found["rows"][3]["cached"] == {"device": 0, "host": 4, "storage": 0}
    assert "tokens" not in found["rows"][3]
    assert request_rows(present, tokens=True)["rows"][3]["tokens"] == [1] * 10
