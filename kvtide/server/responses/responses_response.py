"""An output as OpenAI's response: server-sent events, and the response that they add up to.

    response.created response.in_progress
    (output_item.added … output_item.done)…
    response.completed | response.incomplete | response.failed

| item          | events between added and done                                                   |
|---------------|---------------------------------------------------------------------------------|
| message       | content_part.added output_text.delta… output_text.done content_part.done        |
| reasoning     | content_part.added reasoning_text.delta… reasoning_text.done content_part.done  |
| function_call | function_call_arguments.delta… function_call_arguments.done                     |

Every event has a `sequence_number`. `warnings` of a response are sentences about what was ignored.
A response that failed is not stored.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable

from kvtide.engine import Finish
from kvtide.server.chat.chat_turns import Json
from kvtide.server.chat.event_formatter import GRAMMAR_ERROR, Ending, TokenCounts
from kvtide.server.responses.encrypted_reasoning import encrypted
from kvtide.server.responses.responses_request import ResponsesRequest
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)


class ResponsesWriter:
    """The events of one response. `finished` gets the response when it is over."""

    def __init__(
        self, asked: ResponsesRequest, model: str, finished: Callable[[Json], bool]
    ) -> None:
        self._finished = finished
        self._sent = 0
        self._open: Json | None = None
        self._store, self._encrypts = asked.store, asked.encrypts
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "store": asked.store,
            "usage": None,
            **asked.echoed,
            **({"warnings": asked.warnings} if asked.warnings else {}),
        }

    def opening(self) -> list[Json]:
        return [
            self._event(f"response.{name}", response={**self._response, "output": []})
            for name in ("created", "in_progress")
        ]

    def started(self, counts: TokenCounts) -> list[Json]:
        return []

    def chunk(self, event: OutputEvent) -> list[Json]:
        match event:
            case TextDelta(text):
                empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                fields = {"role": "assistant", "content": []}
                events = self._within("message", "msg", fields, empty)
                return [*events, self._text_delta("output_text", text, logprobs=[])]
            case ReasoningDelta(text):
                fields = {"summary": [], "content": []}
                empty = {"type": "reasoning_text", "text": ""}
                events = self._within("reasoning", "rs", fields, empty)
                return [*events, self._text_delta("reasoning_text", text)]
            case CallBegin(_, call_id, name):
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                return [*self._done(), *self._added("function_call", "fc", fields)]
            case CallArguments(_, text):
                self._item["arguments"] += text
                return [self._item_event("function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self._done()

    def closing(self, ending: Ending) -> list[Json]:
        response = self._response
        if ending.finish is Finish.ERROR:
            events = self._done("incomplete")
            response["usage"] = _usage(ending.counts)
            response["store"] = False
            return [*events, self.failed(500, GRAMMAR_ERROR)]
        cut = ending.finish is Finish.LENGTH
        events = self._done("incomplete" if cut else "completed")
        response["status"] = "incomplete" if cut else "completed"
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["completed_at"] = None if cut else int(time.time())
        response["usage"] = _usage(ending.counts)
        if self._store:
            response["store"] = self._finished(response)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, status: int, message: str) -> Json:
        self._response["status"] = "failed"
        self._response["error"] = {"code": "server_error", "message": message}
        return self._event("response.failed", response=self._response)

    def whole(self) -> Json:
        return self._response

    # -- items ------------------------------------------------------------------------------

    @property
    def _item(self) -> Json:
        assert self._open is not None, "a piece of output without its item"
        return self._open

    def _within(self, kind: str, prefix: str, fields: Json, part: Json) -> list[Json]:
        """Begin an item with a part of text, unless one of its kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = [*self._done(), *self._added(kind, prefix, fields)]
        self._item["content"].append(part)
        return [*events, self._part_event("content_part.added", part=dict(part))]

    def _added(self, kind: str, prefix: str, fields: Json) -> list[Json]:
        item = {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "status": "in_progress"}
        self._open = {**item, **fields}
        self._response["output"].append(self._open)
        return [self._output_event("added")]

    def _done(self, status: str = "completed") -> list[Json]:
        """End the open item."""
        if (item := self._open) is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            events = [self._item_event("function_call_arguments.done", arguments=arguments)]
        else:
            (part,) = item["content"]
            if item["type"] == "reasoning" and self._encrypts:
                item["encrypted_content"] = encrypted(part["text"])
            extra: Json = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._part_event(f"{part['type']}.done", text=part["text"], **extra),
                self._part_event("content_part.done", part=dict(part)),
            ]
        events.append(self._output_event("done"))
        self._open = None
        return events

    # -- events -----------------------------------------------------------------------------

    def _text_delta(self, name: str, text: str, **fields: object) -> Json:
        self._item["content"][0]["text"] += text
        return self._part_event(f"{name}.delta", delta=text, **fields)

    def _part_event(self, name: str, **fields: object) -> Json:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, **fields: object) -> Json:
        placed = {"item_id": self._item["id"], "output_index": self._index}
        return self._event(f"response.{name}", **placed, **fields)

    def _output_event(self, name: str) -> Json:
        item = copy.deepcopy(self._item)
        return self._event(f"response.output_item.{name}", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    def _event(self, kind: str, **fields: object) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}


def _usage(counts: TokenCounts) -> Json:
    read = {"cached_tokens": counts.cached, "cache_write_tokens": counts.written}
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": read,
        "output_tokens": counts.output,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning, **counts.drafts},
        "total_tokens": counts.prompt + counts.output,
        **counts.details,
    }
