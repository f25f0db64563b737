"""The HTTP application: OpenAI's routes, admin routes, keys, errors (`error_responses`).

| route                        | what                                           | key            |
|------------------------------|------------------------------------------------|----------------|
| POST /v1/completions         | completes a text or token ids                  | api key        |
| POST /v1/chat/completions    | completes a conversation                       | api key        |
| GET  /v1/models              | the model that is served                       | api key        |
| POST /v1/sessions, /prefetch | conversations between turns (`session_routes`) | api key        |
| GET  /health                 | 200 while requests are accepted, else 503      | none           |
| GET  /metrics                | Prometheus                                     | none           |
| GET  /server_info, /loads, … | what routers ask (`router_routes`)             | none           |
| GET  /admin/cache            | tiers, pools, counts                           | admin key      |
| POST /admin/flush?tier=…     | drops unpinned pages: device, host or all      | admin key      |
| …    /admin/storage          | the attached store (`storage_routes`)          | admin key      |

Admin routes need the admin key if one is set, else the API key if one is set.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from aiohttp import web

from kvtide.engine import RequestError
from kvtide.server.cache_report import cache_report
from kvtide.server.engine_commands import Flush
from kvtide.server.error_responses import (
    MAX_BODY_BYTES,
    error_object,
    error_response,
    http_log,
    refusal,
)
from kvtide.server.handoff.conventions import KV_TRANSFER
from kvtide.server.handoff.router_routes import RouterRoutes
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.metrics import Metrics
from kvtide.server.request_parsing import Fields, ParsedRequest, RequestParser, read_json
from kvtide.server.response_formatting import Delta, Json, ResponseFormatter, usage
from kvtide.server.service import ResponseStream, Service, ServiceEndedError
from kvtide.server.sessions.session_routes import SessionRoutes
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import Serving
from kvtide.server.storage_routes import StorageRoutes
from kvtide.spec import Tier

SHUTDOWN_S = 1.0
"""Open connections get this long to send their last bytes when the server closes."""
TIERS = {"device": (Tier.DEVICE,), "host": (Tier.HOST,), "all": (Tier.DEVICE, Tier.HOST)}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """Routes over one service.

    draining        new requests are refused
    open_requests   requests that are being answered
    handoff         the server's part in handoffs
    """

    def __init__(
        self,
        settings: Settings,
        serving: Serving,
        service: Service,
        handoff: ServerHandoff,
    ) -> None:
        self._handoff = handoff
        self.draining = False
        self.open_requests = 0
        self._settings = settings
        self._name = serving.name
        self._tokenizer = serving.engine.tokenizer
        self._speculates = serving.engine.accept_lengths is not None
        self._parser = RequestParser(
            serving.engine,
            serving.name,
            seeded=settings.deterministic,
            handoffs=handoff.conventions.read,
            sessions=settings.sessions,
        )
        self._service = service
        self._sessions = SessionRoutes(
            service, self._parser, settings.sessions, lambda: self.draining
        )
        self._storage = StorageRoutes(service, lambda: self.draining)
        self._routers = RouterRoutes(settings, serving.name, service, handoff.conventions)
        self._metrics = Metrics(handoff)
        service.listeners.append(self._metrics.ended)

    def runner(self) -> web.AppRunner:
        """A runner that cancels the handler of a client that disconnects."""
        return web.AppRunner(
            self._routes(),
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            shutdown_timeout=SHUTDOWN_S,
        )

    def _routes(self) -> web.Application:
        app = web.Application(
            middlewares=[self._errors, self._keys], client_max_size=MAX_BODY_BYTES
        )
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._scrape),
                web.get("/admin/cache", self._cache),
                web.post("/admin/flush", self._flush),
                *self._routers.routes(),
                *self._storage.routes(),
                *self._sessions.routes(),
            ]
        )
        return app

    # -- completions ------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._parser.completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._parser.chat)

    async def _generate(
        self, request: web.Request, parse: Callable[[Fields], ParsedRequest]
    ) -> web.StreamResponse:
        raw = await request.read()
        if self.draining:
            raise ServiceEndedError("the server is shutting down; ask another one")
        self.open_requests += 1
        try:
            # Long prompts take a while to tokenize and pack: neither the event loop nor the
            # engine's thread does it.
            parsed = await asyncio.to_thread(lambda: parse(read_json(raw)))
            choices = await self._handoff.hand_over(parsed.choices)
            streams = await self._service.submit(choices)
            try:
                return await self._respond(request, parsed, streams)
            finally:
                self._service.abort(streams)
        finally:
            self.open_requests -= 1

    async def _respond(
        self, request: web.Request, parsed: ParsedRequest, streams: Sequence[ResponseStream]
    ) -> web.StreamResponse:
        formatter = ResponseFormatter(parsed, self._name, self._tokenizer)
        if parsed.stream:
            return await self._stream(request, parsed, formatter, streams)
        choices = await asyncio.gather(*(_collected(formatter, stream) for stream in streams))
        whole = formatter.whole(choices, self._usage(parsed, streams))
        if (pages := self._handoff.conventions.answer(parsed.handoffs)) is not None:
            whole[KV_TRANSFER] = pages
        return web.json_response(whole)

    def _usage(self, parsed: ParsedRequest, streams: Sequence[ResponseStream]) -> Json:
        return usage(
            streams,
            parsed.n,
            self._service.rate,
            details=parsed.cache_details,
            drafts=self._speculates,
            tokenizer=self._tokenizer,
        )

    async def _stream(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        formatter: ResponseFormatter,
        streams: Sequence[ResponseStream],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            async with aclosing(_chunks(formatter, streams)) as chunks:
                async for chunk in chunks:
                    await _send(response, chunk)
            if parsed.stream_usage or parsed.cache_details:
                await _send(response, formatter.closing(self._usage(parsed, streams)))
            await response.write(b"data: [DONE]\n\n")
        except ServiceEndedError as error:
            await _send(response, error_object(503, str(error)))
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "kvtide"}
        return web.json_response({"object": "list", "data": [model]})

    # -- health and admin ------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if self._service.broken is not None:
            return refusal(503, "the engine has stopped; restart the server")
        if self.draining:
            return refusal(503, "the server is shutting down")
        return web.json_response({"status": "ok", "model": self._name})

    async def _scrape(self, request: web.Request) -> web.Response:
        text = await self._service.call(self._metrics.text)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _cache(self, request: web.Request) -> web.Response:
        report = await self._service.call(cache_report)
        return web.json_response(report | {"handoff": report["handoff"] | self._handoff.report()})

    async def _flush(self, request: web.Request) -> web.Response:
        named = request.query.get("tier", "all")
        if named not in TIERS:
            raise RequestError(f"there is no tier '{named}'; use {', '.join(TIERS)}", param="tier")
        dropped = {
            tier.name.lower(): await self._service.command(Flush(tier.value))
            for tier in TIERS[named]
        }
        return web.json_response({"dropped_pages": dropped})

    # -- middlewares -----------------------------------------------------------------------

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            return error_response(request, error)

    @web.middleware
    async def _keys(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self._settings.api_key if request.path.startswith("/v1/") else None
        if request.path.startswith("/admin/"):
            key = self._settings.admin_key or self._settings.api_key
            if key is None and "Origin" in request.headers:
                raise web.HTTPForbidden(text="web pages need a server with --admin-key for this")
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        if key is not None and (scheme.lower() != "bearer" or not _same(sent.strip(), key)):
            which = "admin key" if request.path.startswith("/admin/") else "API key"
            raise web.HTTPUnauthorized(
                text=f"this needs the {which}; send it as Authorization: Bearer KEY"
            )
        return await handler(request)


# -- streaming --------------------------------------------------------------------------------


def _same(sent: str, key: str) -> bool:
    """Compares in constant time, so that a key cannot be guessed letter by letter."""
    left, right = (text.encode("utf-8", "surrogateescape") for text in (sent, key))
    return hmac.compare_digest(left, right)


async def _collected(formatter: ResponseFormatter, stream: ResponseStream) -> Delta:
    """A choice in one piece."""
    generated = Delta()
    async for update in stream:
        generated.add(update)
    choice = formatter.prompt_delta(stream)
    choice.text += generated.text
    choice.sampled, choice.finish = generated.sampled, generated.finish
    return choice


async def _chunks(
    formatter: ResponseFormatter, streams: Sequence[ResponseStream]
) -> AsyncGenerator[Json]:
    """The chunks of all choices, interleaved as they come."""
    joined: asyncio.Queue[Json | BaseException | None] = asyncio.Queue()

    async def follow(number: int, stream: ResponseStream) -> None:
        try:
            async for chunk in _choice_chunks(formatter, number, stream):
                joined.put_nowait(chunk)
        except Exception as error:
            joined.put_nowait(error)
        joined.put_nowait(None)

    tasks = [asyncio.create_task(follow(*pair)) for pair in enumerate(streams)]
    try:
        for _ in tasks:
            while (chunk := await joined.get()) is not None:
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
    finally:
        for task in tasks:
            task.cancel()


async def _choice_chunks(
    formatter: ResponseFormatter, number: int, stream: ResponseStream
) -> AsyncIterator[Json]:
    if (opening := formatter.opening(number)) is not None:
        yield opening
    started = False
    async for update in stream:
        delta = Delta() if started else formatter.prompt_delta(stream)
        started = True
        delta.add(update)
        yield formatter.chunk(number, delta)


async def _send(response: web.StreamResponse, chunk: Json) -> None:
    data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    await response.write(f"data: {data}\n\n".encode("utf-8", "replace"))
