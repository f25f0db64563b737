"""Errors as Anthropic's API answers them: a status, and `{"type": "error", "error": {…}}`."""

from __future__ import annotations

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

PATH = "/v1/messages"


def is_messages_path(path: str) -> bool:
    """Whether errors of this path have Anthropic's shape."""
    return path == PATH or path.startswith(PATH + "/")


def messages_error(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
