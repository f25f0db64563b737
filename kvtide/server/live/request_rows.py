"""Requests as viewers see them: how each stands, and why it found no longer prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtide.engine import Request
from kvtide.engine.request import Activity
from kvtide.spec import Tier

MAX_ROWS = 48
MAX_MISSES = 16
SHOWN_TOKENS = 24

RETRACTED = "retracted"
STATES = (*(activity.value for activity in reversed(Activity)), RETRACTED)
"""Of running requests, then of waiting ones."""


def request_state(request: Request) -> str:
    """What it does or waits for; `retracted`: it waits for slots and had some before."""
    activity = request.activity
    if activity is Activity.QUEUED and request.admissions:
        return RETRACTED
    return activity.value


def request_rows(present: Sequence[Request], *, tokens: bool) -> dict[str, Any]:
    """All requests by state, and the first ones with their numbers.

    `tokens` adds the last tokens of each, which may become text.
    """
    states = [request_state(request) for request in present]
    counted = Counter(states)
    return {
        "states": {state: counted[state] for state in STATES if counted[state]},
        "total": len(present),
        "rows": [
            _row(request, state, tokens=tokens)
            for request, state in zip(present[:MAX_ROWS], states, strict=False)
        ],
    }


def _row(request: Request, state: str, *, tokens: bool) -> dict[str, Any]:
    params = request.params
    row = {
        "number": request.number,
        "state": state,
        "prompt": len(params.tokens),
        "cached": _by_tier(request),
        "computed": min(request.computed, len(params.tokens)),
        "output": len(request.output),
        "max_tokens": params.max_tokens,
        "priority": params.priority,
        "session": params.session,
        "check": params.alone,
    }
    return row | {"tokens": request.tokens[-SHOWN_TOKENS:]} if tokens else row


def miss_row(request: Request) -> dict[str, Any] | None:
    """What kept a request's match from going deeper; None if nothing did."""
    if not request.why and request.prompt_change is None:
        return None
    return {
        "number": request.number,
        "prompt": len(request.params.tokens),
        "cached": sum(request.by_tier.values()),
        "pools": [{"pool": s.pool, "at": s.at, "reason": s.reason} for s in request.why],
        "change": request.prompt_change,
    }


def _by_tier(request: Request) -> dict[str, int]:
    return {tier.name.lower(): request.by_tier.get(tier, 0) for tier in Tier}
