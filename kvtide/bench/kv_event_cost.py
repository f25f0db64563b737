"""What KV events cost: the index's own time to make them, and the publisher's beside it.

    python -m kvtide.bench.kv_event_cost

replays workloads over indexes that are followed. The engine's thread pays for a tuple per event and
an append to a queue; that is timed call by call and put beside all that the index does for a
request. The publisher's work (hashing, encoding) runs on a thread of its own; it is timed alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.bench.index_cost import contestant
from kvtide.index import Event, Index
from kvtide.index.events import EventFields
from kvtide.planner.traces import Trace
from kvtide.planner.workloads import parse
from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.block_table import BlockTable
from kvtide.server.kv_events.event_encoding import EventEncoder, encode_batch
from kvtide.server.kv_events.kv_groups import kv_groups

CALIBRATIONS = 10_000
LONGEST_NS = 20_000
"""A call that took longer was interrupted; it counts as so long."""
CONTESTANTS = ("full", "default", "window", "recurrent", "deepseek-v4-default")
WORKLOADS = ("chat:users=40", "agent:sessions=6", "rag:requests=200")
CAPACITY_TOKENS = 100_000
PAGE_TOKENS = 64

Timings = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class EventCost:
    """Per request: events, what the index takes without them, what they take, what the publisher
    takes beside it, and what it sends. `fraction`: of the index's time."""

    contestant: str
    workload: str
    events: float
    index_us: float
    event_us: float
    publisher_us: float
    sent_bytes: float

    @property
    def fraction(self) -> float:
        return self.event_us / self.index_us


class _Timed:
    """Times calls of a function, less what the timing takes."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.ns = self.calls = 0

    def __call__(self, *arguments: Any) -> None:
        began = time.thread_time_ns()
        self._function(*arguments)
        self.ns += min(time.thread_time_ns() - began, LONGEST_NS)
        self.calls += 1


def _nothing(*arguments: Any) -> None:
    pass


def _calibrated() -> tuple[float, float]:
    """What timing adds: to a call as timed, and to a call as its caller sees it."""
    inside, outside = [], []
    for _ in range(CALIBRATIONS):
        timed = _Timed(_nothing)
        began = time.thread_time_ns()
        timed(None, 0, 0)
        outside.append(time.thread_time_ns() - began)
        inside.append(timed.ns)
    return statistics.median(inside), statistics.median(outside)


def measure(name: str, trace: Trace, capacity_tokens: int, page_tokens: int) -> EventCost:
    """Replay a trace over a contestant of `kvtide bench index`, followed by a queue."""
    added_inside, added_outside = _calibrated()
    made = contestant(name)(capacity_tokens, page_tokens)
    heard: deque[EventFields] = deque()
    index: Index = made.index
    index.subscribe_fields(heard.append)
    source = index.event_source
    timed = [_Timed(source.stored), _Timed(source.removed)]
    source.stored, source.removed = timed  # type: ignore[method-assign, assignment]
    timings: Timings = {op: [] for op in ("match", "lock", "alloc", "insert", "unlock")}
    gc.collect()
    gc.freeze()  # As a server does.
    for number, request in enumerate(trace):
        handle = made.start(made.prepare(number, request.prompt), timings)
        made.finish(handle, timings)
    gc.unfreeze()
    calls = sum(one.calls for one in timed)
    events_ns = sum(one.ns for one in timed) - calls * added_inside
    index_ns = sum(sum(values) for values in timings.values()) - calls * added_outside - events_ns
    publisher_ns, sent_bytes = _publish(index, [Event(*fields) for fields in heard])
    per_request = 1e-3 / trace.requests
    return EventCost(
        name,
        trace.name,
        calls / trace.requests,
        index_ns * per_request,
        events_ns * per_request,
        publisher_ns * per_request,
        sent_bytes / trace.requests,
    )


def _publish(index: Index, events: Sequence[Event]) -> tuple[int, int]:
    """The CPU time of hashing and encoding these events, in batches of 16, and their bytes."""
    hashes = VllmHashes()
    table = BlockTable(kv_groups(index.memory), hashes, index.page_bytes)
    encoder = EventEncoder(hashes, index.memory.page_tokens)
    began, sent_bytes = time.thread_time_ns(), 0
    for number, event in enumerate(events, 1):
        table.hear(event)
        if number % 16 == 0 or number == len(events):
            sent_bytes += len(encode_batch(encoder.events(table.take())))
    return time.thread_time_ns() - began, sent_bytes


def main() -> None:
    print("| index | workload | events | index µs | events µs | share | publisher µs | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for name in CONTESTANTS:
        for workload in WORKLOADS:
            cost = measure(name, parse(workload), CAPACITY_TOKENS, PAGE_TOKENS)
            print(
                f"| {name} | {workload} | {cost.events:.2f} | {cost.index_us:.1f} | "
                f"{cost.event_us:.2f} | {cost.fraction:.1%} | {cost.publisher_us:.0f} | "
                f"{cost.sent_bytes:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
