"""The default policy measures LRU, stays close to it at worst, and beats it where it can."""

from __future__ import annotations

import pytest

from kvtide.bench.contestants import Full
from kvtide.index.evict import tide
from kvtide.index.evict.tide import Tide
from kvtide.planner import workloads
from kvtide.planner.traces import Trace, footprint_tokens

PAGE = 16


def found(trace: Trace, policy: str, share: float) -> tuple[int, Full]:
    """Tokens found with slots for a share of all that the trace ever shows."""
    longest = max(len(request.prompt) for request in trace)
    capacity = max(int(share * footprint_tokens(trace, PAGE)), longest + 4 * PAGE) // PAGE * PAGE
    contestant = Full(capacity, PAGE, eviction=policy)
    tokens = 0
    for number, request in enumerate(trace):
        timings = {op: [] for op in ("match", "lock", "alloc", "insert", "unlock")}
        handle = contestant.start(contestant.prepare(number, request.prompt), timings)
        tokens += handle.matched
        contestant.finish(handle, timings)
    assert contestant.index.validate() == []
    return tokens, contestant


WORKLOADS = [
    "chat:users=120,turns=6,think_s=60,users_per_minute=20",
    "chat:users=60,turns=10,system=200,think_s=5",
    "agent:sessions=16,turns=14",
    "rag:requests=500,documents=60,retrieved=2",
    "rag:requests=400,documents=200,retrieved=1,zipf=0.6",
]


@pytest.mark.parametrize("workload", WORKLOADS[:3])
def test_without_bets_it_is_lru_and_knows_it(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of what LRU would find agrees with what was found, page for page."""
    monkeypatch.setattr(tide, "SLACK", -1e9)
    monkeypatch.setattr(tide, "EWMA_DECAY", 1.0)
    trace = workloads.parse(workload)
    lru, _ = found(trace, "lru", 0.1)
    same, contestant = found(trace, "tide", 0.1)
    assert same == lru
    policy = contestant.index.tree.cells[0].policy
    assert isinstance(policy, Tide)
    assert policy._lru * PAGE == pytest.approx(lru, rel=0.01)


@pytest.mark.quick
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_it_never_finds_two_percent_less_than_lru(workload: str, share: float) -> None:
    trace = workloads.parse(workload)
    assert found(trace, "tide", share)[0] >= 0.98 * found(trace, "lru", share)[0]


def test_popular_documents_behind_many_rare_ones_are_kept_longer_than_by_lru() -> None:
    trace = workloads.parse("rag:requests=900,documents=120,retrieved=1,zipf=1.1,system=0")
    assert found(trace, "tide", 0.06)[0] > 1.05 * found(trace, "lru", 0.06)[0]


def test_ghosts_are_bounded() -> None:
    trace = workloads.parse("rag:requests=900,documents=900,retrieved=1,zipf=0.0,system=0")
    _, contestant = found(trace, "tide", 0.02)
    policy = contestant.index.tree.cells[0].policy
    assert isinstance(policy, Tide)
    assert 100 < len(policy._ghosts) <= tide.MIN_GHOSTS


def test_what_lru_would_hold_never_exceeds_its_slots_by_more_than_the_last_request() -> None:
    trace = workloads.parse(WORKLOADS[0])
    _, contestant = found(trace, "tide", 0.1)
    cell = contestant.index.tree.cells[0]
    policy = cell.policy
    assert isinstance(policy, Tide)
    policy.asked(0)
    longest = max(len(request.prompt) for request in trace) // PAGE
    assert policy._held <= cell.slots.capacity + longest
    assert policy._held == sum(policy._pages.values())
    assert policy._owed == sum(policy._gone.values())
