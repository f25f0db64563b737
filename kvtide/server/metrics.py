"""Prometheus metrics: counters of finished requests, and the state of engine and cache."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvtide.cache import Stats, StorageStats
from kvtide.engine import Engine, Finish
from kvtide.engine.grammar.step_masks import StepMasks
from kvtide.engine.request import Activity
from kvtide.engine.restore_oracle import Checks, RestoreOracle
from kvtide.engine.scheduler import Scheduler
from kvtide.engine.speculation.accept_length_guard import AcceptLengthGuard
from kvtide.engine.speculation.accept_length_stats import AcceptLengthStats
from kvtide.engine.speculation.speculation import MAX_DRAFTS
from kvtide.server.handoff.handoff_metrics import handoff_metrics
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.kv_events.kv_event_metrics import kv_event_metrics
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.service import ResponseStream
from kvtide.server.sessions.session_metrics import session_metrics
from kvtide.spec import ModelMemory, Tier
from kvtide.spec.residency import hot_slots

_ENDS = ("landed", "failed")
_FETCH_OUTCOMES = (
    "fetched", "partly", "late", "nothing", "declined", "no_room", "failed", "discarded",
)  # fmt: skip
_STORE_EVENTS = (
    *("read", "combined", "written", "known", "missing", "draftless", "corrupt", "refused"),
    *("errors", "spared"),
)  # fmt: skip
"""Labels have these values from the start: an alert sees a counter's first step only if the
counter was there before at 0."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The event loop counts streams; the engine thread calls `text`."""

    def __init__(self, handoff: ServerHandoff, events: Publisher | None = None) -> None:
        self._handoff, self._events = handoff, events
        self._registry = CollectorRegistry()
        self._ends = Counter(
            "kvtide_requests", "Finished requests.", ["finish"], registry=self._registry
        )
        self._prompt = Counter("kvtide_prompt_tokens", "Prompt tokens.", registry=self._registry)
        self._generated = Counter(
            "kvtide_generated_tokens", "Generated tokens.", registry=self._registry
        )
        self._cached = Counter(
            "kvtide_cached_tokens",
            "Cached prompt tokens.",
            ["tier"],
            registry=self._registry,
        )
        self._first = Histogram(
            "kvtide_time_to_first_token_seconds",
            "Time to first token, from a request's arrival.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._each = Histogram(
            "kvtide_time_per_output_token_seconds",
            "Time per output token after the first.",
            buckets=_SECONDS,
            registry=self._registry,
        )

        for finish in Finish:
            self._ends.labels(finish.value)
        for tier in Tier:
            self._cached.labels(tier.name.lower())

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
        """All metrics in Prometheus' text format."""
        state = CollectorRegistry()
        state.register(_StateCollector(engine, self._handoff, self._events))
        return generate_latest(self._registry) + generate_latest(state)


class _StateCollector:
    """The present state of the engine."""

    def __init__(self, engine: Engine, handoff: ServerHandoff, events: Publisher | None) -> None:
        self._engine, self._handoff, self._events = engine, handoff, events

    def collect(self) -> Iterable[Metric]:
        scheduler, stats = self._engine.scheduler, self._engine.cache.stats()
        yield _gauge("kvtide_requests_running", "Running requests.", len(scheduler.running))
        yield _gauge("kvtide_requests_waiting", "Waiting requests.", scheduler.waiting)
        yield from _requests(scheduler)
        yield from session_metrics(stats)
        yield _gauge("kvtide_transfers_in_flight", "Transfers in flight.", stats.in_flight)
        yield _gauge("kvtide_transfers_overdue", "Transfers past their deadline.", stats.overdue)
        yield from _checks(self._engine.oracle)
        yield from _masks(self._engine.masks)
        if (lengths := self._engine.accept_length_stats) is not None:
            yield from _drafts(lengths)
        if (guard := self._engine.accept_length_guard) is not None:
            yield from _alarms(guard)
            yield _supplements(stats, self._engine.cache.memory)
        yield from _pages(stats, self._engine.cache.memory)
        if self._engine.cache.memory.hot_pools:
            yield from _hot(self._engine)
        yield from _transfers(stats, self._engine.cache.memory)
        yield from _counts(stats)
        yield from _storage(stats.storage)
        yield from handoff_metrics(self._engine, self._handoff)
        yield from kv_event_metrics(self._events)


def _requests(scheduler: Scheduler) -> Iterable[Metric]:
    states = GaugeMetricFamily(
        "kvtide_request_states", "Requests by what they do or wait for.", labels=["state"]
    )
    counts = Count(request.activity for request in (*scheduler.queued, *scheduler.running))
    for activity in Activity:
        states.add_metric([activity.value], counts[activity])
    yield states
    yield CounterMetricFamily(
        "kvtide_requests_retracted",
        "Running requests that were preempted and queued again.",
        scheduler.retractions,
    )


