"""Which of several prefill servers gets a prompt: affinity, load, and servers that go and come."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvtide.engine import CheckedRequest, RequestParams
from kvtide.index.keys import pack
from kvtide.server.handoff import prefill_servers
from kvtide.server.handoff.prefill_servers import (
    AFFINITY_LEAD,
    AFFINITY_TOKENS,
    PrefillServers,
)

LEAST = 16
RETRY_S = 0.02
BEGINNINGS = range(12)
Test = Callable[[], Coroutine[Any, Any, None]]


class Answering:
    """A prefill server as its peers see it over HTTP. `port`: where it listens for handoffs."""

    def __init__(self, port: int) -> None:
        self.port, self.asked = port, 0
        self.hands_over = True
        self.late_s = 0.0
        self._http_port = 0
        self._runner: web.AppRunner | None = None

    async def _server_info(self, request: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.late_s)
        place = {"hands_over": self.hands_over, "host": "127.0.0.1", "port": self.port}
        return web.json_response({"handoff": place})

    async def start(self) -> None:
        """Under the same URL again if it was stopped."""
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._http_port).start()
        self._http_port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Stage:
    """Two servers, and how many handoffs each has, by its address."""

    def __init__(self, pair: tuple[Answering, Answering]) -> None:
        self.pair = pair
        self.loads: Counter[str] = Counter()
        self.servers = PrefillServers([one.url for one in pair], LEAST, self.loads.__getitem__)

    async def chosen(self, beginning: int, **params: Any) -> str | None:
        """The address that a prompt with this beginning goes to."""
        tokens = (beginning,) * AFFINITY_TOKENS + (5, 6, 7)
        return await self.chosen_for(tokens, **params)

    async def chosen_for(self, tokens: tuple[int, ...], **params: Any) -> str | None:
        given = RequestParams(tokens, **{"max_tokens": 4, **params})
        handed = await self.servers.hand_over(CheckedRequest(given, pack(tokens)))
        source = handed.params.handoff_from
        return None if source is None else source.peer

    async def all_chosen(self) -> list[str | None]:
        return [await self.chosen(number) for number in BEGINNINGS]

    async def until(self, holds: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        async with asyncio.timeout(60):
            while not await holds():
                await asyncio.sleep(RETRY_S / 4)


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    pair = Answering(9001), Answering(9002)
    for one in pair:
        await one.start()
    yield Stage(pair)
    for one in pair:
        await one.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_servers, "RETRY_S", RETRY_S)


def in_a_loop(test: Test) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_prompts_with_the_same_beginning_go_to_the_same_server() -> None:
    async with stage() as on:
        # The first prompt may go where the address came first.
        await on.until(lambda: both_known(on))
        first, again = await on.all_chosen(), await on.all_chosen()
        assert first == again
        assert set(first) == {one.address for one in on.pair}, "all went to one server"
        longer = (3,) * AFFINITY_TOKENS + (8,) * 90
        assert await on.chosen_for(longer) == await on.chosen(3)
        assert [one.asked for one in on.pair] == [1, 1]


async def both_known(on: Stage) -> bool:
    await on.chosen(0)
    return all(each["address"] for each in on.servers.report().values())


@in_a_loop
async def test_a_server_with_much_more_to_do_is_left_out() -> None:
    async with stage() as on:
        await on.until(lambda: both_known(on))
        preferred = await on.chosen(1)
        assert preferred is not None
        (other,) = {one.address for one in on.pair} - {preferred}
        on.loads.update({preferred: AFFINITY_LEAD + 1, other: 1})
        assert await on.chosen(1) == preferred, "its lead is small"
        on.loads[preferred] += 1
        assert await on.chosen(1) == other
        on.loads.clear()
        assert await on.chosen(1) == preferred


@in_a_loop
async def test_a_server_that_dies_is_left_out_until_it_comes_back() -> None:
    """It listens for handoffs elsewhere then. Prompts of the other one stay where they were."""
    async with stage() as on:
        await on.until(lambda: both_known(on))
        before = await on.all_chosen()
        dies, stays = on.pair
        old = dies.address
        await dies.stop()
        on.servers.forget(old)
        assert set(await on.all_chosen()) == {stays.address}
        await on.until(lambda: has_failed(on, dies))
        dies.port = 9003
        await dies.start()
        await on.until(lambda: both_known(on))
        assert await on.all_chosen() == [dies.address if one == old else one for one in before]


async def has_failed(on: Stage, server: Answering) -> bool:
    await on.chosen(0)
    return bool(on.servers.report()[server.url]["last_error"])


@in_a_loop
async def test_without_any_server_prompts_are_prefilled_here() -> None:
    async with stage() as on:
        for one in on.pair:
            await one.stop()
        assert await on.all_chosen() == [None] * len(BEGINNINGS)
        await on.pair[1].start()
        await on.until(lambda: goes_to(on, on.pair[1]))


async def goes_to(on: Stage, server: Answering) -> bool:
    return await on.chosen(2) == server.address


@in_a_loop
async def test_a_server_that_hands_nothing_over_is_named_and_left_out() -> None:
    async with stage() as on:
        plain, other = on.pair
        plain.hands_over = False
        await on.until(lambda: has_failed(on, plain))
        assert set(await on.all_chosen()) == {other.address}
        error = on.servers.report()[plain.url]["last_error"]
        assert error == "it hands no pages over; start it with --role prefill"


def test_no_request_waits_for_a_late_server_where_another_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("ASK_S", "WAIT_S"):
        monkeypatch.setattr(prefill_servers, limit, 600.0)

    async def run() -> None:
        async with stage() as on:
            late, other = on.pair
            late.late_s = 600.0
            async with asyncio.timeout(60):
                assert set(await on.all_chosen()) == {other.address}

    asyncio.run(run())


@in_a_loop
async def test_some_requests_are_never_handed_over() -> None:
    async with stage() as on:
        await on.until(lambda: both_known(on))
        assert await on.chosen_for((1,) * LEAST) is None
        assert await on.chosen_for((1,) * (LEAST + 1)) is not None
        assert await on.chosen(1, max_tokens=0) is None
        assert await on.chosen(1, recompute=True) is None
