"""Anthropic's routes: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvtide.server.anthropic.messages_request import chat_body, prompt_body
from kvtide.server.anthropic.messages_response import MessageWriter
from kvtide.server.chat.event_formatter import EventFormatter
from kvtide.server.chat.generation_path import GenerationPath
from kvtide.server.request_parsing import ParsedRequest, RequestFields, read_json
from kvtide.server.response_formatting import Answer


class MessagesRoutes:
    """Messages over the one path of generation."""

    def __init__(self, path: GenerationPath) -> None:
        self._path = path

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/messages", self._messages),
            web.post("/v1/messages/count_tokens", self._count_tokens),
        ]

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._path.generate(request, self._parsed, self._formatter)

    def _parsed(self, body: RequestFields) -> ParsedRequest:
        return self._path.parser.chat(RequestFields(chat_body(body)))

    def _formatter(self, parsed: ParsedRequest, answer: Answer) -> EventFormatter:
        return EventFormatter(parsed, answer, MessageWriter(answer.name), self._path.memory)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        raw = await request.read()
        count = await asyncio.to_thread(self._counted, raw)
        return web.json_response({"input_tokens": count})

    def _counted(self, raw: bytes) -> int:
        return len(self._path.parser.chat_tokens(RequestFields(prompt_body(read_json(raw)))))
