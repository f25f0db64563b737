"""What viewers cost: under 1% of the time of steps, with ten of them at a thousand requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
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


@pytest.mark.full
def test_ten_viewers_of_a_busy_server_cost_less_than_a_hundredth_of_its_steps(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU seconds against the time of steps: other processes slow both down, and snapshots come
    once a second however slow the steps are."""
    server: InProcess = serve(device_tokens=200_000, max_waiting=2 * REQUESTS)
    spent = {"steps": 0.0, "cpu": 0.0}
    step = server.engine.step

    def timed() -> Any:
        began, cpu = time.monotonic(), time.thread_time()
        try:
            return step()
        finally:
            spent["steps"] += time.monotonic() - began
            spent["cpu"] += time.thread_time() - cpu

    monkeypatch.setattr(server.engine, "step", timed)
    checked = [
        server.engine.check(RequestParams((number % 256, number // 256, *[9] * 3 * PAGE), 2000))
        for number in range(REQUESTS)
    ]
    streams = server.on_loop(lambda: server.service.submit(checked)).streams
    publisher = server.app.live.publisher
    with ExitStack() as viewers:
        watching = [viewers.enter_context(frames(server)) for _ in range(10)]
        for viewer in watching:
            next(viewer)
        assert publisher.viewers == 10
        before = dict(spent)
        cost = publisher.snapshots.engine_s + publisher.encode_s
        until(lambda: spent["steps"] - before["steps"] > 8.0)
        cost = publisher.snapshots.engine_s + publisher.encode_s - cost
        fraction, of_cpu = (cost / (spent[name] - before[name]) for name in ("steps", "cpu"))
        seen = next(watching[0])
        assert seen["requests"]["total"] == REQUESTS
    server.on_loop(lambda: server.service.abort(streams))
    until(lambda: server.engine.idle)
    print(
        f"ten viewers, {REQUESTS} requests: {100 * fraction:.2f}% of the time of steps, "
        f"{100 * of_cpu:.2f}% of the CPU time that they got"
    )
    assert fraction < MAX_FRACTION
