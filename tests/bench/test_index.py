"""The index benchmark measures what it says, for every contestant it names."""

from __future__ import annotations

import pytest

from kvtide.bench.index_cost import CONTESTANTS, bytes_per_token, compare, contestant, growth
from kvtide.planner import workloads

TRACE = workloads.parse("chat:users=10,turns=4,system=2000")


def quietly(items, count, label):
    return items


def test_every_contestant_replays_a_trace_and_the_first_one_is_the_measure() -> None:
    measured = compare(TRACE, list(CONTESTANTS), 30_000, 64, 1, quietly)
    assert [m.contestant for m in measured] == list(CONTESTANTS)
    assert measured[0].speed == 1.0
    for m in measured:
        assert m.us_per_request > 0
        assert 0.2 < m.hit_rate < 1.0
        assert set(m.p50_us) == {"match", "lock", "alloc", "insert", "unlock"}
        assert all(m.p50_us[op] <= m.p99_us[op] for op in m.p50_us)


def test_index_takes_at_most_five_bytes_per_cached_token() -> None:
    trace = workloads.parse("rag:requests=60,document=6000")
    assert 4.0 < bytes_per_token(trace, "full", 64, 60) < 5.0


def test_growth_is_measured_on_a_full_index() -> None:
    result = growth(2_000, 16, 40, quietly)
    assert result.cached_pages == 2_000
    assert result.us_per_request > 0


def test_contestants_of_other_projects_come_by_import_path() -> None:
    assert contestant("kvtide.bench.contestants:Full") is CONTESTANTS["full"]
    with pytest.raises(ValueError, match=r"use full, .*package\.module:Class"):
        contestant("other")
