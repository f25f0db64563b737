"""A body of OpenAI's `/v1/responses` → the body of a chat completion.

| Responses                                | chat                                                 |
|------------------------------------------|------------------------------------------------------|
| `instructions`, roles system, developer  | messages of role system                              |
| roles system, developer later on         | `<system-reminder>` in the user's message            |
| items message, or without a type         | messages                                             |
| items function_call                      | `tool_calls`                                         |
| items function_call_output               | messages of role tool                                |
| items reasoning                          | `reasoning_content`, from `encrypted_content` too    |
| `previous_response_id`                   | the stored items before this input                   |
| function `tools`                         | `tools`; tools of other types are ignored with a note|
| `tool_choice`, `parallel_tool_calls`     | the same                                             |
| `text.format`                            | `response_format`                                    |
| `max_output_tokens`                      | `max_completion_tokens`                              |
| `reasoning.effort`, `text.verbosity`     | `reasoning_effort`, `verbosity` of the template      |

A UUID as `prompt_cache_key`, which Codex sends, is the `session_id` if the body has none. Hints for
OpenAI's own service (`service_tier`, `include`, …) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.engine import RequestError
from kvtide.server.chat.chat_turns import (
    PARAGRAPH,
    ChatTurns,
    Json,
    common_fields,
    with_template_variables,
)
from kvtide.server.refused_fields import RESPONSES, refuse
from kvtide.server.request_parsing import RequestFields
from kvtide.server.responses.encrypted_reasoning import INCLUDED, decrypted

MARGIN = 100
"""Levels of nesting between what a body may have and what the server can write."""
MAX_METADATA = 16
MAX_INCLUDED = 64
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA_TEXT = 512

_TEXTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """chat      the chat body
    items     the input of this turn
    store     the response is kept for later turns
    previous  the response that this one continues
    echoed    fields of the request that the response repeats
    warnings  what was ignored, in sentences
    encrypts  reasoning items get `encrypted_content`
    """

    chat: Json
    items: list[Json]
    store: bool
    previous: str | None
    echoed: Json
    warnings: list[str]
    encrypts: bool


def read_request(
    body: RequestFields, chain: Callable[[str], list[Json] | None]
) -> ResponsesRequest:
    """`chain` gives the items up to a stored response."""
    refuse(body.values, RESPONSES)
    items = _items(body.get("input"))
    previous = body.text("previous_response_id", "") or None
    before = [] if previous is None else chain(previous)
    if before is None:
        raise RequestError(
            f"there is no stored response {_shown(previous)}; send all items as input",
            "previous_response_not_found",
            "previous_response_id",
        )
    chat: Json = common_fields(dict(body.values), body.get("prompt_cache_key"))
    chat["messages"] = _messages(body.text("instructions", ""), [*before, *items])
    for name in ("model", "parallel_tool_calls", "stop", "user"):
        if body.get(name) is not None:
            chat[name] = body.get(name)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body.integer("max_output_tokens", None, 0)
    tools, warnings = _tools(body.get("tools"))
    if tools:
        chat["tools"] = tools
    if (choice := body.get("tool_choice")) is not None and (
        tools or choice not in ("auto", "none")
    ):
        chat["tool_choice"] = _tool_choice(choice)
    if (form := _response_format(body.object("text"))) is not None:
        chat["response_format"] = form
    with_template_variables(
        chat,
        body.get("chat_template_kwargs"),
        reasoning_effort=body.object("reasoning").get("effort"),
        verbosity=body.object("text").get("verbosity"),
    )
    store, echoed = body.flag("store", default=True), _echoed(body)
    _check_depth([echoed, items])
    encrypts = INCLUDED in _included(body)
    return ResponsesRequest(chat, items, store, previous, echoed, warnings, encrypts)


def _included(body: RequestFields) -> tuple[str, ...]:
    """`include`; what it may ask of tools of OpenAI's own never comes."""
    included = body.texts("include", MAX_INCLUDED)
    if LOGPROBS in included:
        raise RequestError(
            f"{LOGPROBS} in include is not supported; ask /v1/chat/completions for logprobs",
            "unsupported_value",
            "include",
        )
    return included


def _check_depth(kept: object) -> None:
    """What a response repeats and stores must still be JSON when it is deeper in a call stack."""
    for _ in range(MARGIN):
        kept = [kept]
    try:
        json.dumps(kept)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send less of it", None) from None


