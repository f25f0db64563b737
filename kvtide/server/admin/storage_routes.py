"""`/admin/storage`: attach, replace, detach and clear a store while the server serves.

| route                       | what                                               | errors        |
|-----------------------------|----------------------------------------------------|---------------|
| GET    /admin/storage       | the link's counters, and the store's own status    |               |
| PUT    /admin/storage       | {"url": …}: attach this store, detach the old one  | 400, 504      |
| DELETE /admin/storage       | write the queued pages, then detach                | 202, 409      |
| POST   /admin/storage/clear | remove every page of this model from the store     | 202, 409, 502 |

Every rank opens the store for its own part of the pages, and clears those of all ranks; responses
report the leader's counters. 202: the work
goes on after the timeout; 409: no store is attached. All but PUT take `?timeout_seconds=`; the
body of PUT may have `timeout_seconds`, for the store that is detached.

No POST attaches a store: a browser sends a cross-site POST without asking, while a PUT needs a
preflight, which this server refuses.
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
from kvtide.server.engine_commands import (
    AbandonStore,
    AttachStore,
    ClearStore,
    DetachStore,
    IsStoreOpen,
    OpenStore,
)
from kvtide.server.request_parsing import read_json
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.setup.store_setup import Json, storage_report
from kvtide.storage import Store, StoreError, StoreStatus

T = TypeVar("T")

OPEN_S = 60.0
DETACH_S = 10.0
STATUS_S = 5.0
CLEAR_S = 60.0
MAX_S = 3600.0
GRACE_S = 1.0
"""The wait for a detach beyond its timeout: giving up takes a moment too."""
_POLL_S = 0.01
_NO_STORE = 'no store is attached; PUT {"url": …} to /admin/storage attaches one'


class StorageRoutes:
    """`draining`: whether the server shuts down, so that no store is attached any more."""

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
        report, status = await self._service.call(
            lambda engine: (_report(engine), _ask(engine, lambda store: store.status()))
        )
        if status is not None:
            report |= await _status(status, timeout_s)
        return web.json_response(report)

    async def _attach(self, request: web.Request) -> web.Response:
        body = read_json(await request.read())
        url = body.text("url", "")
        if not url:
            raise RequestError(
                'there is no url; send {"url": "file:///path?cap=200GB"}',
                "missing_required_parameter",
                "url",
            )
        timeout_s = _seconds(body.number("timeout_seconds", DETACH_S))
        number = await self._open(url)
        # Shielded from a client that disconnects: an open store is attached, or else closed.
        return web.json_response(await asyncio.shield(self._attach_open(number, timeout_s)))

    async def _open(self, url: str) -> int:
        """The number of a store whose opening has ended on every rank."""
        number = next(self._numbers)
        try:
            await self._service.command(OpenStore(number, url))
            deadline = asyncio.get_running_loop().time() + OPEN_S
            while not await self._service.command(IsStoreOpen(number)):
                if asyncio.get_running_loop().time() > deadline:
                    raise web.HTTPGatewayTimeout(
                        text=f"the store is not open after {OPEN_S:g} s; see whether it runs, and "
                        "try again"
                    )
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self._service.command_nowait(AbandonStore(number))
            raise
        return number

    async def _attach_open(self, number: int, timeout_s: float) -> Json:
        try:
            if self._draining():
                raise ServiceEndedError("the server is shutting down; ask another one")
            await self._service.command(AttachStore(number, timeout_s))
        except (StoreError, TierError) as error:
            raise RequestError(str(error)) from None
        except BaseException:
            self._service.command_nowait(AbandonStore(number))
            raise
        return await self._service.call(_report)

    async def _detach(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, DETACH_S)
        detaching = await self._service.command(DetachStore(timeout_s))
        if not detaching and not await self._service.call(_has_store):
            raise web.HTTPConflict(text=_NO_STORE)
        deadline = asyncio.get_running_loop().time() + timeout_s + GRACE_S
        while "name" in (report := await self._service.call(_report)) and not report["attached"]:
            if asyncio.get_running_loop().time() > deadline:
                return web.json_response(report, status=202)
            await asyncio.sleep(_POLL_S)
        return web.json_response({"attached": False})

    async def _clear(self, request: web.Request) -> web.Response:
        timeout_s = _timeout(request, CLEAR_S)
        clearing = await self._service.command(ClearStore())
        if clearing is None:
            raise web.HTTPConflict(text=_NO_STORE)
        try:
            removed = await _within(clearing, timeout_s)
        except _PendingError:
            return web.json_response({"over": False}, status=202)
        except Exception as error:  # A store may be the user's own class.
            raise web.HTTPBadGateway(text=_message(error)) from None
        return web.json_response({"over": True, **asdict(removed)})


# -- on the engine thread ---------------------------------------------------------------------


def _report(engine: Engine) -> Json:
    return storage_report(engine.cache.storage.stats())


def _ask(engine: Engine, question: Callable[[Store], T]) -> Future[T] | None:
    return engine.cache.storage.ask(question)


def _has_store(engine: Engine) -> bool:
    """Whether a store is attached or still detaching."""
    return engine.cache.storage.stats() is not None


# -- timeouts ---------------------------------------------------------------------------------


class _PendingError(Exception):
    """The store's thread has not finished in time."""


async def _within(future: Future[T], timeout_s: float) -> T:
    """The result of a store's thread, if it comes in time; the thread goes on either way."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not future.done():
        if asyncio.get_running_loop().time() > deadline:
            raise _PendingError
        await asyncio.sleep(_POLL_S)
    return future.result()


async def _status(future: Future[StoreStatus], timeout_s: float) -> Json:
    """The store's own status, or the problem with it."""
    try:
        status = await _within(future, timeout_s)
    except _PendingError:
        future.cancel()
        return {"store": None, "problem": f"the store has not answered for {timeout_s:g} s"}
    except Exception as error:  # A store may be the user's own class.
        return {"store": None, "problem": _message(error)}
    return {"store": asdict(status)}


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"


def _timeout(request: web.Request, default: float) -> float:
    text = request.query.get("timeout_seconds")
    try:
        return _seconds(default if text is None else float(text))
    except ValueError:
        raise RequestError(
            f"timeout_seconds is '{text}'; send a number of seconds",
            "invalid_type",
            "timeout_seconds",
        ) from None


def _seconds(value: float) -> float:
    if not 0 <= value <= MAX_S:
        raise RequestError(
            f"timeout_seconds is {value:g}; send 0 to {MAX_S:g}", param="timeout_seconds"
        )
    return value
