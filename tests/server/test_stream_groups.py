"""How the reader of a response takes the updates of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

from kvtide.engine import Finish, Update
from kvtide.server.service import ResponseStream, ServiceEndedError, StreamGroup


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
