"""Requests of a trace by their session, and what two prompts share."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvtide.planner.traces import Trace, TraceRequest


def shared_tokens(a: TraceRequest, b: TraceRequest) -> int:
    """How many leading tokens two prompts have in common."""
    length = min(len(a.prompt), len(b.prompt))
    differs = np.flatnonzero(a.prompt[:length] != b.prompt[:length])
    return int(differs[0]) if len(differs) else length


def by_session(trace: Trace) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace:
        sessions[str(request.session)].append(request)
    return sessions
