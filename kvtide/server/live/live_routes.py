"""The live page, and the stream behind it.

| route           | what                                                        | key       |
|-----------------|-------------------------------------------------------------|-----------|
| GET /           | the page: one HTML file, which asks for a key if it needs one | none    |
| GET /admin/live | server-sent events: a snapshot per second, as JSON          | admin key |

The page itself has no data, and asks no other server for anything: its policy forbids it.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from functools import cache
from pathlib import Path

from aiohttp import web

from kvtide.server.live.finished import FinishedRequests
from kvtide.server.live.live_publisher import LivePublisher, ServedModel
from kvtide.server.service import Service
from kvtide.server.setup.engine_setup import Serving
from kvtide.spec import RankShape

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LiveRoutes:
    """`show_text`: snapshots may have text of prompts."""

    def __init__(self, service: Service, serving: Serving, *, show_text: bool) -> None:
        engine = serving.engine
        index = engine.cache.index
        finished = FinishedRequests(service.rate, lambda: index.tick)
        service.listeners.append(finished.ended)
        served = ServedModel(
            serving.name,
            engine.cache.memory.page_tokens,
            engine.cache.config.device,
            RankShape(serving.rank.topology.stages, serving.rank.topology.tensor.count),
            engine.tokenizer if show_text else None,
        )
        self.publisher = LivePublisher(service, finished, served)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/", self._page), web.get("/admin/live", self._live)]

    async def _page(self, request: web.Request) -> web.Response:
        response = web.Response(
            text=page(),
            content_type="text/html",
            headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"},
        )
        response.enable_compression()
        return response

    async def _live(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        with suppress(ConnectionError):
            async with aclosing(self.publisher.frames()) as frames:
                async for frame in frames:
                    await response.write(frame)
        return response


@cache
def page() -> str:
    """The page with its library in it."""
    text = (HERE / "page.html").read_text("utf-8")
    for name in ("uPlot.min.css", "uPlot.iife.min.js"):
        mark = f"/* {name} */"
        assert text.count(mark) == 1, f"page.html has no place for {name}"
        text = text.replace(mark, (HERE / "uplot" / name).read_text("utf-8"))
    return text
