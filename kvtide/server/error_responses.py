"""Errors as OpenAI's API answers them: a status, and `{"error": {message, type, param, code}}`.
Those of `/v1/messages` have Anthropic's shape (`messages_errors`).

| raised                | status | type                  | code                                    |
|-----------------------|--------|-----------------------|-----------------------------------------|
| `ModelNotFoundError`  | 404    | invalid_request_error | model_not_found                         |
| `RequestError`        | 400    | invalid_request_error | its own: context_length_exceeded, …     |
| `TemplateError`       | 400    | invalid_request_error | invalid_value                           |
| a wrong key           | 401    | invalid_request_error | invalid_api_key                         |
| `OverloadedError`     | 429    | requests              | rate_limit_exceeded, with `Retry-After` |
| an unknown route      | 404    | invalid_request_error | unknown_url                             |
| another method        | 405    | invalid_request_error | method_not_supported                    |
| `ServiceEndedError`   | 503    | server_error          | null                                    |
| a grammar's limit (a) | 500    | server_error          | null                                    |
| anything else         | 500    | server_error          | null                                    |

(a) Of `/v1/messages`. Other APIs have words for an answer that failed.

`code` is null where OpenAI has no name for an error. `param` is the field at fault, if it is one.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvtide.engine import RequestError
from kvtide.models.model_errors import TemplateError
from kvtide.server.anthropic.messages_errors import is_messages_path, messages_error
from kvtide.server.request_parsing import ModelNotFoundError
from kvtide.server.service import OverloadedError, ServiceEndedError

MAX_BODY_BYTES = 64 << 20
CLIENT_GONE = 499
"""The status that proxies log for a client that has closed its connection."""

_HTTP_CODES = {401: "invalid_api_key", 404: "unknown_url", 405: "method_not_supported"}

log = logging.getLogger("kvtide")


class _OnlyOwnErrors(logging.Filter):
    """Bytes that are no HTTP/1, as of routers that try gRPC, get 400 and no line in the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


http_log = logging.getLogger("kvtide.http")
"""For errors that aiohttp meets before a request reaches its handler."""
http_log.addFilter(_OnlyOwnErrors())


def error_object(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    kind = "requests" if status == 429 else "invalid_request_error"
    if status >= 500:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(request: web.Request, error: Exception) -> web.Response:
    """The response to a request whose handler raised this error."""
    refuse = _messages_refusal if is_messages_path(request.path) else refusal
    match error:
        case RequestError():
            status = 404 if isinstance(error, ModelNotFoundError) else 400
            return refuse(status, str(error), error.code, error.param)
        case TemplateError():
            return refuse(400, str(error), "invalid_value", "messages")
        case OverloadedError():
            after = {"Retry-After": str(error.retry_s)}
            return refuse(429, str(error), "rate_limit_exceeded", headers=after)
        case ServiceEndedError():
            return refuse(503, str(error))
        case web.HTTPException():
            code, allowed = _HTTP_CODES.get(error.status), _allowed(error)
            return refuse(error.status, _explained(request, error), code, headers=allowed)
        case RecursionError():
            return refuse(400, "the body is nested too deeply; send less of it")
        case web.RequestPayloadError():
            return refuse(400, f"the body could not be read ({error}); send it as it is")
        case ConnectionError():
            return web.Response(status=CLIENT_GONE)
    log.error("%s %s", request.method, request.path, exc_info=error)
    return refuse(500, "something broke here; the server's log has the details")


def refusal(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    body = error_object(status, message, code, param)
    return web.json_response(body, status=status, headers=headers)


def _messages_refusal(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """The same in Anthropic's shape, which has neither codes nor fields at fault."""
    return web.json_response(messages_error(status, message), status=status, headers=headers)


def _explained(request: web.Request, error: web.HTTPException) -> str:
    """The sentence for an error that aiohttp raises."""
    if isinstance(error, web.HTTPNotFound):
        return f"there is no {request.path} here; use /v1/completions or /v1/chat/completions"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} does not take {request.method}; use {error.headers['Allow']}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body has more than {MAX_BODY_BYTES >> 20} MiB; send a smaller one"
    return error.text or error.reason


def _allowed(error: web.HTTPException) -> dict[str, str]:
    """Of the headers that aiohttp sets, the one that a client can use."""
    return {name: error.headers[name] for name in ("Allow",) if name in error.headers}
