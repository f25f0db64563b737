"""The HTTP face: OpenAI's routes, admin routes, and what happens when something is not right.

| route                        | what                                           | key            |
|------------------------------|------------------------------------------------|----------------|
| POST /v1/completions         | a text or token ids goes on                    | api key        |
| POST /v1/chat/completions    | a conversation goes on                         | api key        |
| GET  /v1/models              | the model that is served                       | api key        |
| GET  /health                 | 200 when requests are taken, else 503          | none           |
| GET  /metrics                | Prometheus                                     | none           |
| GET  /admin/cache            | tiers, pools, counts                           | admin key      |
| POST /admin/flush?tier=…     | drop what nobody needs: device, host or all    | admin key      |
| …    /admin/storage          | the store behind it (`storage_routes`)         | admin key      |

Admin routes need the admin key if there is one, else the API key if there is one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing

from aiohttp import web

from kvtide.engine import RequestError
from kvtide.models.model_errors import TemplateError
from kvtide.server.cache_report import cache_report
from kvtide.server.engine_commands import Flush
from kvtide.server.engine_setup import Serving
from kvtide.server.metrics import Metrics
from kvtide.server.request_parsing import Fields, ParsedRequest, RequestParser, read_json
from kvtide.server.response_formatting import Answer, Delta, Json, usage
from kvtide.server.service import OverloadedError, ResponseStream, Service, ServiceEndedError
from kvtide.server.settings import Settings
from kvtide.server.storage_routes import StorageRoutes
from kvtide.spec import Tier

MAX_BODY_BYTES = 64 << 20
CLOSING_S = 1.0
"""How long the last bytes of answers may take when the server closes."""
TIERS = {"device": (Tier.DEVICE,), "host": (Tier.HOST,), "all": (Tier.DEVICE, Tier.HOST)}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("kvtide")


class App:
    """Routes over one service. `draining` turns new requests away; `open` are being answered."""

    def __init__(self, settings: Settings, serving: Serving, service: Service) -> None:
        self.draining = False
        self.open = 0
        self._settings = settings
        self._name = serving.name
        self._tokenizer = serving.engine.tokenizer
        self._reader = RequestParser(serving.engine, serving.name, seeded=settings.deterministic)
        self._service = service
        self._storage = StorageRoutes(service, lambda: self.draining)
        self._metrics = Metrics(service.pace)
        service.listeners.append(self._metrics.ended)

    def runner(self) -> web.AppRunner:
        """Cancels the handler of a client that goes away; closing waits a moment for the rest."""
        return web.AppRunner(
            self._routes(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSING_S,
        )

    def _routes(self) -> web.Application:
        app = web.Application(
            middlewares=[self._refusals, self._keys], client_max_size=MAX_BODY_BYTES
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
                *self._storage.routes(),
            ]
        )
        return app

    # -- generating -------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._reader.completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._reader.chat)

    async def _generate(
        self, request: web.Request, read: Callable[[Fields], ParsedRequest]
    ) -> web.StreamResponse:
        raw = await request.read()
        if self.draining:
            raise ServiceEndedError("the server is shutting down; ask another one")
        self.open += 1
        try:
            # Long texts take a while to tokenize, and others should not wait for that.
            wanted = await asyncio.to_thread(lambda: read(read_json(raw)))
            streams = await self._service.submit(wanted.asks)
            try:
                return await self._answered(request, wanted, streams)
            finally:
                self._service.abort(streams)
        finally:
            self.open -= 1

    async def _answered(
        self, request: web.Request, wanted: ParsedRequest, streams: Sequence[ResponseStream]
    ) -> web.StreamResponse:
        answer = Answer(wanted, self._name, self._tokenizer)
        if wanted.stream:
            return await self._streamed(request, wanted, answer, streams)
        pieces = await asyncio.gather(*(_collected(answer, stream) for stream in streams))
        return web.json_response(answer.whole(pieces, self._usage(wanted, streams)))

    def _usage(self, wanted: ParsedRequest, streams: Sequence[ResponseStream]) -> Json:
        return usage(streams, wanted.choices, self._service.pace, details=wanted.cache_details)

    async def _streamed(
        self,
        request: web.Request,
        wanted: ParsedRequest,
        answer: Answer,
        streams: Sequence[ResponseStream],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            async with aclosing(_chunks(answer, streams)) as chunks:
                async for chunk in chunks:
                    await _send(response, chunk)
            if wanted.stream_usage or wanted.cache_details:
                await _send(response, answer.closing(self._usage(wanted, streams)))
            await response.write(b"data: [DONE]\n\n")
        except ServiceEndedError as error:
            await _send(response, _problem(503, str(error)))
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "kvtide"}
        return web.json_response({"object": "list", "data": [model]})

    # -- looking after it -------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if self._service.broken is not None:
            return _refusal(503, "the engine has stopped; restart the server")
        if self.draining:
            return _refusal(503, "the server is shutting down")
        return web.json_response({"status": "ok", "model": self._name})

    async def _scrape(self, request: web.Request) -> web.Response:
        text = await self._service.call(self._metrics.text)
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _cache(self, request: web.Request) -> web.Response:
        return web.json_response(await self._service.call(cache_report))

    async def _flush(self, request: web.Request) -> web.Response:
        named = request.query.get("tier", "all")
        if named not in TIERS:
            raise RequestError(f"there is no tier '{named}'; use {', '.join(TIERS)}")

        dropped = {
            tier.name.lower(): await self._service.order(Flush(tier.value)) for tier in TIERS[named]
        }
        return web.json_response({"dropped_pages": dropped})

    # -- around every route -----------------------------------------------------------------

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What went wrong, as OpenAI's clients expect it."""
        try:
            return await handler(request)
        except (RequestError, TemplateError) as error:
            return _refusal(400, str(error))
        except OverloadedError as error:
            return _refusal(429, str(error), {"Retry-After": str(error.retry_s)})
        except ServiceEndedError as error:
            return _refusal(503, str(error))
        except web.HTTPException as error:
            return _refusal(error.status, _explained(request, error), _allowed(error))
        except RecursionError:
            return _refusal(400, "the body is nested too deeply; send less of it")
        except web.RequestPayloadError as error:
            return _refusal(400, f"the body could not be read ({error}); send it as it is")
        except ConnectionError:
            return web.Response(status=499)  # Nobody is there to be told.
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return _refusal(500, "something broke here; the server's log has the details")

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


