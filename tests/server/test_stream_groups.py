"""When a step's updates reach the event loop, and how their reader takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engine import Finish, Update
from kvtide.server.service import ResponseStream, Service, ServiceEndedError, StreamGroup


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


def update(request: Any, text: str, finish: Finish | None = None) -> Update:
    return Update(request, None, text, finish)


def group(count: int = 1) -> StreamGroup:
    requests: list[Any] = [object() for _ in range(count)]
    return StreamGroup([ResponseStream(r, number, 0.0) for number, r in enumerate(requests)])


def put(of: StreamGroup, number: int, text: str, finish: Finish | None = None) -> None:
    stream = of.streams[number]
    of.put(stream, update(stream.request, text, finish), 1.0)


def texts(came: list[tuple[ResponseStream, Update]]) -> list[tuple[int, str]]:
    return [(stream.number, one.text) for stream, one in came]


# -- one reader -----------------------------------------------------------------------------------


@in_loop
async def test_what_comes_while_the_reader_writes_is_taken_together() -> None:
    two = group(2)
    reading = asyncio.ensure_future(two.take())
    await asyncio.sleep(0)
    put(two, 1, "a")
    put(two, 0, "b")
    assert texts(await reading) == [(1, "a"), (0, "b")]
    put(two, 0, "c", Finish.STOP)
    put(two, 1, "d")
    assert texts(await two.take()) == [(0, "c"), (1, "d")]
    assert two.open, "the second choice goes on"
    put(two, 1, "", Finish.LENGTH)
    assert two.open and texts(await two.take()) == [(1, "")]
    assert not two.open
    assert [stream.ended for stream in two.streams] == [1.0, 1.0]


@in_loop
async def test_the_reader_of_a_whole_response_is_woken_once() -> None:
    two = group(2)
    reading = asyncio.ensure_future(two.whole())
    for number, text in enumerate("abc"):
        await asyncio.sleep(0)
        put(two, number % 2, text, Finish.STOP if number else None)
        assert not reading.done()
        await asyncio.sleep(0)
        assert reading.done() == (number == 2)
    assert texts(await reading) == [(0, "a"), (1, "b"), (0, "c")]
    assert texts(await two.whole()) == [(0, "a"), (1, "b"), (0, "c")], "all have ended by now"


@in_loop
async def test_an_error_comes_behind_the_updates_before_it() -> None:
    one = group()
    put(one, 0, "a")
    one.fail(ServiceEndedError("over"))
    assert texts(await one.take()) == [(0, "a")]
    with pytest.raises(ServiceEndedError, match="over"):
        await one.take()
    with pytest.raises(ServiceEndedError, match="over"):
        await one.whole()


@in_loop
async def test_an_error_ends_a_reader_that_waits() -> None:
    for wait in (StreamGroup.take, StreamGroup.whole):
        one = group()
        reading = asyncio.ensure_future(wait(one))
        await asyncio.sleep(0)
        one.fail(ServiceEndedError("over"))
        with pytest.raises(ServiceEndedError):
            await reading


# -- when they come -------------------------------------------------------------------------------


class ScriptedEngine:
    """Runs one step after another as the test lets it; the engine thread waits in between."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(max_running=4, waiting=0, running=[])
        self.cache = SimpleNamespace(
            busy=False,
            unsettled=False,
            sessions=SimpleNamespace(next_expiry=None, tick=lambda now: None),
        )
        self.token_s, self.computed, self.idle = 0.0, 1, True
        self.on_waiting: Callable[[], None] = lambda: None
        self.script: list[Callable[[], list[Update]]] = []

    def step(self) -> list[Update]:
        updates = self.script.pop(0)()
        self.idle = not self.script
        return updates


class Stand:
    """A service over a scripted engine, with one stream whose updates are noted as they arrive."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        leader: Any = SimpleNamespace(
            engine=self.engine, diverged=None, run=lambda command: self.engine.step()
        )
        self.service = Service(leader, 4)
        self.group = group()
        self.request = self.group.streams[0].request
        self.loop = asyncio.get_running_loop()

    def arrived(self) -> str:
        """On the engine's thread: what the loop has by now of what was sent to it."""

        async def texts() -> str:
            return "".join(one.text for _, one in self.group._came)

        return asyncio.run_coroutine_threadsafe(texts(), self.loop).result(20)

    async def run(self, *script: Callable[[], list[Update]]) -> None:
        def begin(engine: Any) -> None:
            self.service._streams[self.request] = (self.group, self.group.streams[0])
            self.engine.script, self.engine.idle = [*script], False

        await self.service.call(begin)
        while self.engine.script:
            await asyncio.sleep(0.001)
        await self.service.call(lambda engine: None)


@in_loop
async def test_updates_wait_until_the_next_step_waits_for_the_device() -> None:
    at = Stand()
    seen: list[str] = []

    def step(text: str) -> Callable[[], list[Update]]:
        def run() -> list[Update]:
            seen.append(at.arrived())
            at.engine.on_waiting()
            seen.append(at.arrived())
            return [update(at.request, text)]

        return run

    await at.run(step("a"), step("b"), step("c"))
    assert seen == ["", "", "", "a", "a", "ab"]
    assert texts(await at.group.take()) == [(0, "a"), (0, "b"), (0, "c")], "none follows the last"
    assert await at.service.close()


@in_loop
async def test_updates_wait_for_no_step_that_computes_nothing() -> None:
    at = Stand()
    seen: list[str] = []

    def first_of_a_handoff() -> list[Update]:
        at.engine.computed = 0
        return [update(at.request, "a")]

    def blocked() -> list[Update]:
        seen.append(at.arrived())
        return []

    await at.run(first_of_a_handoff, blocked)
    assert seen == ["a"]
    assert await at.service.close()


@in_loop
async def test_updates_wait_for_a_step_without_a_wait_no_longer_than_its_end() -> None:
    at = Stand()
    seen: list[str] = []

    def step() -> list[Update]:
        at.engine.computed = 1
        return [update(at.request, "a")]

    def only_prefill() -> list[Update]:
        seen.append(at.arrived())
        return []

    await at.run(step, only_prefill, only_prefill)
    assert seen == ["", "a"]
    assert await at.service.close()


@in_loop
async def test_an_engine_that_breaks_leaves_the_updates_of_its_last_step() -> None:
    at = Stand()

    def breaks() -> list[Update]:
        raise RuntimeError("broken")

    with pytest.raises(ServiceEndedError):
        await at.run(lambda: [update(at.request, "a")], breaks)
    assert texts(await at.group.take()) == [(0, "a")]
    with pytest.raises(ServiceEndedError):
        await at.group.take()