def _checks(oracle: RestoreOracle | None) -> Iterable[Metric]:
    counter = CounterMetricFamily(
        "kvtide_restores_checked",
        "Restored prefixes that were recomputed.",
        labels=["verdict"],
    )
    counts = oracle.counts if oracle else Checks()
    for verdict in ("alike", "diverged", "skipped"):
        counter.add_metric([verdict], getattr(counts, verdict))
    yield counter


def _masks(masks: StepMasks) -> Iterable[Metric]:
    steps, seconds = (
        CounterMetricFamily(f"kvtide_grammar_{name}", text, value=value)
        for name, text, value in (
            ("steps", "Steps with constrained requests.", masks.steps),
            ("mask_seconds", "Time to compute their masks, beside the device.", masks.seconds),
        )
    )
    yield from (steps, seconds)


def _drafts(lengths: AcceptLengthStats) -> Iterable[Metric]:
    accepted = HistogramMetricFamily(
        "kvtide_accept_length",
        "Tokens that a verify step gave, by the slowest tier of the request's prefix.",
        labels=["origin"],
    )
    for origin, steps in lengths.steps.items():
        reached, buckets = 0, []
        for length in range(1, MAX_DRAFTS + 2):
            reached += steps[length]
            buckets.append((str(float(length)), float(reached)))
        total = sum(length * count for length, count in steps.items())
        accepted.add_metric([origin.value], [*buckets, ("+Inf", float(reached))], total)
    yield accepted
    drafts = CounterMetricFamily("kvtide_draft_tokens", "Verified drafts.", labels=["verdict"])
    drafts.add_metric(["accepted"], lengths.accepted)
    drafts.add_metric(["rejected"], lengths.rejected)
    yield drafts


def _alarms(guard: AcceptLengthGuard) -> Iterable[Metric]:
    alarms = CounterMetricFamily(
        "kvtide_accept_length_alarms",
        "Times that restored prefixes began to accept less than 0.9 of what computed ones do.",
        labels=["origin"],
    )
    for origin, count in guard.alarms.items():
        alarms.add_metric([origin.value], count)
    yield alarms


def _supplements(stats: Stats, memory: ModelMemory) -> Metric:
    pages = CounterMetricFamily(
        "kvtide_supplemented_pages",
        "Draft pages that came to pages which were held without them, by where they came from.",
        labels=["source"],
    )
    moved = stats.moved_pool_pages
    pages.add_metric(["host"], sum(moved.get(("load", p), 0) for p in memory.draft_sidecars))
    pages.add_metric(["storage"], stats.storage.supplements if stats.storage is not None else 0)
    return pages


def _pages(stats: Stats, memory: ModelMemory) -> Iterable[Metric]:
    gauge = GaugeMetricFamily(
        "kvtide_pages", "Pages by tier, pool and state.", labels=["tier", "pool", "state"]
    )
    for (tier, anchor), count in stats.pages.items():
        for state in ("capacity", "resident", "pinned", "free"):
            gauge.add_metric([tier.name.lower(), anchor, state], getattr(count, state))
    yield gauge
    sizes = GaugeMetricFamily(
        "kvtide_page_bytes", "Bytes of a page with its sidecars.", labels=["tier", "pool"]
    )
    evicted = CounterMetricFamily(
        "kvtide_evicted_pages", "Pages dropped for others, or flushed.", labels=["tier", "pool"]
    )
    for (tier, anchor), pages in stats.evicted_pages.items():
        labels = [tier.name.lower(), anchor]
        sizes.add_metric(labels, memory.kept_in(tier).slot_bytes(anchor))
        evicted.add_metric(labels, pages)
    yield from (sizes, evicted)


def _hot(engine: Engine) -> Iterable[Metric]:
    hits, misses, gathered = (
        CounterMetricFamily(f"kvtide_hot_{name}", text, labels=["pool", "layer"])
        for name, text in (
            ("hits", "Selected entries that were in a hot buffer."),
            ("misses", "Selected entries that were swapped in to one."),
            ("gathered", "Selected entries that prefill chunks read from the host."),
        )
    )
    swapped = CounterMetricFamily(
        "kvtide_hot_swapped_bytes", "Bytes of misses and of gathered entries.", labels=["pool"]
    )
    for pool, counts in engine.hot_counts().items():
        by_layer = ((hits, counts.hits), (misses, counts.misses), (gathered, counts.gathered))
        for metric, found in by_layer:
            for layer, count in found.items():
                metric.add_metric([pool, str(layer)], count)
        swapped.add_metric([pool], counts.swapped_bytes)
    yield from (hits, misses, gathered, swapped)
    rows = GaugeMetricFamily(
        "kvtide_hot_rows", "Hot buffers of requests by state.", labels=["state"]
    )
    slots = GaugeMetricFamily(
        "kvtide_hot_slots",
        "Slots of hot buffers, of all layers, by state: of running requests, and of all.",
        labels=["pool", "state"],
    )
    for state, count in zip(("in_use", "capacity"), engine.cache.index.hot_rows, strict=True):
        rows.add_metric([state], count)
        for spec in engine.cache.memory.hot_pools:
            slots.add_metric([spec.name, state], hot_slots(spec, count))
    yield from (rows, slots)


