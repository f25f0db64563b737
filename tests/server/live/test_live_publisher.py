"""One publisher for all viewers: slow ones, long steps, snapshots that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvtide.server.live import live_publisher as publishing
from kvtide.server.live.engine_snapshot import TreeOutline
from kvtide.server.live.finished import FinishedRequests
from kvtide.server.live.live_publisher import LivePublisher, ServedModel
from kvtide.server.rate_estimate import RateEstimate
from kvtide.server.service import ServiceEndedError
from kvtide.spec import RankShape

SERVED = ServedModel("tiny", 16, "cpu", RankShape(2, 2))


class Snapshots:
    """Counts what is taken; `given` says what comes next."""

    engine_s = 0.0

    def __init__(self, given: Callable[[int], Any]) -> None:
        self.given, self.taken, self.forgotten = given, 0, 0

    def take(self, engine: Any) -> Any:
        self.taken += 1
        return self.given(self.taken)

    def survey(self, engine: Any) -> bool:
        return False

    def forget(self) -> None:
        self.forgotten += 1


class Engineless:
    """A service whose engine thread is the caller; it is in a step for `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.rate, self.step_s = RateEstimate(), step_s

    async def call(self, function: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(self.step_s)
        return function(None)


def taken(number: int, *, moved: int = 0) -> dict[str, Any]:
    """The parts of a snapshot that the publisher works on."""
    return {
        "number": number,
        "tick": number,
        "loading_s": 0.5,
        "flows": {"load": {"bytes": moved}},
        "tokens": {"device": 10 * number, "computed": number},
        "misses": {"last": []},
        "requests": {"rows": []},
        "tree": TreeOutline(publishing.TreeBranch(), 0, 0.0),
    }


def publisher(
    given: Callable[[int], Any] = taken, step_s: float = 0.0, interval_s: float = 0.005
) -> tuple[LivePublisher, Snapshots]:
    service: Any = Engineless(step_s)
    made = LivePublisher(
        service, FinishedRequests(service.rate, lambda: 0), SERVED, interval_s=interval_s
    )
    snapshots: Any = Snapshots(given)
    made.snapshots = snapshots
    return made, snapshots


def read(frame: bytes) -> Any:
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n")
    return json.loads(frame[6:])


def test_a_slow_viewer_misses_frames_and_delays_no_other() -> None:
    async def watch() -> tuple[list[int], list[int]]:
        made, _ = publisher(interval_s=0.1)  # A busy machine stalls for less.
        slow, quick = made.frames(), made.frames()
        seen_slowly = [read(await anext(slow))["number"]]
        seen = [read(await anext(quick))["number"] for _ in range(20)]
        seen_slowly.append(read(await anext(slow))["number"])
        await slow.aclose()
        await quick.aclose()
        return seen_slowly, seen

    slowly, quickly = asyncio.run(watch())
    assert quickly == list(range(quickly[0], quickly[0] + 20))
    assert slowly[1] >= quickly[-1]


def test_it_stops_with_the_last_viewer_and_begins_anew_with_the_next() -> None:
    async def watch() -> tuple[int, int, int]:
        made, snapshots = publisher()
        for _ in range(2):
            one, other = made.frames(), made.frames()
            await anext(one)
            await anext(other)
            await one.aclose()
            assert (made.viewers, snapshots.forgotten) == (1, _)
            await anext(other)
            await other.aclose()
        stopped = snapshots.taken
        await asyncio.sleep(0.05)
        return stopped, snapshots.taken, snapshots.forgotten

    stopped, later, forgotten = asyncio.run(watch())
    assert stopped == later > 2
    assert forgotten == 2


def test_during_a_long_step_viewers_hear_that_the_server_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "SILENT_S", 0.01)

    async def watch() -> bytes:
        made, _ = publisher(step_s=60.0)
        one = made.frames()
        first = await anext(one)
        await one.aclose()
        return first

    assert asyncio.run(watch()).startswith(b": ")


@pytest.mark.parametrize("error", [ServiceEndedError("over"), ValueError("a defect")])
def test_streams_end_when_no_more_can_come(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def given(number: int) -> Any:
        if number == 2:
            raise error
        return taken(number)

    async def watch() -> int:
        made, _ = publisher(given)
        return len([frame async for frame in made.frames()])

    assert asyncio.run(watch()) == 1
    assert ("the live page broke" in caplog.text) == isinstance(error, ValueError)


def test_rates_are_changes_per_second_and_never_negative() -> None:
    moved = [0, 1_000_000, 0]  # Another store was attached: its counters begin anew.

    async def watch() -> list[Any]:
        made, _ = publisher(lambda n: taken(n, moved=moved[min(n, 3) - 1]), interval_s=0.05)
        one = made.frames()
        seen = [read(await anext(one)) for _ in range(3)]
        await one.aclose()
        return seen

    first, second, third = asyncio.run(watch())
    passed = second["time"] - first["time"]
    assert first["token_rates"] == {"device": 0, "computed": 0}
    assert second["flows"]["load"]["bytes_s"] == pytest.approx(1_000_000 / passed, rel=0.2)
    assert second["token_rates"]["device"] == pytest.approx(10 / passed, rel=0.2)
    assert third["flows"]["load"]["bytes_s"] == 0


def test_what_is_saved_is_less_what_was_spent_on_loading_and_times_the_ranks() -> None:
    made, _ = publisher()
    made._service.rate.stepped(100, 1.0, 0)
    made._finished.saved.add(250)
    parts = taken(1)
    del parts["tree"]
    saved = made.snapshot(parts)["saved"]
    assert (saved["prefill_s"], saved["loading_s"], saved["seconds"]) == (2.5, 0.5, 2.0)
    assert (saved["rank_seconds"], saved["tokens"]) == (8.0, 250)
