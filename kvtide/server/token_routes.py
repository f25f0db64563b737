"""Tokens of a text or a conversation, and back: `POST /tokenize`, `POST /detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvtide.engine import Engine, RequestError
from kvtide.models.tokenizer import Tokenizer
from kvtide.server.request_parsing import RequestFields, RequestParser, read_json

Json = dict[str, Any]


class TokenRoutes:
    """Tokenization as generation does it, for any length."""

    def __init__(self, engine: Engine, parser: RequestParser) -> None:
        self._engine = engine
        self._parser = parser

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        return await _answered(request, self._tokens)

    async def _detokenize(self, request: web.Request) -> web.Response:
        return await _answered(request, self._text)

    def _tokens(self, body: RequestFields) -> Json:
        if body.get("messages") is not None:
            tokens = self._parser.chat_tokens(body)
        else:
            self._parser.check_model(body)
            add_special = body.flag("add_special_tokens", default=True)
            tokens = self._tokenizer.encode(_prompt(body), add_special=add_special)
        longest = self._engine.max_sequence_tokens
        return {"tokens": tokens, "count": len(tokens), "max_model_len": longest}

    def _text(self, body: RequestFields) -> Json:
        self._parser.check_model(body)
        tokens, vocabulary = body.integers("tokens"), self._engine.vocabulary
        if not all(0 <= token < vocabulary for token in tokens):
            raise RequestError(f"token ids must lie in 0..{vocabulary - 1}", param="tokens")
        return {"prompt": self._tokenizer.decode(tokens)}

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._engine.tokenizer is None:
            raise RequestError("this model came without a tokenizer; use token ids as they are")
        return self._engine.tokenizer


async def _answered(request: web.Request, answer: Callable[[RequestFields], Json]) -> web.Response:
    """Long texts take a while: the event loop does not wait for them."""
    raw = await request.read()
    return web.json_response(await asyncio.to_thread(lambda: answer(read_json(raw))))


def _prompt(body: RequestFields) -> str:
    if body.get("prompt") is None:
        raise RequestError(
            "prompt and messages are missing; send one of them",
            "missing_required_parameter",
            "prompt",
        )
    return body.text("prompt", "")
