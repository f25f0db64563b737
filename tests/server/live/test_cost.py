"""What viewers cost: under 1% of the time of steps, with ten of them at a thousand requests."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtide.engine import Engine, RequestParams
from kvtide.server.live.engine_snapshot import SLICE_NODES, SLICE_S, EngineSnapshots
from kvtide.server.live.live_publisher import INTERVAL_S, SLICES
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import open_engine
from tests.server.live.watching import frames, until
from tests.server.serving import PAGE, InProcess

MAX_FRACTION = 0.01
REQUESTS = 1000
NODES = 1500
TURNS, TURN_S = 5, 3.0


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> Iterator[Engine]:
    """A thousand requests, 64 of them running, over a tree of more nodes than a slice visits."""
    settings = Settings(
        model=str(model_folder), page_tokens=PAGE, storage="none", device_tokens=200_000
    )
    engine = open_engine(settings).engine
    index = engine.cache.index
    for number in range(NODES):
        prompt = index.prompt([number % 7] * PAGE + [number % 300, number // 300] * PAGE + [0])
        lease = index.pin(index.match(prompt))
        assert index.reserve(lease, prompt.tokens)
        index.commit(lease, prompt.tokens)
        index.release(lease)
    for number in range(REQUESTS):
        engine.submit(RequestParams((number % 256, number // 256, *[9] * 3 * PAGE), 64))
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) + engine.scheduler.waiting == REQUESTS
    yield engine
    for request in (*engine.scheduler.running, *engine.scheduler.queued):
        engine.abort(request)
    engine.cache.close()


def test_an_interval_costs_less_than_a_hundredth_of_its_steps(loaded: Engine) -> None:
    """An engine that is never idle has as many seconds of steps as an interval has."""
    snapshots = EngineSnapshots(tokens=False)
    snapshots.survey_every_s = 0.0
    costs = []
    for _ in range(9):
        before = snapshots.engine_s
        snapshots.take(loaded)
        for _ in range(SLICES - 1):
            snapshots.survey(loaded)
        costs.append(snapshots.engine_s - before)
    assert 0 < statistics.median(costs) < MAX_FRACTION * INTERVAL_S


def test_a_slice_ends_in_time_whatever_the_tree_has(loaded: Engine) -> None:
    """By a clock that goes on by a third of a slice whenever it is read."""
    readings = count()
    snapshots = EngineSnapshots(tokens=False, clock=lambda: next(readings) * SLICE_S / 3)
    snapshots.take(loaded)
    slices = []
    more = True
    while more:
        began = snapshots.engine_s
        more = snapshots.survey(loaded)
        slices.append(snapshots.engine_s - began)
    nodes = loaded.cache.index.tree.nodes
    assert nodes > NODES
    # At most three readings fit in a slice, and one more ends it.
    assert len(slices) > nodes // (4 * SLICE_NODES) and max(slices) < 2 * SLICE_S
    outline = snapshots.take(loaded)["tree"]
    assert outline.nodes == nodes
    assert snapshots.take(loaded)["tree"] is outline, "an outline is good for a while"


def test_a_slice_takes_little_more_time_than_it_may(loaded: Engine) -> None:
    snapshots = EngineSnapshots(tokens=False)
    snapshots.survey_every_s = 0.0
    slices = []
    for _ in range(9):
        snapshots.take(loaded)
        began = snapshots.engine_s
        snapshots.survey(loaded)
        slices.append(snapshots.engine_s - began)
    assert 0 < statistics.median(slices) < 3 * SLICE_S


@dataclass
class Turn:
    """Seconds of so many steps: of time, and of CPU of the engine's thread and the event loop's."""

    steps: int = 0
    took: float = 0.0
    engine_cpu: float = 0.0
    loop_cpu: float = 0.0

    @property
    def step_s(self) -> float:
        return self.took / self.steps

    @property
    def cpu_per_step_s(self) -> float:
        return (self.engine_cpu + self.loop_cpu) / self.steps


class Watched:
    """A server whose steps are timed."""

    def __init__(self, server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._turn = Turn()
        self._step = server.engine.step
        monkeypatch.setattr(server.engine, "step", self._timed)
        thread = server.on_loop(threading.get_ident)
        self._loop_clock = time.pthread_getcpuclockid(thread)

    def _timed(self) -> Any:
        began, cpu, turn = time.monotonic(), time.thread_time(), self._turn
        try:
            return self._step()
        finally:
            turn.steps += 1
            turn.took += time.monotonic() - began
            turn.engine_cpu += time.thread_time() - cpu

    def turn(self, viewers: int) -> Turn:
        """Some seconds of steps with so many viewers, which take in all that comes."""
        with ExitStack() as opened:
            watching = [opened.enter_context(frames(self._server)) for _ in range(viewers)]
            for viewer in watching:
                next(viewer)
            snapshots = self._server.app.live.publisher.snapshots
            self._turn, turn = (found := Turn()), found
            loop, engine = time.clock_gettime(self._loop_clock), snapshots.engine_s
            until(lambda: turn.took > TURN_S)
            self._turn = Turn()
            turn.loop_cpu = time.clock_gettime(self._loop_clock) - loop
            turn.engine_cpu += snapshots.engine_s - engine  # Between two steps.
            for viewer in watching:
                assert next(viewer)["requests"]["total"] == REQUESTS
        return turn


@pytest.mark.full
def test_ten_viewers_of_a_busy_server_cost_less_than_a_hundredth_of_its_steps(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CPU: other processes slow steps down, and snapshots come once a second however slow they
    are. Turns with ten viewers and without are compared, for what snapshots do not count."""
    server: InProcess = serve(device_tokens=200_000, max_waiting=2 * REQUESTS)
    checked = [
        server.engine.check(RequestParams((number % 256, number // 256, *[9] * 3 * PAGE), 2000))
        for number in range(REQUESTS)
    ]
    streams = server.on_loop(lambda: server.service.submit(checked)).streams
    publisher, watched = server.app.live.publisher, Watched(server, monkeypatch)
    watched.turn(0)
    pairs = []
    for number in range(TURNS):
        spent = publisher.snapshots.engine_s + publisher.encode_s
        turns = {viewers: watched.turn(viewers) for viewers in ((0, 10) if number % 2 else (10, 0))}
        spent = publisher.snapshots.engine_s + publisher.encode_s - spent
        pairs.append((turns[10], turns[0], spent))
    server.on_loop(lambda: server.service.abort(streams))
    until(lambda: server.engine.idle)

    of_steps = statistics.median(spent / seen.took for seen, _, spent in pairs)
    of_cpu = statistics.median(spent / seen.engine_cpu for seen, _, spent in pairs)
    more_cpu = statistics.median(a.cpu_per_step_s / b.cpu_per_step_s - 1 for a, b, _ in pairs)
    loop = statistics.median((a.loop_cpu - b.loop_cpu) / TURN_S for a, b, _ in pairs)
    longer = statistics.median(a.step_s / b.step_s - 1 for a, b, _ in pairs)
    print(
        f"ten viewers, {REQUESTS} requests, {TURNS} turns: snapshots and encoding take "
        f"{of_steps:.2%} of the time of steps, {of_cpu:.2%} of their CPU time; with viewers, both "
        f"threads take {more_cpu:+.2%} of CPU a step, the event loop {loop:+.2%} of a core, and a "
        f"step {longer:+.2%} of time"
    )
    assert of_steps < MAX_FRACTION
    assert loop < 5 * MAX_FRACTION