def _transfers(stats: Stats, memory: ModelMemory) -> Iterable[Metric]:
    seconds = HistogramMetricFamily(
        "kvtide_transfer_seconds",
        "From a transfer's submission to the step that sees its end; of fetches the read alone.",
        labels=["way"],
    )
    stored = stats.storage.seconds if stats.storage is not None else {}
    for way, durations in {**stats.transfer_seconds, **stored}.items():
        seconds.add_metric([way], durations.cumulated(), durations.total_s)
    yield seconds
    queue = GaugeMetricFamily(
        "kvtide_transfer_queue", "Transfers that have not ended.", labels=["way", "state"]
    )
    pages = GaugeMetricFamily(
        "kvtide_transfer_queue_pages", "Pages of these transfers.", labels=["way"]
    )
    for way, queued in stats.queues.items():
        queue.add_metric([way, "reserved"], queued.reserved)
        queue.add_metric([way, "in_flight"], queued.in_flight)
        pages.add_metric([way], queued.pages)
    yield from (queue, pages)
    moved = CounterMetricFamily("kvtide_moved_pages", "Pages copied.", labels=["way", "pool"])
    for way in stats.moved_bytes:
        for pool in memory.at_rest.pools:
            if pool.is_anchor or not pool.reuse.required:
                moved.add_metric([way, pool.name], stats.moved_pool_pages.get((way, pool.name), 0))
    yield moved


def _counts(stats: Stats) -> Iterable[Metric]:
    transfers = CounterMetricFamily(
        "kvtide_transfers", "Finished transfers.", labels=["way", "end"]
    )
    for way in stats.moved_bytes:
        for end in _ENDS:
            transfers.add_metric([way, end], stats.transfers.get((way, end), 0))
    yield transfers
    moved = CounterMetricFamily("kvtide_moved_bytes", "Bytes copied by direction.", labels=["way"])
    for way, total in stats.moved_bytes.items():
        moved.add_metric([way], total)
    yield moved
    misses = CounterMetricFamily(
        "kvtide_misses",
        "Why leases found no longer prefix.",
        labels=["pool", "reason"],
    )
    for (pool, reason), count in stats.misses.items():
        misses.add_metric([pool, reason], count)
    yield misses
    yield CounterMetricFamily("kvtide_reservations_refused", "No free slots.", stats.refused)
    yield CounterMetricFamily("kvtide_backups_skipped", "No host slots.", stats.skipped_backups)


def _storage(stats: StorageStats | None) -> Iterable[Metric]:
    """Counters start when the store is attached."""
    attached = stats is not None and stats.state == "attached"
    yield _gauge("kvtide_storage_attached", "1 if a store is attached.", attached)
    if stats is None:
        return
    yield _gauge("kvtide_storage_answers", "1 if calls to the store succeed.", stats.answers)
    yield _gauge("kvtide_storage_fetching", "Fetches in flight.", stats.fetching)
    yield _gauge("kvtide_storage_waiting_pages", "Pages queued for storage.", stats.waiting_pages)
    if stats.read_bytes_s is not None:
        yield _gauge("kvtide_storage_read_bytes_per_second", "Measured.", stats.read_bytes_s)
    fetches = CounterMetricFamily("kvtide_storage_fetches", "Ended fetches.", labels=["outcome"])
    for outcome in _FETCH_OUTCOMES:
        fetches.add_metric([outcome], stats.fetches.get(outcome, 0))
    yield fetches
    pages = CounterMetricFamily("kvtide_storage_pages", "Pages by outcome.", labels=["end"])
    for end in ("fetched", "stored", "dropped", "failed"):
        pages.add_metric([end], getattr(stats, f"{end}_pages"))
    yield pages
    objects = CounterMetricFamily(
        "kvtide_storage_objects", "Objects and calls by event.", labels=["event"]
    )
    for event in _STORE_EVENTS:
        objects.add_metric([event], stats.objects.get(event, 0))
    yield objects
    for name, text, moved in (
        ("bytes", "Bytes of pages that were read and written.", stats.moved_bytes),
        ("coded_bytes", "The same as a codec has them.", stats.coded_bytes),
    ):
        counter = CounterMetricFamily(f"kvtide_storage_{name}", text, labels=["way"])
        for way, total in moved.items():
            counter.add_metric([way], total)
        yield counter


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)
