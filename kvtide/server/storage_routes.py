"""`/admin/storage`: attach, replace, detach and clear a store while the server serves.

| route                       | what                                               | or else       |
|-----------------------------|----------------------------------------------------|---------------|
| GET    /admin/storage       | how it is used, and what the store says of itself  |               |
| PUT    /admin/storage       | {"url": …}: attach this one; another one is left   | 400, 504      |
| DELETE /admin/storage       | write what is in line, then detach                 | 202, 409      |
| POST   /admin/storage/clear | remove every page of this model from the store     | 202, 409, 502 |

Every rank has a store, for its own part of the pages; what is told here is the leader's.
202 says that it still goes on, 409 that no store is attached. All but PUT take
`?timeout_seconds=`; the body of PUT may have `timeout_seconds`, for the store that is left.

There is no POST that attaches: a browser would send one for any page it shows, while for PUT it
asks first, and is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

from aiohttp import web

from kvtide.cache import TierError
from kvtide.engine import Engine, RequestError
from kvtide.server.engine_commands import Attach, Clear, Detach, IsOpen, LetGo, Open
from kvtide.server.request_parsing import read_json
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.store_setup import Json, storage_report
from kvtide.storage import Store, StoreError, StoreStatus

T = TypeVar("T")

OPEN_S = 60.0
LEAVE_S = 10.0
STATUS_S = 5.0
CLEAR_S = 60.0
MAX_S = 3600.0
GRACE_S = 1.0
"""How much longer than asked for a detaching is waited for: giving up takes a moment too."""
_POLL_S = 0.01
_NONE = 'no store is attached; PUT {"url": …} to /admin/storage attaches one'


class StorageRoutes:
    """`draining` says whether it is too late to attach anything."""

    def __init__(self, service: Service, draining: Callable[[], bool]) -> None:
        self._service = service
        self._numbers = itertools.count()
        self._draining = draining

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/admin/storage", self._show),
            web.put("/admin/storage", self._attach),
            web.delete("/admin/storage", self._detach),
            web.post("/admin/storage/clear", self._clear),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, STATUS_S)
        report, asked = await self._service.call(
            lambda engine: (_report(engine), _asked(engine, lambda store: store.status()))
        )
        if asked is not None:
            report |= await _status(asked, timeout_s)
        return web.json_response(report)

    async def _attach(self, request: web.Request) -> web.Response:
        body = read_json(await request.read())
        url = body.text("url", "")
        if not url:
            raise RequestError('there is no url; send {"url": "file:///path?cap=200GB"}')
        timeout_s = _seconds(body.number("timeout_seconds", LEAVE_S))
        number = await self._opened(url)
        # Whoever asked may go now: it is attached all the same, or else it is closed.
        return web.json_response(await asyncio.shield(self._take(number, timeout_s)))

    async def _opened(self, url: str) -> int:
        """The number of a store that every rank has opened, or failed to."""
        number = next(self._numbers)
        try:
            await self._service.order(Open(number, url))
            deadline = asyncio.get_running_loop().time() + OPEN_S
            while not await self._service.order(IsOpen(number)):
                if asyncio.get_running_loop().time() > deadline:
                    raise web.HTTPGatewayTimeout(
                        text=f"the store is not open after {OPEN_S:g} s; see whether it runs, and "
                        "try again"
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self._service.leave(LetGo(number))
            raise
        return number

    async def _take(self, number: int, timeout_s: float) -> Json:
        try:
            if self._draining():
                raise ServiceEndedError("the server is shutting down; ask another one")
            await self._service.order(Attach(number, timeout_s))
        except (StoreError, TierError) as error:
            raise RequestError(str(error)) from None
        except BaseException:
            self._service.leave(LetGo(number))
            raise
        return await self._service.call(_report)

    async def _detach(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, LEAVE_S)
        left = await self._service.order(Detach(timeout_s))
        if not left and not await self._service.call(_is_leaving):
            raise web.HTTPConflict(text=_NONE)
        deadline = asyncio.get_running_loop().time() + timeout_s + GRACE_S
        while "name" in (report := await self._service.call(_report)) and not report["attached"]:
            if asyncio.get_running_loop().time() > deadline:
                return web.json_response(report, status=202)
            await asyncio.sleep(_POLL_S)
        return web.json_response({"attached": False})

    async def _clear(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, CLEAR_S)
        asked = await self._service.order(Clear())
        if asked is None:
            raise web.HTTPConflict(text=_NONE)
        try:
            removed = await _within(asked, timeout_s)
        except _NotYetError:
            return web.json_response({"over": False}, status=202)
        except Exception as error:  # Stores are anybody's.
            raise web.HTTPBadGateway(text=_said(error)) from None
        return web.json_response({"over": True, **asdict(removed)})


# -- on the engine's thread -------------------------------------------------------------------


def _report(engine: Engine) -> Json:
    return storage_report(engine.cache.storage.stats())


def _asked(engine: Engine, question: Callable[[Store], T]) -> Future[T] | None:
    return engine.cache.storage.ask(question)


def _is_leaving(engine: Engine) -> bool:
    """Whether a store is still being left."""
    return engine.cache.storage.stats() is not None


# -- pieces -----------------------------------------------------------------------------------


class _NotYetError(Exception):
    """Another thread is still at it."""


async def _within(answer: Future[T], timeout_s: float) -> T:
    """What another thread finds, if it does so in time; it goes on either way."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not answer.done():
        if asyncio.get_running_loop().time() > deadline:
            raise _NotYetError
        await asyncio.sleep(_POLL_S)
    return answer.result()


async def _status(asked: Future[StoreStatus], timeout_s: float) -> Json:
    """What the store says of itself, or why it says nothing."""
    try:
        status = await _within(asked, timeout_s)
    except _NotYetError:
        asked.cancel()
        return {"store": None, "problem": f"the store has not answered for {timeout_s:g} s"}
    except Exception as error:  # Stores are anybody's.
        return {"store": None, "problem": _said(error)}
    return {"store": asdict(status)}


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def _timeout(request: web.Request, usual: float) -> float:
    text = request.query.get("timeout_seconds")
    try:
        return _seconds(usual if text is None else float(text))
    except ValueError:
        raise RequestError(f"timeout_seconds is '{text}'; send a number of seconds") from None


def _seconds(value: float) -> float:
    if not 0 <= value <= MAX_S:
        raise RequestError(f"timeout_seconds is {value:g}; send 0 to {MAX_S:g}")
    return value
