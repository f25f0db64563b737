"""How a request stands, in a word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engine import RequestState
from kvtide.server.live.request_rows import MAX_ROWS, STATES, request_rows, request_state
from kvtide.spec import Tier


def request(**fields: Any) -> Any:
    """A request that decodes, but for these fields."""
    params = SimpleNamespace(tokens=(1,) * 10, max_tokens=5, priority=0, session=None, alone=False)
    lease = SimpleNamespace(loading=fields.pop("loading", False))
    usual = {
        "number": 1,
        "state": RequestState.RUNNING,
        "params": params,
        "held": lease,
        "computed": 10,
        "settled": True,
        "ready": True,
        "handoff": None,
        "admissions": 1,
        "output": [],
        "tokens": [1] * 10,
        "by_tier": {Tier.HOST: 4},
    }
    return SimpleNamespace(**{**usual, **fields})


WAITING = {"state": RequestState.WAITING, "admissions": 0}


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "decode"),
        ({"computed": 9}, "prefill"),
        ({"loading": True, "computed": 4}, "loading"),
        (WAITING, "queued"),
        ({**WAITING, "admissions": 2}, "retracted"),
        ({**WAITING, "settled": False, "ready": False}, "fetching"),
        ({**WAITING, "ready": False}, "behind a prefix"),
        ({**WAITING, "ready": False, "handoff": SimpleNamespace(waits=True)}, "handoff"),
    ],
)
def test_a_request_has_one_state(fields: dict[str, Any], state: str) -> None:
    assert request_state(request(**fields)) == state
    assert state in STATES


def test_all_are_counted_and_the_first_are_listed() -> None:
    present = [request(number=n) for n in range(MAX_ROWS)] + [request(**WAITING)] * 1000
    found = request_rows(present, tokens=False)
    assert found["states"] == {"decode": MAX_ROWS, "queued": 1000}
    assert (found["total"], len(found["rows"])) == (MAX_ROWS + 1000, MAX_ROWS)
    assert found["rows"][3]["number"] == 3
    assert found["rows"][3]["cached"] == {"device": 0, "host": 4, "storage": 0}
    assert "tokens" not in found["rows"][3]
    assert request_rows(present, tokens=True)["rows"][3]["tokens"] == [1] * 10
