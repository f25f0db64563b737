"""What Prometheus scrapes: requests as they end, and how engine and cache stand."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtide.cache import Stats, StorageStats
from kvtide.engine import Engine, Finish
from kvtide.engine.oracle import Checks, Oracle
from kvtide.server.rate_estimate import RateEstimate
from kvtide.server.service import ResponseStream

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Streams are counted on the event loop; `text` is called by the engine's thread."""

    def __init__(self, pace: RateEstimate) -> None:
        self._pace = pace
        self._registry = CollectorRegistry()
        self._ends = Counter(
            "kvtide_requests", "Requests that ended.", ["finish"], registry=self._registry
        )
        self._prompt = Counter(
            "kvtide_prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self._generated = Counter(
            "kvtide_generated_tokens", "Tokens generated.", registry=self._registry
        )
        self._cached = Counter(
            "kvtide_cached_tokens", "Prompt tokens found.", ["tier"], registry=self._registry
        )
        self._first = Histogram(
            "kvtide_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._each = Histogram(
            "kvtide_time_per_output_token_seconds",
            "Between a request's tokens after the first.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def ended(self, stream: ResponseStream) -> None:
        request = stream.request
        self._ends.labels((request.finish or Finish.ABORT).value).inc()
        self._prompt.inc(len(request.params.tokens))
        self._generated.inc(len(request.output))
        for tier, tokens in request.by_tier.items():
            self._cached.labels(tier.name.lower()).inc(tokens)
        if stream.first is not None:
            self._first.observe(stream.first - stream.began)
            if stream.ended is not None and len(request.output) > 1:
                self._each.observe((stream.ended - stream.first) / (len(request.output) - 1))

    def text(self, engine: Engine) -> bytes:
        """All of it, in Prometheus' text format."""
        standing = CollectorRegistry()
        standing.register(_Standing(engine))
        return generate_latest(self._registry) + generate_latest(standing)


class _Standing:
    """How the engine stands now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        scheduler, stats = self._engine.scheduler, self._engine.cache.stats()
        yield _gauge("kvtide_requests_running", "Requests that run.", len(scheduler.running))
        yield _gauge("kvtide_requests_waiting", "Requests that wait.", scheduler.waiting)
        yield _gauge("kvtide_sessions", "Sessions whose prefix is pinned.", stats.sessions)
        yield _gauge("kvtide_transfers_in_flight", "Transfers now.", stats.in_flight)
        yield _gauge("kvtide_transfers_overdue", "Past their deadline.", stats.overdue)
        yield from _checks(self._engine.oracle)
        yield from _pages(stats)
        yield from _counts(stats)
        yield from _storage(stats.storage)


def _checks(oracle: Oracle | None) -> Iterable[Metric]:
    counter = CounterMetricFamily(
        "kvtide_restores_checked", "Restored prefixes that were recomputed.", labels=["verdict"]
    )
    counts = oracle.counts if oracle else Checks()
    for verdict in ("alike", "diverged", "skipped"):
        counter.add_metric([verdict], getattr(counts, verdict))
    yield counter


def _pages(stats: Stats) -> Iterable[Metric]:
    gauge = GaugeMetricFamily(
        "kvtide_pages", "Pages by tier, pool and state.", labels=["tier", "pool", "state"]
    )
    for (tier, anchor), count in stats.pages.items():
        for state in ("capacity", "resident", "free"):
            gauge.add_metric([tier.name.lower(), anchor, state], getattr(count, state))
    yield gauge


def _counts(stats: Stats) -> Iterable[Metric]:
    transfers = CounterMetricFamily("kvtide_transfers", "Ended.", labels=["way", "end"])
    for (way, end), count in stats.transfers.items():
        transfers.add_metric([way, end], count)
    yield transfers
    moved = CounterMetricFamily("kvtide_moved_bytes", "By direction.", labels=["way"])
    for way, total in stats.moved_bytes.items():
        moved.add_metric([way], total)
    yield moved
    misses = CounterMetricFamily(
        "kvtide_misses", "What kept requests from finding more.", labels=["pool", "reason"]
    )
    for (pool, reason), count in stats.misses.items():
        misses.add_metric([pool, reason], count)
    yield misses
    yield CounterMetricFamily("kvtide_reservations_refused", "No room.", stats.refused)
    yield CounterMetricFamily("kvtide_backups_skipped", "No host room.", stats.skipped_backups)


def _storage(stats: StorageStats | None) -> Iterable[Metric]:
    """Counted since the store was attached."""
    attached = stats is not None and stats.state == "attached"
    yield _gauge("kvtide_storage_attached", "Is there a store.", attached)
    if stats is None:
        return
    yield _gauge("kvtide_storage_answers", "Do calls to the store go through.", stats.answers)
    yield _gauge("kvtide_storage_fetching", "Fetches now.", stats.fetching)
    yield _gauge("kvtide_storage_waiting_pages", "In line to be stored.", stats.waiting_pages)
    if stats.read_bytes_s is not None:
        yield _gauge("kvtide_storage_read_bytes_per_second", "As measured.", stats.read_bytes_s)
    fetches = CounterMetricFamily("kvtide_storage_fetches", "By outcome.", labels=["outcome"])
    for outcome, count in stats.fetches.items():
        fetches.add_metric([outcome], count)
    yield fetches
    pages = CounterMetricFamily("kvtide_storage_pages", "By what became of them.", labels=["end"])
    for end in ("fetched", "stored", "dropped", "failed"):
        pages.add_metric([end], getattr(stats, f"{end}_pages"))
    yield pages
    objects = CounterMetricFamily(
        "kvtide_storage_objects", "Objects, and calls, by what happened to them.", labels=["event"]
    )
    for event, count in stats.objects.items():
        objects.add_metric([event], count)
    yield objects


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value)
