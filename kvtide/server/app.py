"""The HTTP application: OpenAI's routes, admin routes, keys, errors (`error_responses`).

| route                        | what                                           | key            |
|------------------------------|------------------------------------------------|----------------|
| POST /v1/completions         | completes a text or token ids                  | api key        |
| POST /v1/chat/completions    | completes a conversation                       | api key        |
| …    /v1/responses           | OpenAI's Responses (`responses_routes`)        | api key        |
| …    /v1/messages            | Anthropic's Messages (`messages_routes`)       | api key        |
| POST /v1/sessions, /prefetch | conversations between turns (`session_routes`) | api key        |
| GET  /v1/models, /v1/models/ | the model that is served                       | api key        |
| POST /tokenize, /detokenize  | tokens of a text, and back (`token_routes`)    | api key        |
| GET  /health                 | 200 while requests are accepted, else 503      | none           |
| GET  /metrics                | Prometheus                                     | none           |
| GET  /server_info, /loads, … | what routers ask (`router_routes`)             | none           |
| GET  /                       | the live page (`live_routes`)                  | none           |
| GET  /admin/live             | a snapshot per second, for it                  | admin key      |
| GET  /admin/cache            | tiers, pools, counts                           | admin key      |
| POST /admin/flush?tier=…     | drops unpinned pages: device, host or all      | admin key      |
| …    /admin/storage          | the attached store (`storage_routes`)          | admin key      |

Admin routes need the admin key if one is set, else the API key if one is set. A key is a bearer
token or the header `x-api-key`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from aiohttp import web

from kvtide.engine import RequestError, Update
from kvtide.server.admin.cache_report import cache_report
from kvtide.server.admin.storage_routes import StorageRoutes
from kvtide.server.anthropic.messages_routes import MessagesRoutes
from kvtide.server.chat.generation_path import GenerationPath
from kvtide.server.engine_commands import Flush
from kvtide.server.error_responses import (
    MAX_BODY_BYTES,
    error_response,
    http_log,
    refusal,
)
from kvtide.server.handoff.conventions import KV_TRANSFER
from kvtide.server.handoff.router_routes import RouterRoutes
from kvtide.server.handoff.server_handoff import ServerHandoff
from kvtide.server.kv_events.publisher import Publisher
from kvtide.server.live.live_routes import LiveRoutes
from kvtide.server.metrics import Metrics
from kvtide.server.request_parsing import (
    ModelNotFoundError,
    ParsedRequest,
    RequestFields,
    RequestParser,
    read_json,
)
from kvtide.server.response_formatting import (
    Answer,
    Delta,
    Formatter,
    FormatterFactory,
    Json,
    ResponseFormatter,
    usage,
)
from kvtide.server.responses.responses_routes import ResponsesRoutes
from kvtide.server.service import ResponseStream, Service, ServiceEndedError, StreamGroup
from kvtide.server.sessions.session_routes import SessionRoutes
from kvtide.server.settings import Settings
from kvtide.server.setup.engine_setup import Serving
from kvtide.server.token_routes import TokenRoutes
from kvtide.server.tools.output_events import OutputParser
from kvtide.spec import Tier

SHUTDOWN_S = 1.0
"""Open connections get this long to send their last bytes when the server closes."""
KEEP_ALIVE_S = 15.0
"""How often a stream has a comment, which clients ignore: proxies close a silent connection."""
API_PATHS = ("/v1/", "/tokenize", "/detokenize")
"""What the API key is for."""
TIERS = {"device": (Tier.DEVICE,), "host": (Tier.HOST,), "all": (Tier.DEVICE, Tier.HOST)}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """Routes over one service.

    draining        new requests are refused
    open_requests   requests that are being answered
    handoff         the server's part in handoffs
    live            the live page
    events          publishes KV events
    """

    def __init__(
        self,
        settings: Settings,
        serving: Serving,
        service: Service,
        handoff: ServerHandoff,
        events: Publisher | None = None,
    ) -> None:
        self._handoff = handoff
        self.draining = False
        self.open_requests = 0
        self._settings = settings
        self._name = serving.name
        self._tokenizer = serving.engine.tokenizer
        self._speculates = serving.engine.accept_length_stats is not None
        self._parser = RequestParser(
            serving.engine,
            serving.name,
            seeded=settings.deterministic,
            handoffs=handoff.conventions.read,
            formats=serving.formats,
            sessions=settings.sessions,
        )
        self._service = service
        self._sessions = SessionRoutes(
            service, self._parser, settings.sessions, lambda: self.draining
        )
        self._storage = StorageRoutes(service, lambda: self.draining)
        self._routers = RouterRoutes(settings, serving.name, service, handoff.conventions)
        path = GenerationPath(self.generate, self._parser, serving.engine.cache.memory)
        self._messages = MessagesRoutes(path)
        self._responses = ResponsesRoutes(path)
        self._tokens = TokenRoutes(serving.engine, self._parser)
        self._metrics = Metrics(handoff, events)
        service.listeners.append(self._metrics.ended)
        self.live = LiveRoutes(service, serving, show_text=settings.show_text)

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
                web.get("/v1/models/{id:.+}", self._model),
                web.get("/health", self._health),
                web.get("/metrics", self._scrape),
                web.get("/admin/cache", self._cache),
                web.post("/admin/flush", self._flush),
                *self._messages.routes(),
                *self._responses.routes(),
                *self._tokens.routes(),
                *self._routers.routes(),
                *self._storage.routes(),
                *self._sessions.routes(),
                *self.live.routes(),
            ]
        )
        return app

    # -- completions ------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self.generate(request, self._parser.completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self.generate(request, self._parser.chat_completion)

    async def generate(
        self,
        request: web.Request,
        parse: Callable[[RequestFields], ParsedRequest],
        formatter: FormatterFactory = ResponseFormatter,
    ) -> web.StreamResponse:
        """The response to a request, whose body `parse` reads and whose shape `formatter` has."""
        raw = await request.read()
        if self.draining:
            raise ServiceEndedError("the server is shutting down; ask another one")
        self.open_requests += 1
        try:
            # Long prompts take a while to tokenize and pack: neither the event loop nor the
            # engine's thread does it.
            parsed = await asyncio.to_thread(lambda: parse(read_json(raw)))
            choices = await self._handoff.hand_over(parsed.choices)
            group = await self._service.submit(choices)
            streams = group.streams
            try:
                answer = Answer(
                    self._name, self._tokenizer, streams, lambda: self._usage(parsed, streams)
                )
                made = formatter(parsed, answer)
                if parsed.stream:
                    return await _stream(request, parsed, group, made)
                return await self._whole(parsed, group, made)
            finally:
                self._service.abort(streams)
        finally:
            self.open_requests -= 1

    async def _whole(
        self, parsed: ParsedRequest, group: StreamGroup, formatter: Formatter
    ) -> web.Response:
        """The response in one piece."""
        updates = await group.whole()
        deltas = [formatter.prompt_delta(stream) for stream in group.streams]
        parsers = [parsed.new_parser() for _ in group.streams]
        for stream, update in updates:
            deltas[stream.number].add(update, parsers[stream.number])
        whole = formatter.whole(deltas)
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

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._served_model()]})

    async def _model(self, request: web.Request) -> web.Response:
        if (name := request.match_info["id"]) != self._name:
            raise ModelNotFoundError(f"there is no model '{name}' here; use '{self._name}'")
        return web.json_response(self._served_model())

    def _served_model(self) -> Json:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "kvtide"}

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
        key = self._settings.api_key if request.path.startswith(API_PATHS) else None
        if request.path.startswith("/admin/"):
            key = self._settings.admin_key or self._settings.api_key
            if key is None and "Origin" in request.headers:
                raise web.HTTPForbidden(text="web pages need a server with --admin-key for this")
        if key is not None and not any(_same(sent, key) for sent in _sent_keys(request)):
            which = "admin key" if request.path.startswith("/admin/") else "API key"
            raise web.HTTPUnauthorized(
                text=f"this needs the {which}; send it as Authorization: Bearer KEY"
            )
        return await handler(request)


# -- streaming --------------------------------------------------------------------------------


def _sent_keys(request: web.Request) -> list[str]:
    """The bearer token and `x-api-key`, as far as a request has them."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [*sent, *request.headers.getall("x-api-key", [])]


