"""The one path from a body to a response, as routes of other shapes than OpenAI's chat use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from kvtide.server.request_parsing import ParsedRequest, RequestFields, RequestParser
from kvtide.server.response_formatting import FormatterFactory
from kvtide.spec import ModelMemory

Generate = Callable[
    [web.Request, Callable[[RequestFields], ParsedRequest], FormatterFactory],
    Awaitable[web.StreamResponse],
]


@dataclass(frozen=True, slots=True)
class GenerationPath:
    """`generate` parses a body, submits its requests and sends what the formatter makes of them."""

    generate: Generate
    parser: RequestParser
    memory: ModelMemory
