"""Metrics of sessions and prefetches. No label has a session's name or text."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtide.cache import Stats

ENDS = ("expired", "released", "evicted")
OUTCOMES = ("loaded", "no_room", "failed", "ended")


def session_metrics(stats: Stats) -> Iterable[Metric]:
    sessions = stats.sessions
    yield GaugeMetricFamily(
        "kvtide_sessions", "Sessions whose prefix is pinned.", float(sessions.pinned)
    )
    yield GaugeMetricFamily(
        "kvtide_sessions_known", "Sessions that have not ended.", float(sessions.known)
    )
    pages = GaugeMetricFamily(
        "kvtide_session_pinned_pages",
        "Pages that sessions pin; each page counts once.",
        labels=["tier", "pool"],
    )
    for (tier, anchor), count in sorted(sessions.pages.items()):
        pages.add_metric([tier.name.lower(), anchor], count)
    yield pages
    ends = CounterMetricFamily(
        "kvtide_session_ends", "Sessions that ended or lost their pin.", labels=["reason"]
    )
    for reason in ENDS:
        ends.add_metric([reason], sessions.ended.get(reason, 0))
    yield ends
    yield CounterMetricFamily(
        "kvtide_session_prompt_changes",
        "Prompts that differ from the last one of their line where pages could have been reused.",
        sessions.changed,
    )
    prefetches = CounterMetricFamily("kvtide_prefetches", "Ended prefetches.", labels=["outcome"])
    for outcome in OUTCOMES:
        prefetches.add_metric([outcome], stats.prefetches.get(outcome, 0))
    yield prefetches
