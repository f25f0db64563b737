"""What KV events cost: the index's own time to make them, and the publisher's beside it.

    python -m kvtide.bench.kv_event_cost             # by request of a workload
    python -m kvtide.bench.kv_event_cost --steps     # by step of an engine

The first replays workloads over indexes that are followed. The engine's thread pays for a tuple per
event and an append to a queue; that is timed call by call and put beside all that the index does
for a request. A thread of the engine's process packs the events and writes them to the publisher's
process, for one request at a time or for several: a server does it for all requests of 20 ms. The
process hashes and encodes. Both are timed alone, by their CPU.

The second command runs an engine whose model computes nothing, or waits as for a device,
alternately with and without a publisher that has a subscriber. Beside times it compares the CPU
time of the engine's thread, and of all threads of its process.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

from kvtide.bench.index_cost import contestant
from kvtide.bench.step_cost import CHUNK, PAGE, VOCABULARY, Idle, idle_cache
from kvtide.engine import Engine, RequestParams
from kvtide.index import Index
from kvtide.layers import Step
from kvtide.models.draft import CapturedStates
from kvtide.planner.traces import Trace
from kvtide.planner.workloads import parse
from kvtide.server.kv_events.block_hashes import VllmHashes
from kvtide.server.kv_events.block_table import BlockTable
from kvtide.server.kv_events.event_encoding import EventEncoder, TokenPacker, encode_batch
from kvtide.server.kv_events.index_feed import EventQueue, unpacked
from kvtide.server.kv_events.kv_event_settings import KVEventSettings
from kvtide.server.kv_events.kv_groups import kv_groups
from kvtide.server.kv_events.publisher import FEEDING_THREAD, Publisher
from kvtide.server.kv_events.publisher_counts import PublisherCounts
from kvtide.server.kv_events.publisher_messages import Feed
from kvtide.spec import ModelMemory

CALIBRATIONS = 10_000
LONGEST_NS = 20_000
"""A call that took longer was interrupted; it counts as so long."""
CONTESTANTS = ("full", "window", "recurrent", "deepseek-v4-learned")
WORKLOADS = ("chat:users=40", "agent:sessions=6", "rag:requests=200")
CAPACITY_TOKENS = 100_000
"""Or twice the longest prompt, if that is more."""
PAGE_TOKENS = 64

UNBOUNDED = 1 << 30
TOGETHER = 8
"""Requests whose events are fed at once: a server of 400 a second has so many in 20 ms."""

ANY_PORT = "tcp://127.0.0.1:0"
TURNS = 7

Timings = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class EventCost:
    """Per request: events, what the index takes without them, what they take of the engine's
    thread, of the feeding thread and of the publisher's process, and what that sends.

    fraction      of the index's time that the engine's thread takes for events
    all_fraction  that all threads of the engine's process take
    """

    contestant: str
    workload: str
    events: float
    index_us: float
    event_us: float
    feeding_us: float
    process_us: float
    sent_bytes: float

    @property
    def fraction(self) -> float:
        return self.event_us / self.index_us

    @property
    def all_fraction(self) -> float:
        return (self.event_us + self.feeding_us) / self.index_us


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


def measure(
    name: str, trace: Trace, capacity_tokens: int, page_tokens: int, together: int = 1
) -> EventCost:
    """Replay a trace over a contestant of `kvtide bench index`, followed by a queue whose events
    are fed after so many requests."""
    added_inside, added_outside = _calibrated()
    made = contestant(name)(capacity_tokens, page_tokens)
    index: Index = made.index
    queue = EventQueue(kv_groups(index.memory), lambda: None, PublisherCounts(), UNBOUNDED)
    queue.read(index)
    source = index.event_source
    timed = [_Timed(source.stored), _Timed(source.removed)]
    source.stored, source.removed = timed  # type: ignore[method-assign, assignment]
    timings: Timings = {op: [] for op in ("match", "lock", "alloc", "insert", "unlock")}
    feeding_ns, feeds = 0, list[bytes]()
    gc.collect()
    gc.freeze()  # As a server does.
    with _reader() as connection:
        for number, request in enumerate(trace, 1):
            handle = made.start(made.prepare(number, request.prompt), timings)
            made.finish(handle, timings)
            if number % together == 0 or number == trace.requests:
                feeding_ns += _feed(queue, connection, feeds)
    gc.unfreeze()
    calls = sum(one.calls for one in timed)
    events_ns = sum(one.ns for one in timed) - calls * added_inside
    index_ns = sum(sum(values) for values in timings.values()) - calls * added_outside - events_ns
    process_ns, sent_bytes = _publish(index, feeds)
    per_request = 1e-3 / trace.requests
    return EventCost(
        name,
        trace.name,
        calls / trace.requests,
        index_ns * per_request,
        events_ns * per_request,
        feeding_ns * per_request,
        process_ns * per_request,
        sent_bytes / trace.requests,
    )


@contextmanager
def _reader() -> Iterator[Connection]:
    """A connection to a process that reads what comes, and does nothing with it."""
    mine, its = Pipe()
    with its:
        reads = subprocess.Popen(["cat"], stdin=its.fileno(), stdout=subprocess.DEVNULL)
    with mine:
        yield mine
    reads.wait()


def _feed(queue: EventQueue, connection: Connection, feeds: list[bytes]) -> int:
    """The CPU time of packing what has happened and writing it to the other process."""
    began = time.thread_time_ns()
    while changes := queue.take():
        packed = Feed(changes).packed()
        connection.send_bytes(packed)
        feeds.append(packed)
    return time.thread_time_ns() - began


def _publish(index: Index, feeds: Sequence[bytes]) -> tuple[int, int]:
    """The CPU time of hashing and encoding these feeds, each as a batch, and the batches' bytes."""
    hashes = VllmHashes()
    page_tokens = index.memory.page_tokens
    groups, pack = kv_groups(index.memory), TokenPacker(page_tokens)
    table = BlockTable(groups, hashes, page_tokens, pack)
    table.whole = True
    encoder = EventEncoder(hashes, page_tokens)
    began, sent_bytes = time.thread_time_ns(), 0
    for feed in feeds:
        for change in Feed.unpacked(feed).changes.packed:
            table.hear(unpacked(change))
        table.settle()
        sent_bytes += len(encode_batch(encoder.events(table.take())))
    return time.thread_time_ns() - began, sent_bytes


