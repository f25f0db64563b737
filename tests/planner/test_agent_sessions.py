"""The `agent` workload has the quantiles of recorded traffic of coding agents."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from kvtide.planner.traces import TraceRequest
from kvtide.planner.workloads import make
from tests.planner.sessions import by_session, shared_tokens

pytestmark = pytest.mark.full

MINUTE, HOUR = 60, 3600


@dataclass
class Observed:
    """What requests look like beside the one before of their session."""

    prompts: list[int] = field(default_factory=list)
    extensions: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    arrivals_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, before: TraceRequest | None, request: TraceRequest) -> None:
        self.prompts.append(len(request.prompt))
        self.arrivals_s[str(request.session)].append(request.arrival_s)
        if before is None:
            return
        self.gaps_s.append(request.arrival_s - before.arrival_s)
        shared = shared_tokens(before, request)
        self.kept.append(shared / len(before.prompt))
        if shared == len(before.prompt):
            self.extensions.append(len(request.prompt) - shared)

    @property
    def sessions(self) -> list[list[float]]:
        return list(self.arrivals_s.values())


@pytest.fixture(scope="module")
def observed() -> Observed:
    found = Observed()
    before: dict[str, TraceRequest] = {}
    for request in make("agent", sessions=200):
        session = str(request.session)
        found.add(before.get(session), request)
        before[session] = request
    return found


def assert_quantiles(values: list[int] | list[float], wanted: list[float], rel: float) -> None:
    """The 10th, 50th and 90th percentile, and those that follow."""
    assert np.quantile(values, [0.1, 0.5, 0.9, 0.99][: len(wanted)]) == pytest.approx(
        wanted, rel=rel
    )


def test_sessions_have_7_to_170_requests(observed: Observed) -> None:
    assert_quantiles([len(session) for session in observed.sessions], [7, 44, 170], rel=0.03)


def test_prompts_have_41k_to_220k_tokens(observed: Observed) -> None:
    assert_quantiles(observed.prompts, [41_000, 100_000, 220_000], rel=0.1)


def test_requests_extend_the_one_before_by_200_to_3100_tokens(observed: Observed) -> None:
    assert_quantiles(observed.extensions, [200, 640, 3100], rel=0.05)


def test_nearly_all_extend_the_one_before_and_few_share_little_of_it(observed: Observed) -> None:
    kept = np.array(observed.kept)
    assert (kept == 1).mean() == pytest.approx(0.974, abs=0.004)
    assert (kept < 0.3).mean() == pytest.approx(0.016, abs=0.003)


def test_gaps_are_of_8_to_129_seconds_and_one_in_a_hundred_of_40_minutes(
    observed: Observed,
) -> None:
    assert_quantiles(observed.gaps_s, [8, 16, 129, 40 * MINUTE], rel=0.05)


def test_sessions_last_from_10_minutes_to_5_hours(observed: Observed) -> None:
    lasted = [session[-1] - session[0] for session in observed.sessions]
    low, high = np.quantile(lasted, [0.1, 0.9])
    assert low == pytest.approx(10 * MINUTE, rel=0.3)
    assert high == pytest.approx(5 * HOUR, rel=0.3)


def test_sessions_begin_as_a_poisson_process(observed: Observed) -> None:
    between = np.diff(sorted(session[0] for session in observed.sessions))
    assert between.mean() == pytest.approx(2 * MINUTE, rel=0.2)
    assert between.std() == pytest.approx(between.mean(), rel=0.25)


def test_sessions_share_their_instructions_and_nothing_else() -> None:
    firsts = [turns[0] for turns in by_session(make("agent", sessions=8, system=900)).values()]
    assert {shared_tokens(firsts[0], other) for other in firsts[1:]} == {900}


def test_compaction_keeps_the_instructions_alone() -> None:
    options = {"system": 500, "context": 8000, "sub_agent_percent": 0.0, "edit_percent": 0.0}
    compacted = 0
    for turns in by_session(make("agent", sessions=4, **options)).values():
        for before, after in pairwise(turns):
            shared = shared_tokens(before, after)
            assert shared in (500, len(before.prompt))
            if shared == 500:
                compacted += 1
                assert len(after.prompt) < len(before.prompt)
    assert compacted > 10


def test_sub_agent_shares_nothing_and_its_session_continues_where_it_was() -> None:
    options = {"sub_agent_percent": 10.0, "edit_percent": 0.0, "context": 1 << 20}
    returned = 0
    for turns in by_session(make("agent", sessions=4, requests=20, **options)).values():
        main, last = turns[0], turns[0]
        for request in turns[1:]:
            if shared_tokens(main, request):
                assert shared_tokens(main, request) == len(main.prompt)
                returned += last is not main
                main = request
            else:
                assert shared_tokens(last, request) in (0, len(last.prompt))
            last = request
    assert returned > 3


def test_edit_keeps_a_third_or_more_of_the_conversation() -> None:
    options = {"sub_agent_percent": 0.0, "edit_percent": 30.0, "context": 1 << 20}
    edited = []
    for turns in by_session(make("agent", sessions=8, requests=20, **options)).values():
        for before, after in pairwise(turns):
            edited.append(shared_tokens(before, after) / len(before.prompt))
    assert min(edited) > 0.3
    assert 0.2 < np.mean(np.array(edited) < 1) < 0.4
