"""Stack distances: one pass says what an LRU cache of any size, and the real index, would find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.planner import traces, workloads
from kvtide.planner.hit_curve import HitCurve, hit_curve
from kvtide.planner.replay import Setup, replay
from kvtide.planner.traces import TraceRequest
from kvtide.spec import DType, Entry, Field, ModelMemory, PoolSpec, Tier

TRACES = Path(__file__).parents[3] / "shared" / "traces"
FULL = ModelMemory(
    "full", 64, (PoolSpec("kv", (0,), Entry((Field("kv", (1,), DType.UINT8),))),), layers=1
)

# Prompts of few tokens over a small alphabet share prefixes of every length.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=25)


def requests(given_prompts: list[list[int]]) -> list[TraceRequest]:
    return [TraceRequest(0.0, np.array(p, dtype=np.int32), 0) for p in given_prompts]


def brute_force_hits(given_prompts: list[list[int]], page: int, capacity: int) -> int:
    """An LRU list of prefixes, most recently used first; of one prompt the shortest come first."""
    kept: list[tuple[int, ...]] = []
    hits = 0
    for prompt in given_prompts:
        ends = range(page, len(prompt) + 1, page)
        path = [tuple(prompt[:end]) for end in ends]
        hits += sum(prefix in kept[:capacity] for prefix in path if len(prefix) < len(prompt))
        kept = path + [prefix for prefix in kept if prefix not in path]
    return hits


@given(prompts, st.integers(1, 3))
def test_curve_equals_a_brute_force_lru_at_every_capacity(
    given_prompts: list[list[int]], page: int
) -> None:
    curve = hit_curve(requests(given_prompts), page)
    for capacity in range(curve.footprint_pages + 2):
        hits = int(curve.hits[min(capacity, len(curve.hits) - 1)])
        assert hits == brute_force_hits(given_prompts, page, capacity), f"capacity {capacity}"


@given(prompts)
def test_curve_never_falls_and_ends_at_the_footprint(given_prompts: list[list[int]]) -> None:
    curve = hit_curve(requests(given_prompts), 2)
    assert (np.diff(curve.hits) >= 0).all()
    assert len(curve.hits) == curve.footprint_pages + 1
    assert curve.hit_rate(10**9) == curve.best_hit_rate


def test_pages_for_fraction_is_the_smallest_capacity_that_reaches_it() -> None:
    curve = HitCurve(1, 100, 5, 1, np.array([0, 10, 20, 38, 40, 40]))
    assert curve.pages_for_fraction(0.9) == 3
    assert curve.pages_for_fraction(1.0) == 4
    assert curve.best_hit_rate == 0.4


def test_knee_stands_where_the_curve_bends() -> None:
    rising = np.minimum(np.arange(1025) * 10, 320 + np.arange(1025) // 32)
    assert HitCurve(1, 1000, 1024, 1, rising).knee_pages() == 32


def test_knee_is_no_smaller_than_the_longest_prompt() -> None:
    rising = np.minimum(np.arange(1025) * 10, 320 + np.arange(1025) // 32)
    assert HitCurve(1, 1000, 1024, 200, rising).knee_pages() >= 200


@pytest.mark.parametrize("given_prompts", [[], [[1]], [[1, 2, 3]], [[1, 2, 3, 4], [5, 6, 7, 8]]])
def test_curve_of_a_trace_without_reuse_is_flat(given_prompts: list[list[int]]) -> None:
    curve = hit_curve(requests(given_prompts), 2)
    assert curve.best_hit_rate == 0.0
    assert curve.knee_pages() == curve.pages_for_fraction(0.9) == 0


# -- against the index ----------------------------------------------------------------------


def assert_index_agrees(trace: traces.Trace, fractions: tuple[float, ...]) -> None:
    curve = hit_curve(trace, FULL.page_tokens)
    for fraction in fractions:
        pages = max(curve.longest_pages, int(fraction * curve.footprint_pages))
        setup = Setup(FULL, {Tier.DEVICE: {"kv": pages}}, eviction="lru")
        replayed = replay(setup, trace).hit_rate
        # The index evicts in batches, and gives up slots for the page being filled.
        assert replayed == pytest.approx(curve.hit_rate(pages), abs=0.015), f"{pages} pages"


@pytest.mark.quick(workload=["rag:requests=400"])
@pytest.mark.parametrize("workload", ["chat:users=60,users_per_minute=60", "rag:requests=400"])
def test_index_replay_of_a_workload_lies_on_the_curve(workload: str) -> None:
    assert_index_agrees(workloads.parse(workload), (0.05, 0.2, 0.5, 1.2))


@pytest.mark.full
def test_index_replay_of_a_public_trace_lies_on_the_curve() -> None:
    path = TRACES / "synthetic_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no public trace at {path}")
    assert_index_agrees(traces.load(path), (0.05, 0.3))