# -- by step --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What an engine serves in a turn. With one output token nearly all steps prefill."""

    memory: str
    output_tokens: int
    model_ms: float
    requests: int = 32
    batch: int = 32
    prompt_tokens: int = 2048


STEP_LOADS = [
    StepLoad(memory, output_tokens, model_ms)
    for memory in ("full", "window")
    for output_tokens in (1, 128)
    for model_ms in (0.0, 10.0)
]


@dataclass(frozen=True, slots=True)
class StepEventCost:
    """Milliseconds per step without a publisher and with one, which has sent so many events.

    ratio         the median of the turns' ratios
    engine_ratio  the same of the CPU time of the engine's thread
    all_ratio     the same of the CPU time of all threads of the engine's process
    feeding_ms    CPU time of the feeding thread per step
    process_ms    CPU time of the publisher's process per step
    """

    load: StepLoad
    events: int
    quiet_ms: float
    published_ms: float
    ratio: float
    engine_ratio: float
    all_ratio: float
    feeding_ms: float
    process_ms: float


class _Waiting(Idle):
    """A model that waits so long, as for a device, and leaves the interpreter to other threads."""

    def __init__(self, memory: ModelMemory, model_ms: float) -> None:
        super().__init__(memory)
        self._wait_s = model_ms / 1e3

    def forward(
        self, step: Step, before: torch.Tensor | None = None, captured: CapturedStates | None = None
    ) -> torch.Tensor:
        if self._wait_s:
            time.sleep(self._wait_s)
        return super().forward(step, before, captured)


class ServedTurn(NamedTuple):
    """Steps, and milliseconds per step: of time; of CPU of the engine's thread, of all threads of
    the process, and of the feeding thread, each until all is fed."""

    steps: int
    took_ms: float
    engine_ms: float
    all_ms: float
    feeding_ms: float


class _Serving:
    """An engine that serves new prompts, and evicts those of earlier turns."""

    def __init__(self, load: StepLoad) -> None:
        self._load = load
        max_tokens = 2 * load.batch * (load.prompt_tokens + load.output_tokens + 2 * PAGE)
        cache, memory = idle_cache(load.memory, max_tokens)
        model = _Waiting(memory, load.model_ms)
        self._engine = Engine(model, cache, chunk_tokens=CHUNK, max_running=load.batch)
        self.index: Index = cache.index
        self.close = cache.close
        self._number = 0

    def run(self, settled: Callable[[], bool]) -> ServedTurn:
        """Serve the load, and wait until all is settled."""
        load, engine, steps = self._load, self._engine, 0
        for _ in range(load.requests):
            self._number += 1
            at = np.arange(load.prompt_tokens) * 31
            prompt = (at + self._number * 7919) % VOCABULARY
            prompt[0] = self._number % VOCABULARY
            engine.submit(RequestParams(tuple(prompt.tolist()), load.output_tokens))
        began, of_all, of_engine = time.perf_counter(), time.process_time(), time.thread_time()
        fed = feeding_seconds()
        while not engine.idle:
            engine.step()
            steps += 1
        took, of_engine = time.perf_counter() - began, time.thread_time() - of_engine
        of_all, fed_meanwhile = time.process_time() - of_all, feeding_seconds() - fed
        while not settled():
            time.sleep(0.02)
        feeding = feeding_seconds() - fed
        of_all += feeding - fed_meanwhile  # Without what the waiting takes.
        return ServedTurn(steps, *(s * 1e3 / steps for s in (took, of_engine, of_all, feeding)))


