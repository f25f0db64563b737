"""KV events for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtide.server.kv_events.publisher import Publisher


def kv_event_metrics(publisher: Publisher | None) -> Iterable[Metric]:
    """Nothing without a publisher."""
    if publisher is None:
        return
    counts = publisher.counts
    events = CounterMetricFamily("kvtide_kv_events", "Published KV events.", labels=["type"])
    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        events.add_metric([kind], counts.events[kind])
    yield events
    yield CounterMetricFamily("kvtide_kv_event_batches", "Published batches.", counts.batches)
    text = "Events of the index that the queue had no room for."
    yield CounterMetricFamily("kvtide_kv_events_dropped", text, counts.dropped)
    text = "Times that the index was read anew, after a loss."
    yield CounterMetricFamily("kvtide_kv_events_read_anew", text, counts.read_anew)
    replays = CounterMetricFamily(
        "kvtide_kv_event_replays", "Replays by what was sent.", labels=["source"]
    )
    for source in ("buffer", "state"):
        replays.add_metric([source], counts.replays[source])
    yield replays
    text = "Events of the index that wait to be published."
    yield GaugeMetricFamily("kvtide_kv_events_waiting", text, publisher.waiting)
