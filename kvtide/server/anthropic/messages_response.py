"""An output as Anthropic's message: server-sent events, and the message that they add up to.

    message_start ping (content_block_start content_block_delta… content_block_stop)…
    message_delta message_stop | error

Reasoning is a block of type thinking, a call a block of type tool_use. `message_start` comes with
the first token, when it is known how much of the prompt was cached. An output that failed ends with
`error`; in one piece it is an error of status 500.
"""

from __future__ import annotations

import json
import secrets

from aiohttp import web

from kvtide.engine import Finish
from kvtide.server.anthropic.messages_errors import messages_error
from kvtide.server.chat.chat_turns import Json
from kvtide.server.chat.event_formatter import GRAMMAR_ERROR, Ending, TokenCounts
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)

SIGNATURE = "kvtide"
"""Thinking is not signed here; clients that return it want a signature nevertheless."""


class MessageWriter:
    """The events of one message."""

    def __init__(self, model: str) -> None:
        self._message: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._open: Json | None = None
        self._arguments = ""
        self._failed = False

    def opening(self) -> list[Json]:
        return []

    def started(self, counts: TokenCounts) -> list[Json]:
        message = {**self._message, "content": [], "usage": _usage(counts)}
        return [_event("message_start", message=message), _event("ping")]

    def chunk(self, event: OutputEvent) -> list[Json]:
        match event:
            case TextDelta(text):
                events = self._within("text", {"type": "text", "text": ""})
                return [*events, self._delta("text", {"type": "text_delta", "text": text})]
            case ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events = self._within("thinking", block)
                delta = {"type": "thinking_delta", "thinking": text}
                return [*events, self._delta("thinking", delta)]
            case CallBegin(_, call_id, name):
                call: Json = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._stop(), *self._start(call)]
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta(None, {"type": "input_json_delta", "partial_json": text})]
            case CallEnd():
                return self._stop()

    def closing(self, ending: Ending) -> list[Json]:
        if ending.finish is Finish.ERROR:
            self._failed = True
            return [self.failed(500, GRAMMAR_ERROR)]
        events = self._stop()
        message, usage = self._message, _usage(ending.counts)
        message["stop_reason"] = self._stop_reason(ending)
        message["stop_sequence"] = ending.stopped
        message["usage"] = usage
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *events,
            _event("message_delta", delta=delta, usage=usage),
            _event("message_stop"),
        ]

    def failed(self, status: int, message: str) -> Json:
        return messages_error(status, message)

    def whole(self) -> Json:
        if self._failed:
            raise web.HTTPInternalServerError(text=GRAMMAR_ERROR)
        return self._message

    # -- blocks -----------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _within(self, kind: str, block: Json) -> list[Json]:
        """Begin this block, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        return [*self._stop(), *self._start(block)]

    def _start(self, block: Json) -> list[Json]:
        self._open, self._arguments = block, ""
        self._message["content"].append(block)
        started = _event("content_block_start", index=self._index, content_block=dict(block))
        return [started]

    def _delta(self, name: str | None, delta: Json) -> Json:
        """A piece of the open block, which keeps it in the field of this name."""
        assert self._open is not None, "a piece of output without its block"
        if name is not None:
            self._open[name] += delta[name]
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> list[Json]:
        if (block := self._open) is None:
            return []
        events = []
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            events.append(_event("content_block_delta", index=self._index, delta=delta))
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        self._open = None
        return [*events, _event("content_block_stop", index=self._index)]

    def _stop_reason(self, ending: Ending) -> str:
        if ending.finish is Finish.LENGTH:
            return "max_tokens"
        if ending.stopped is not None:
            return "stop_sequence"
        calls = any(block["type"] == "tool_use" for block in self._message["content"])
        return "tool_use" if calls else "end_turn"


def _event(kind: str, **fields: object) -> Json:
    return {"type": kind, **fields}


def _input(arguments: str) -> Json:
    """A call's arguments; none where the output was cut before they were complete."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _usage(counts: TokenCounts) -> Json:
    """Uncached, read and written tokens add up to the prompt's."""
    return {
        "input_tokens": counts.uncached,
        "cache_creation_input_tokens": counts.written,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.output,
        **({"output_tokens_details": counts.drafts} if counts.drafts else {}),
        **counts.details,
    }