# -- pieces -----------------------------------------------------------------------------------


def _same(sent: str, key: str) -> bool:
    """Takes as long for any of a length, so that nobody finds a key letter by letter."""
    left, right = (text.encode("utf-8", "surrogateescape") for text in (sent, key))
    return hmac.compare_digest(left, right)


async def _collected(answer: Answer, stream: ResponseStream) -> Delta:
    """A whole choice."""
    rest = Delta()
    async for update in stream:
        rest.add(update)
    piece = answer.prompt_piece(stream)
    piece.text += rest.text
    piece.chosen, piece.finish = rest.chosen, rest.finish
    return piece


async def _chunks(answer: Answer, streams: Sequence[ResponseStream]) -> AsyncGenerator[Json]:
    """The choices' pieces as they come, one choice's between another's."""
    joined: asyncio.Queue[Json | BaseException | None] = asyncio.Queue()

    async def follow(number: int, stream: ResponseStream) -> None:
        try:
            async for chunk in _chunks_of(answer, number, stream):
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


async def _chunks_of(answer: Answer, number: int, stream: ResponseStream) -> AsyncIterator[Json]:
    if (opening := answer.opening(number)) is not None:
        yield opening
    begun = False
    async for update in stream:
        piece = Delta() if begun else answer.prompt_piece(stream)
        begun = True
        piece.add(update)
        yield answer.chunk(number, piece)


async def _send(response: web.StreamResponse, chunk: Json) -> None:
    data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    await response.write(f"data: {data}\n\n".encode("utf-8", "replace"))


def _problem(status: int, message: str) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(_problem(status, message), status=status, headers=headers)


def _explained(request: web.Request, error: web.HTTPException) -> str:
    """What aiohttp says with a number, in a sentence."""
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path} here; use /v1/completions or /v1/chat/completions"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} does not take {request.method}; use {error.headers['Allow']}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send a smaller one"
    return error.text or error.reason


def _allowed(error: web.HTTPException) -> dict[str, str]:
    """Of a refusal's headers, the one that means something to the client."""
    return {name: error.headers[name] for name in ("Allow",) if name in error.headers}
