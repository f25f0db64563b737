"""The offline optimum, checked by trying everything on small traces."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.bench.hitrate import compare, optimum
from kvtide.planner import workloads

Path = tuple[int, ...]

# Page numbers that name whole prefixes: a small tree of prompts.
PATHS: list[Path] = [(0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5), (6, 7)]


def best_by_trying(paths: list[Path], capacity: int) -> int:
    """The most hits over every choice of what to keep after each request."""

    @cache
    def max_hits(number: int, held: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        hits = next((i for i, page in enumerate(path) if page not in held), len(path))
        others = sorted(held - set(path))
        room = capacity - len(path)
        keeps = [k for n in range(min(room, len(others)) + 1) for k in combinations(others, n)]
        return hits + max(max_hits(number + 1, frozenset(path) | set(keep)) for keep in keeps)

    return max_hits(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=7), st.integers(3, 6))
def test_optimum_equals_the_best_of_all_choices(paths: list[Path], capacity: int) -> None:
    uses = [np.array(path) for path in paths]
    limits = [len(path) for path in paths]
    assert optimum(uses, limits, capacity) == best_by_trying(paths, capacity)


def test_no_policy_beats_the_optimum_and_room_for_all_reaches_it() -> None:
    trace = workloads.parse("chat:users=12,turns=5")
    result = compare(trace, ["lru", "slru", "fifo"], [0.05, 0.3, 1.5], 64, lambda it, n, s: it)
    for row in result.rows:
        assert all(rate <= row.optimum + 1e-9 for rate in row.hit_rates.values())
    assert result.rows[-1].hit_rates["lru"] == result.unlimited == result.rows[-1].optimum
    assert result.rows[0].hit_rates["lru"] < result.unlimited


def test_gap_closed_is_none_for_lru_itself_and_all_for_the_optimum() -> None:
    trace = workloads.parse("chat:users=12,turns=5")
    (row,) = compare(trace, ["lru"], [0.05], 64, lambda it, n, s: it).rows
    assert row.gap_closed("lru") == 0.0
    row.hit_rates["perfect"] = row.optimum
    assert abs(row.gap_closed("perfect") - 1.0) < 1e-9


def test_least_hit_density_finds_more_than_lru_where_most_prompts_come_once() -> None:
    trace = workloads.parse("rag:requests=300,documents=100")
    (row,) = compare(trace, ["lru", "lhd"], [0.05], 64, lambda it, n, s: it).rows
    assert row.hit_rates["lhd"] > row.hit_rates["lru"] + 0.005


def test_least_hit_density_finds_as_much_as_lru_in_conversations() -> None:
    trace = workloads.parse("chat:users=40,turns=5")
    rows = compare(trace, ["lru", "lhd"], [0.05, 0.2, 0.5], 64, lambda it, n, s: it).rows
    for row in rows:
        assert row.hit_rates["lhd"] > row.hit_rates["lru"] - 0.002
