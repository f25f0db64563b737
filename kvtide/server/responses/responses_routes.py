"""OpenAI's Responses API.

| route                                 | what                                                |
|---------------------------------------|-----------------------------------------------------|
| POST   /v1/responses                  | a response, which is stored unless `store` is false |
| GET    /v1/responses/{id}             | a stored response                                   |
| GET    /v1/responses/{id}/input_items | the items that it followed, page by page            |
| DELETE /v1/responses/{id}             | forgets it                                          |
"""

from __future__ import annotations

from aiohttp import web

from kvtide.engine import RequestError
from kvtide.server.chat.chat_turns import Json
from kvtide.server.chat.event_formatter import EventFormatter
from kvtide.server.chat.generation_path import GenerationPath
from kvtide.server.error_responses import refusal
from kvtide.server.request_parsing import ParsedRequest, RequestFields
from kvtide.server.response_formatting import Answer
from kvtide.server.responses.response_history import ResponseHistory
from kvtide.server.responses.responses_request import ResponsesRequest, read_request
from kvtide.server.responses.responses_response import ResponsesWriter

DEFAULT_RESPONSE_TOKENS = 4096
"""`max_output_tokens` of a request that names none. Agents give up on a response that is cut."""
_FIELDS = {"messages": "input", "response_format": "text.format"}
"""Fields of a chat body that have another name here."""
MAX_ITEMS = 100
"""On one page of input items."""


class ResponsesRoutes:
    """Responses over the one path of generation, and those that are stored."""

    def __init__(self, path: GenerationPath, history: ResponseHistory | None = None) -> None:
        self._path = path
        self.history = ResponseHistory() if history is None else history

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/responses", self._create),
            web.get("/v1/responses/{id}", self._get),
            web.get("/v1/responses/{id}/input_items", self._input_items),
            web.delete("/v1/responses/{id}", self._delete),
        ]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        exchange = _Exchange(self._path, self.history)
        return await self._path.generate(request, exchange.parse, exchange.formatter)

    async def _get(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false") != "false":
            raise RequestError(
                "a stored response is not streamed again; leave stream out",
                "unsupported_parameter",
                "stream",
            )
        response = self.history.get(request.match_info["id"])
        return _unknown(request) if response is None else web.json_response(response)

    async def _input_items(self, request: web.Request) -> web.Response:
        items = self.history.input_of(request.match_info["id"])
        return _unknown(request) if items is None else web.json_response(_page(items, request))

    async def _delete(self, request: web.Request) -> web.Response:
        if not self.history.delete(request.match_info["id"]):
            return _unknown(request)
        deleted = {"id": request.match_info["id"], "object": "response", "deleted": True}
        return web.json_response(deleted)


class _Exchange:
    """One request and its response."""

    def __init__(self, path: GenerationPath, history: ResponseHistory) -> None:
        self._path = path
        self._history = history
        self._asked: ResponsesRequest | None = None

    def parse(self, body: RequestFields) -> ParsedRequest:
        self._asked = read_request(body, self._history.chain)
        try:
            return self._path.parser.chat(RequestFields(self._asked.chat), DEFAULT_RESPONSE_TOKENS)
        except RequestError as refusal:
            refusal.param = _FIELDS.get(refusal.param or "", refusal.param)
            raise

    def formatter(self, parsed: ParsedRequest, answer: Answer) -> EventFormatter:
        assert self._asked is not None, "a body is parsed before it is answered"
        writer = ResponsesWriter(self._asked, answer.name, self._keep)
        return EventFormatter(parsed, answer, writer, self._path.memory)

    def _keep(self, response: Json) -> bool:
        assert self._asked is not None
        return self._history.put(response, self._asked.items, self._asked.previous)


def _page(items: list[Json], request: web.Request) -> Json:
    """Items behind `after`, up to `limit`, latest first unless `order` is asc."""
    query, response = request.query, request.match_info["id"]
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:80]!r}; use asc or desc", param="order")
    if not (limit.isdecimal() and 1 <= int(limit) <= MAX_ITEMS):
        raise RequestError(f"limit is {limit[:80]!r}; use 1 to {MAX_ITEMS}", param="limit")
    named = [{"id": f"item_{response}_{n}"} | _in_parts(each) for n, each in enumerate(items)]
    if order == "desc":
        named.reverse()
    ids = [str(each["id"]) for each in named]
    first = 0
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise RequestError(
                f"after is {after[:80]!r}, none of the items; use an id of one", param="after"
            )
        first = ids.index(after) + 1
    shown = named[first : first + int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + len(shown) < len(named),
    }


def _in_parts(item: Json) -> Json:
    """An item as the API shows it: a message's content is a list of parts."""
    if not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    part: Json = {"type": kind, "text": item["content"]}
    if kind == "output_text":
        part["annotations"] = []
    return {"type": "message", "status": "completed", **item, "content": [part]}


def _unknown(request: web.Request) -> web.Response:
    shown = request.match_info["id"][:80]
    return refusal(404, f"there is no stored response {shown}; store it, or send all items again")