def feeding_seconds() -> float:
    """CPU time of the thread that feeds a publisher's process, so far; 0 without one."""
    found = [each.ident for each in threading.enumerate() if each.name == FEEDING_THREAD]
    clocks = [time.pthread_getcpuclockid(number) for number in found if number is not None]
    return sum(map(time.clock_gettime, clocks))


def measure_steps(load: StepLoad, turns: int) -> StepEventCost:
    """Serve a load alternately on an engine without a publisher and on one that has one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # As in `step_cost`.
    quiet, followed = _Serving(load), _Serving(load)
    publisher = Publisher(KVEventSettings(ANY_PORT, ANY_PORT), followed.index, lambda: None)
    turns_taken: list[tuple[ServedTurn, ServedTurn]] = []
    try:
        publisher.read(followed.index)
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.subscribe("")
            subscriber.connect(publisher.endpoint)
            for turn in range(-1, turns):  # One turn to warm up.
                if turn == 0:
                    began_s = cpu_seconds(publisher.process_id)
                order = (quiet, followed) if turn % 2 else (followed, quiet)
                took = {one: one.run(lambda: not publisher.waiting) for one in order}
                if turn >= 0:
                    turns_taken.append((took[quiet], took[followed]))
        process_s = cpu_seconds(publisher.process_id) - began_s
        events = sum(publisher.counts.events.values())
    finally:
        publisher.close()
        quiet.close()
        followed.close()
        torch.set_num_threads(threads)
    steps = sum(beside.steps for _, beside in turns_taken)
    pairs = [(beside, alone) for alone, beside in turns_taken]
    return StepEventCost(
        load,
        events,
        statistics.median(alone.took_ms for _, alone in pairs),
        statistics.median(beside.took_ms for beside, _ in pairs),
        statistics.median(beside.took_ms / alone.took_ms for beside, alone in pairs),
        statistics.median(beside.engine_ms / alone.engine_ms for beside, alone in pairs),
        statistics.median(beside.all_ms / alone.all_ms for beside, alone in pairs),
        statistics.median(beside.feeding_ms for beside, _ in pairs),
        process_s * 1e3 / steps,
    )


def cpu_seconds(process: int) -> float:
    """Of all threads of a process, so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_steps(loads: Sequence[StepLoad], turns: int) -> None:
    print(
        "| memory | output | model ms | step ms, quiet | published | ratio | engine's CPU | "
        "all CPU | feeding ms | process ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for load in loads:
        cost = measure_steps(load, turns)
        print(
            f"| {load.memory} | {load.output_tokens} | {load.model_ms:g} | {cost.quiet_ms:.2f} | "
            f"{cost.published_ms:.2f} | {cost.ratio:.2f} | {cost.engine_ratio:.2f} | "
            f"{cost.all_ratio:.2f} | {cost.feeding_ms:.2f} | {cost.process_ms:.2f} |",
            flush=True,
        )


# -- the command ----------------------------------------------------------------------------


def print_requests() -> None:
    print(
        "| index | workload | events | index µs | engine's thread µs | of the index | "
        f"feeding µs | of {TOGETHER} together | all threads, of the index | "
        f"with {TOGETHER} together | process µs | bytes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name in CONTESTANTS:
        for workload in WORKLOADS:
            trace = parse(workload)
            capacity_tokens = max(CAPACITY_TOKENS, 2 * trace.longest_tokens)
            cost, more = (
                measure(name, trace, capacity_tokens, PAGE_TOKENS, together)
                for together in (1, TOGETHER)
            )
            print(
                f"| {name} | {workload} | {cost.events:.2f} | {cost.index_us:.1f} | "
                f"{cost.event_us:.2f} | {cost.fraction:.1%} | {cost.feeding_us:.1f} | "
                f"{more.feeding_us:.1f} | {cost.all_fraction:.1%} | {more.all_fraction:.1%} | "
                f"{cost.process_us:.0f} | {cost.sent_bytes:,.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="What KV events cost.")
    parser.add_argument("--steps", action="store_true", help="by step of an engine")
    parser.add_argument("--turns", type=int, default=TURNS, help="of steps; medians are shown")
    args = parser.parse_args()
    if args.steps:
        print_steps(STEP_LOADS, args.turns)
    else:
        print_requests()


if __name__ == "__main__":
    main()
