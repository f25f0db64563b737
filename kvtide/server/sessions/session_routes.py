"""Sessions and prefetches over HTTP.

| route                          | what                                                | errors   |
|--------------------------------|-----------------------------------------------------|----------|
| POST /v1/sessions/{id}/release | ends it; the body has its `cache_salt`, if there is one | 404  |
| POST /v1/prefetch              | brings a prefix up, says how far it came            | 404, 429 |
| GET  /admin/sessions           | the sessions, least recently used first             |          |

A prefetch names what it brings by `prompt`, by `messages` (with `tools` and the like, as a chat) or
by `session_id` alone: the session's last prompt with its answer. It waits `timeout_seconds` at
most, and ends when its client disconnects; what has come by then stays.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvtide.cache import Namespace, Prefetched
from kvtide.engine import CheckedRequest, Engine, RequestError, session_name
from kvtide.server.error_responses import refusal
from kvtide.server.refused_fields import CHAT, COMPLETION, refuse
from kvtide.server.request_parsing import (
    MAX_PRIORITY,
    TEMPLATE_FIELDS,
    RequestFields,
    RequestParser,
    read_json,
)
from kvtide.server.service import Service, ServiceEndedError
from kvtide.server.sessions.session_commands import (
    BeginPrefetch,
    EndPrefetch,
    ReleaseSession,
    UnknownSessionError,
)
from kvtide.server.sessions.session_settings import SessionSettings, checked_id
from kvtide.spec import Tier

DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 10.0, 600.0
RETRY_S = 1
CHAT_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls"),
    *("chat_template_kwargs", *TEMPLATE_FIELDS, "cache_salt"),
)
"""What the prompt of a chat depends on."""


class SessionRoutes:
    """`draining`: whether the server shuts down, so that nothing is prefetched any more."""

    def __init__(
        self,
        service: Service,
        parser: RequestParser,
        settings: SessionSettings,
        draining: Callable[[], bool],
    ) -> None:
        self._service, self._parser, self._settings = service, parser, settings
        self._draining = draining
        self._numbers = itertools.count()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/sessions/{id}/release", self._release),
            web.post("/v1/prefetch", self._prefetch),
            web.get("/admin/sessions", self._list),
        ]

    async def _release(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = read_json(raw) if raw.strip() else RequestFields({})
        session = checked_id(request.match_info["id"])
        name = session_name(_namespace(body), session or "")
        if not await self._service.command(ReleaseSession(name, time.monotonic())):
            return _unknown(request.match_info["id"])
        return web.json_response({"id": session, "released": True})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(await self._service.call(_sessions))

    async def _prefetch(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        body = read_json(await request.read())
        if self._draining():
            raise ServiceEndedError("the server is shutting down; ask another one")
        timeout_s = _timeout(body)
        command = await asyncio.to_thread(self._command, body, timeout_s)
        try:
            prefetch = await self._service.command(command)
            if prefetch is None:
                after = {"Retry-After": str(RETRY_S)}
                text = f"too many prefixes are being prefetched; try again in {RETRY_S} s"
                return refusal(429, text, "rate_limit_exceeded", headers=after)
            left_s = max(0.0, began + timeout_s - time.monotonic())
            reached = asyncio.wrap_future(prefetch.result)
            await asyncio.wait([reached], timeout=left_s)
            if not reached.done():
                await self._service.command(EndPrefetch(command.number))
            return web.json_response(_answer(await reached, time.monotonic() - began))
        except UnknownSessionError:
            return _unknown(str(body.get("session_id")))
        finally:
            self._service.command_nowait(EndPrefetch(command.number))

    def _command(self, body: RequestFields, timeout_s: float) -> BeginPrefetch:
        """On a thread: a long prompt takes a while to tokenize."""
        namespace = _namespace(body)
        session = checked_id(body.text("session_id", ""))
        given = [name for name in ("prompt", "messages") if body.get(name) is not None]
        if len(given) > 1 or not (given or session):
            raise RequestError(
                "send one of prompt and messages, or a session_id",
                "missing_required_parameter",
                given[0] if given else "prompt",
            )
        packed = self._checked(body, given[0]).packed if given else b""
        return BeginPrefetch(
            number=next(self._numbers),
            tokens=base64.b64encode(packed).decode(),
            cache_salt=namespace.cache_salt,
            session=session_name(namespace, session) if session else "",
            priority=body.integer("priority", 0, -MAX_PRIORITY, MAX_PRIORITY) or 0,
            ttl_s=self._settings.ttl(body.number("session_ttl_seconds", self._settings.ttl_s)),
            limit_s=timeout_s,
            now=time.monotonic(),
        )

    def _checked(self, body: RequestFields, given: str) -> CheckedRequest:
        """The prompt as a request with the same fields would have it."""
        refuse(body.values, CHAT if given == "messages" else COMPLETION)
        if given == "messages":
            values = {name: body.get(name) for name in CHAT_FIELDS}
            return self._parser.chat(RequestFields(values | {"max_tokens": 0})).choices[0]
        values = {name: body.get(name) for name in ("model", "prompt")}
        choices = self._parser.completion(RequestFields(values | {"max_tokens": 0})).choices
        if len(choices) > 1:
            raise RequestError(
                "there are several prompts; prefetch them one by one", param="prompt"
            )
        return choices[0]


# -- on the engine thread ---------------------------------------------------------------------


def _sessions(engine: Engine) -> dict[str, Any]:
    """A session's salt is its owner's: only whether there is one is shown."""
    listed = []
    for state in engine.cache.sessions.states():
        _, salt, session = json.loads(state.name)
        listed.append(
            {
                "id": session,
                "salted": bool(salt),
                "lines": state.lines,
                "tokens": state.tokens,
                "pinned_tokens": state.pinned_tokens,
                "idle_seconds": round(state.idle_s, 3),
                "seconds_left": None if state.left_s is None else round(state.left_s, 3),
            }
        )
    return {"sessions": listed}


# -- bodies -----------------------------------------------------------------------------------


def _namespace(body: RequestFields) -> Namespace:
    return Namespace(cache_salt=body.text("cache_salt", ""))


def _timeout(body: RequestFields) -> float:
    value = body.number("timeout_seconds", DEFAULT_TIMEOUT_S)
    if not 0 <= value <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_seconds is {value:g}; send 0 to {MAX_TIMEOUT_S:g}", param="timeout_seconds"
        )
    return value


def _answer(reached: Prefetched, waited_s: float) -> dict[str, Any]:
    return {
        "tokens": reached.tokens,
        "cached_tokens_details": {tier.name.lower(): reached.by_tier.get(tier, 0) for tier in Tier},
        "fetched_tokens": reached.fetched,
        "outcome": reached.outcome,
        "waited_ms": round(1000 * waited_s, 3),
    }


def _unknown(session: str) -> web.Response:
    return refusal(
        404,
        f"there is no session '{session}' here: it ended, or has another cache_salt; begin it with "
        "a request, or prefetch its prompt or messages",
        "session_not_found",
        "session_id",
    )
