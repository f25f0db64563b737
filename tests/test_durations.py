"""Histograms of durations: which bucket a duration is in, and what Prometheus gets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvtide.durations import BUCKETS_S, DurationHistogram, Durations


def test_buckets_grow() -> None:
    assert all(a < b for a, b in pairwise(BUCKETS_S))


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.0005, 0), (0.00051, 1), (30.0, -2), (31.0, -1)]
)
def test_a_duration_is_in_the_first_bucket_that_is_not_shorter(seconds: float, bucket: int) -> None:
    histogram = DurationHistogram()
    histogram.observe(seconds)
    counts = histogram.seen().counts
    assert counts[bucket] == 1 == sum(counts)


def test_counts_are_cumulated_for_prometheus_and_end_with_all() -> None:
    histogram = DurationHistogram()
    for seconds in (0.0001, 0.002, 0.002, 99.0):
        histogram.observe(seconds)
    seen = histogram.seen()
    cumulated = dict(seen.cumulated())
    assert cumulated["0.0005"] == cumulated["0.001"] == 1
    assert cumulated["0.0025"] == cumulated["30.0"] == 3
    assert cumulated["+Inf"] == seen.count == 4
    assert seen.total_s == pytest.approx(99.0041)


def test_what_was_seen_does_not_change_afterwards() -> None:
    histogram = DurationHistogram()
    before = histogram.seen()
    histogram.observe(1.0)
    assert before == Durations() and histogram.seen() != before