def _same(sent: str, key: str) -> bool:
    """Compares in constant time, so that a key cannot be guessed letter by letter."""
    left, right = (text.encode("utf-8", "surrogateescape") for text in (sent, key))
    return hmac.compare_digest(left, right)


async def _stream(
    request: web.Request, parsed: ParsedRequest, group: StreamGroup, formatter: Formatter
) -> web.StreamResponse:
    """The response as server-sent events; what a step gave its choices is sent together."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    alive = asyncio.create_task(_keep_alive(response))
    chunks = _Chunks(formatter, [parsed.new_parser() for _ in group.streams])
    try:
        if opening := b"".join(map(formatter.opening, range(len(group.streams)))):
            await response.write(opening)
        while group.open:
            if sent := b"".join(chunks.of(*came) for came in await group.take()):
                await response.write(sent)
        await response.write(formatter.closing())
    except ServiceEndedError as error:
        await response.write(formatter.error(503, str(error)))
    finally:
        alive.cancel()
    await response.write_eof()
    return response


class _Chunks:
    """The chunks of all choices, each with the parser of its output."""

    def __init__(self, formatter: Formatter, parsers: Sequence[OutputParser]) -> None:
        self._formatter, self._parsers = formatter, parsers
        self._started = [False] * len(parsers)

    def of(self, stream: ResponseStream, update: Update) -> bytes:
        number = stream.number
        delta = Delta() if self._started[number] else self._formatter.prompt_delta(stream)
        self._started[number] = True
        delta.add(update, self._parsers[number])
        return self._formatter.chunk(number, delta)


async def _keep_alive(response: web.StreamResponse) -> None:
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await response.write(b": keep-alive\n\n")