def _echoed(body: RequestFields) -> Json:
    metadata = body.object("metadata").values
    if len(metadata) > MAX_METADATA or not all(
        isinstance(value, str) and len(value) <= MAX_METADATA_TEXT for value in metadata.values()
    ):
        raise RequestError(
            f"metadata is not an object of up to {MAX_METADATA} texts of up to "
            f"{MAX_METADATA_TEXT} characters; send one",
            param="metadata",
        )
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": dict(metadata),
        "parallel_tool_calls": body.flag("parallel_tool_calls", default=True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **body.object("reasoning").values},
        "temperature": body.number("temperature", 1.0),
        "text": {"format": {"type": "text"}, **body.object("text").values},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.number("top_p", 1.0),
        "truncation": "disabled",
    }


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# -- input ------------------------------------------------------------------------------------


def _items(given: object) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError(
            "input is missing; send a text or a list of items",
            "missing_required_parameter" if given is None else "invalid_type",
            "input",
        )
    if not all(isinstance(item, dict) for item in given):
        raise RequestError("an item of input is no object; send objects", "invalid_type", "input")
    return given


def _messages(instructions: str, items: list[Json]) -> list[Json]:
    chat = ChatTurns()
    if instructions:
        chat.system(instructions)
    for item in items:
        _add(chat, item)
    return chat.messages


def _add(chat: ChatTurns, item: Json) -> None:
    match item:
        case {"type": "function_call", "call_id": str(call), "name": str(name)}:
            chat.call(call, name, _string(item.get("arguments"), "arguments"))
        case {"type": "function_call_output", "call_id": str(call)}:
            chat.result(call, _text(item.get("output"), PARAGRAPH))
        case {"type": "reasoning"}:
            if (thought := _thought(item)) is not None:
                chat.reasoning(thought)
        case {"role": "assistant"}:
            chat.assistant(_text(item.get("content"), ""))
        case {"role": "user"}:
            chat.user(_text(item.get("content"), PARAGRAPH))
        case {"role": "system" | "developer"}:
            chat.system(_text(item.get("content"), PARAGRAPH))
        case _:
            kind = item.get("type") or f"message with the role {_shown(item.get('role'))}"
            raise RequestError(
                f"an item of type {_shown(kind)} is unknown here or lacks a field; send message, "
                "function_call, function_call_output or reasoning",
                "unsupported_value",
                "input",
            )


def _text(content: object, separator: str) -> str:
    """A text, or the text of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            "an item's content is not text; send a text or parts of type input_text",
            "invalid_type",
            "input",
        )
    return separator.join(_part(part) for part in content)


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXTS:
        return _string(part.get("text"), "text")
    if isinstance(part, dict) and kind == "refusal":
        return _string(part.get("refusal"), "refusal")
    raise RequestError(
        f"content of type {_shown(kind)} is not supported; send parts of type input_text",
        "unsupported_value",
        "input",
    )


def _thought(item: Json) -> str | None:
    """The text of a reasoning item, if it can be read."""
    if parts := item.get("content") or []:
        listed = parts if isinstance(parts, list) else [parts]
        texts = (part.get("text") if isinstance(part, dict) else None for part in listed)
        return "".join(_string(text, "text") for text in texts)
    return decrypted(item.get("encrypted_content"))


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"an item's {name} is not a text; send one", "invalid_type", "input")
    return value


# -- tools and formats ------------------------------------------------------------------------


def _tools(given: object) -> tuple[list[Json], list[str]]:
    """Function tools as a chat has them, and a sentence for each other type."""
    if given is None:
        return [], []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise RequestError("tools is not a list of objects; send one", "invalid_type", "tools")
    tools, ignored = [], []
    for tool in given:
        if tool.get("type") != "function":
            ignored.append(_shown(tool.get("type")))
            continue
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools, [
        f"tools of type {kind} are ignored: the model calls functions only"
        for kind in dict.fromkeys(ignored)
    ]


def _tool_choice(choice: object) -> object:
    if isinstance(choice, str):
        return choice
    match choice:
        case {"type": "function"}:
            return _chosen(choice)
        case {"type": "allowed_tools", "tools": [*listed], **rest}:
            allowed = {"mode": rest.get("mode"), "tools": [_chosen(each) for each in listed]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise RequestError(
        "tool_choice is neither a word nor a function; send auto, none, required, allowed_tools, "
        'or {"type": "function", "name": …}',
        "unsupported_value",
        "tool_choice",
    )


def _chosen(tool: object) -> object:
    """A function of a choice, as a chat has it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {"name": tool.get("name")}}


def _response_format(text: RequestFields) -> Json | None:
    form = text.object("format")
    kind = form.get("type") or "text"
    if kind in ("text", "json_object"):
        return None if kind == "text" else {"type": kind}
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestError(
            f"text.format has the type {_shown(kind)} or no schema; send text, json_object, or "
            "json_schema with a schema",
            param="text.format",
        )
    schema = {key: value for key, value in form.values.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}
