"""`/admin/storage`: attach, replace, detach and clear a store while the server serves.

| route                       | what                                               | or else       |
|-----------------------------|----------------------------------------------------|---------------|
| GET    /admin/storage       | how it is used, and what the store says of itself  |               |
| PUT    /admin/storage       | {"url": …}: attach this one; another one is left   | 400, 504      |
| DELETE /admin/storage       | write what is in line, then detach                 | 202, 409      |
| POST   /admin/storage/clear | remove every page of this model from the store     | 202, 409, 502 |

202 says that it still goes on, 409 that no store is attached. All but PUT take
`?timeout_seconds=`; the body of PUT may have `timeout_seconds`, for the store that is left.

There is no POST that attaches: a browser would send one for any page it shows, while for PUT it
asks first, and is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

from aiohttp import web

from kvtide.cache import TierError
from kvtide.engine import Engine, RequestError
from kvtide.server.asking import read_json
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.storage import Json, beside, let_go, open_link, storage_report
from kvtide.storage import Store, StoreError, StoreStatus
from kvtide.transfer.store_link import StoreLink

T = TypeVar("T")

OPEN_S = 60.0
LEAVE_S = 10.0
STATUS_S = 5.0
CLEAR_S = 60.0
MOST_S = 3600.0
GRACE_S = 1.0
"""How much longer than asked for a detaching is waited for: giving up takes a moment too."""
_POLL_S = 0.01
_NONE = 'no store is attached; PUT {"url": …} to /admin/storage attaches one'


class StorageRoutes:
    """`draining` says whether it is too late to attach anything."""

    def __init__(self, service: Service, engine: Engine, draining: Callable[[], bool]) -> None:
        self._service = service
        self._cache = engine.cache
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
        link = await self._opened(url)
        # Whoever asked may go now: it is attached all the same, or else it is closed.
        attaching = asyncio.ensure_future(self._take(link, timeout_s))
        attaching.add_done_callback(lambda ended: _close_unless_attached(ended, link))
        return web.json_response(await asyncio.shield(attaching))

    async def _take(self, link: StoreLink, timeout_s: float) -> Json:
        if self._draining():
            raise ServiceEndedError("the server is shutting down; ask another one")
        return await self._service.call(lambda engine: _attach(engine, link, timeout_s))

    async def _opened(self, url: str) -> StoreLink:
        opening = beside(lambda: open_link(url, self._cache))
        try:
            return await _within(opening, OPEN_S)
        except (StoreError, TierError) as error:
            raise RequestError(str(error)) from None
        except _NotYetError:
            let_go(opening)
            raise web.HTTPGatewayTimeout(
                text=f"the store is not open after {OPEN_S:g} s; see whether it runs, and try again"
            ) from None
        except asyncio.CancelledError:
            let_go(opening)
            raise

    async def _detach(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, LEAVE_S)
        if not await self._service.call(lambda engine: _leave(engine, timeout_s)):
            raise web.HTTPConflict(text=_NONE)
        deadline = asyncio.get_running_loop().time() + timeout_s + GRACE_S
        while "name" in (report := await self._service.call(_report)) and not report["attached"]:
            if asyncio.get_running_loop().time() > deadline:
                return web.json_response(report, status=202)
            await asyncio.sleep(_POLL_S)
        return web.json_response({"attached": False})

    async def _clear(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, CLEAR_S)
        asked = await self._service.call(lambda engine: _asked(engine, lambda one: one.clear()))
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


def _attach(engine: Engine, link: StoreLink, timeout_s: float) -> Json:
    engine.cache.storage.detach(timeout_s)
    engine.cache.storage.attach(link)
    return _report(engine)


def _leave(engine: Engine, timeout_s: float) -> bool:
    """Begin to leave; False if there is nothing to leave, nor being left."""
    return engine.cache.storage.detach(timeout_s) or engine.cache.storage.stats() is not None


# -- pieces -----------------------------------------------------------------------------------


class _NotYetError(Exception):
    """Another thread is still at it."""


def _close_unless_attached(attaching: asyncio.Future[Json], link: StoreLink) -> None:
    if attaching.cancelled() or attaching.exception() is not None:
        beside(lambda: link.close(LEAVE_S))


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
    if not 0 <= value <= MOST_S:
        raise RequestError(f"timeout_seconds is {value:g}; send 0 to {MOST_S:g}")
    return value
