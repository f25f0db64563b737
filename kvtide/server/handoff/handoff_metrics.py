"""Handoffs for Prometheus: states on the decode side, rooms and the sender on the prefill side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtide.engine import Engine
from kvtide.engine.handoff.handoff_state import OVER, HandoffState
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.transfer.peer.page_sender import SenderStats

ROOM_ENDS = ("handed_over", "failed")


def handoff_metrics(engine: Engine, handoff: ServerHandoff) -> Iterable[Metric]:
    """Of the sides that the server is; nothing where it has no part in handoffs."""
    if handoff.decode is not None:
        yield from decode_metrics(engine)
        peers = handoff.decode.report().values()
        connected = sum(bool(peer["connected"]) for peer in peers)
        yield _gauge("prefill_servers", "Prefill servers by state.", _connected(connected, peers))
    if handoff.prefill is not None:
        yield from prefill_metrics(engine)
        report = handoff.prefill.report()
        text, connected = (
            "Decode servers that are connected.",
            handoff.prefill.report()["connected"],
        )
        yield GaugeMetricFamily("kvtide_handoff_decode_servers", text, report["connected"])
        text = "Connections of peers that did not prove the secret, or do not fit."
        yield CounterMetricFamily("kvtide_handoff_refused_peers", text, report["refused"])


def decode_metrics(engine: Engine) -> Iterable[Metric]:
    incoming, receiving = engine.handoffs.decode, engine.cache.receiving
    waiting = {s.value: incoming.by_state[s] for s in HandoffState if s not in OVER}
    yield _gauge("open", "Handoffs that are not over, by state.", waiting)
    ended = {state.value: incoming.ended[state] for state in HandoffState if state in OVER}
    yield _counter("ended", "Handoffs by their last state.", "state", ended)
    yield CounterMetricFamily(
        "kvtide_handoff_tokens", "Prompt tokens in pages of whole handoffs.", incoming.handed_tokens
    )
    yield CounterMetricFamily(
        "kvtide_handoff_landed_bytes", "Bytes of landed pages.", incoming.landed_bytes
    )
    yield GaugeMetricFamily(
        "kvtide_handoff_quarantined_slots",
        "Slots that a peer may still write to, after its handoff has ended.",
        receiving.quarantined_slots,
    )
    yield GaugeMetricFamily(
        "kvtide_handoff_quarantined",
        "Handoffs that have ended and whose peer may still write.",
        len(receiving.quarantined),
    )
    yield GaugeMetricFamily(
        "kvtide_handoff_tail_rows_free",
        "Handoffs that could begin now, by their tail rows.",
        receiving.free_tail_rows,
    )


def prefill_metrics(engine: Engine) -> Iterable[Metric]:
    outgoing = engine.handoffs.prefill
    text = "Prompts that are prefilled or kept for decode servers."
    yield GaugeMetricFamily("kvtide_handoff_rooms", text, len(outgoing.rooms))
    ends = {end: outgoing.ended[end] for end in ROOM_ENDS}
    yield _counter("rooms_ended", "Rooms that are over.", "end", ends)
    if outgoing.writer is not None:
        yield from _sender(outgoing.writer.sender.stats())


def _sender(stats: SenderStats) -> Iterable[Metric]:
    queue = {"queued": stats.queued_jobs, "active": stats.active_jobs}
    yield _gauge("sender_jobs", "Writes of the page sender by state.", queue)
    ends = ("done", "failed", "cancelled")
    ended = {end: int(getattr(stats, f"jobs_{end}")) for end in ends}
    yield _counter("sender_jobs_ended", "Writes of the page sender by end.", "end", ended)
    yield CounterMetricFamily(
        "kvtide_handoff_sender_unsilent",
        "Writes that failed while their bytes may still land.",
        stats.unsilent,
    )
    yield CounterMetricFamily(
        "kvtide_handoff_sender_crashes", "Exceptions of the page sender.", stats.crashes
    )
    yield CounterMetricFamily(
        "kvtide_handoff_written_bytes", "Bytes written to decode servers.", stats.written_bytes
    )
    yield CounterMetricFamily(
        "kvtide_handoff_writing_seconds", "Time in which bytes were written.", stats.busy_s
    )
    yield GaugeMetricFamily(
        "kvtide_handoff_sender_in_flight_bytes", "Bytes being written.", stats.in_flight_bytes
    )


def _connected(connected: int, peers: Iterable[object]) -> dict[str, int]:
    return {"connected": connected, "lost": len(list(peers)) - connected}


def _gauge(name: str, text: str, values: Mapping[str, int]) -> Metric:
    gauge = GaugeMetricFamily(f"kvtide_handoff_{name}", text, labels=["state"])
    for state, value in values.items():
        gauge.add_metric([state], value)
    return gauge


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(f"kvtide_handoff_{name}", text, labels=[label])
    for each, value in values.items():
        counter.add_metric([each], value)
    return counter
