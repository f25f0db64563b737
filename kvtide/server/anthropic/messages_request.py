"""A body of Anthropic's `/v1/messages` → the body of a chat completion.

| Anthropic                             | chat                                                    |
|---------------------------------------|---------------------------------------------------------|
| `system`, role system at the front    | messages of role system                                 |
| role system later on                  | `<system-reminder>` in the user's message               |
| blocks text                           | `content`                                               |
| blocks tool_use                       | `tool_calls`                                            |
| blocks tool_result                    | messages of role tool                                   |
| blocks thinking                       | `reasoning_content`; redacted_thinking is left out      |
| `tools[].input_schema`                | `tools[].function.parameters`                           |
| `tools[].defer_loading`               | no tool, until a block tool_reference names it          |
| blocks tool_reference                 | the definition of that tool, which the front has not    |
| `tool_choice` auto, any, tool, none   | auto, required, the function, none                      |
| `disable_parallel_tool_use`           | `parallel_tool_calls`                                   |
| `stop_sequences`                      | `stop`                                                  |
| `output_config.format`                | `response_format`                                       |
| `thinking`, `output_config.effort`    | `enable_thinking`, `reasoning_effort` of the template   |
| `metadata.user_id` of Claude Code     | `session_id`, if the body has none                      |

`cache_control` may stand anywhere and changes nothing: every whole page is kept. Hints for
Anthropic's own service (`service_tier`, `context_management`, …) are ignored.
"""

from __future__ import annotations

import json

from kvtide.engine import RequestError
from kvtide.server.chat.chat_turns import (
    PARAGRAPH,
    ChatTurns,
    Json,
    common_fields,
    with_template_variables,
)
from kvtide.server.refused_fields import MESSAGES, refuse
from kvtide.server.request_parsing import RequestFields

MAX_USER_ID = 4096

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: RequestFields) -> Json:
    """The chat body of a message request."""
    if body.get("max_tokens") is None:
        raise RequestError(
            "max_tokens is missing; send how many tokens the answer may have",
            "missing_required_parameter",
            "max_tokens",
        )
    chat = prompt_body(body)
    chat |= common_fields(dict(body.values), _client_session(body))
    chat["max_tokens"] = body.get("max_tokens")
    if body.get("stop_sequences"):
        chat["stop"] = body.get("stop_sequences")
    return chat


def _client_session(body: RequestFields) -> object:
    """Claude Code names its session in a JSON text."""
    user = body.object("metadata").get("user_id")
    try:
        named = json.loads(user) if isinstance(user, str) and len(user) <= MAX_USER_ID else None
    except (ValueError, RecursionError):
        return None
    return named.get("session_id") if isinstance(named, dict) else None


def prompt_body(body: RequestFields) -> Json:
    """The part of the chat body that makes the prompt: what `count_tokens` counts."""
    refuse(body.values, MESSAGES)
    tools = [_tool(tool) for tool in _objects(body.get("tools") or [], "tools")]
    turns = _Turns(tools)
    _read_messages(turns, body)
    chat: Json = {"messages": turns.messages}
    if body.get("model") is not None:
        chat["model"] = body.get("model")
    if tools:
        chat["tools"] = turns.known_tools()
        _choose(chat, body.object("tool_choice"))
    output = body.object("output_config")
    if form := output.get("format") or body.get("output_format"):
        chat["response_format"] = _response_format(RequestFields(form, "output_config.format"))
    thinking = body.object("thinking").get("type")
    with_template_variables(
        chat,
        body.get("chat_template_kwargs"),
        enable_thinking=None if thinking is None else thinking != "disabled",
        reasoning_effort=output.get("effort"),
    )
    return chat


def _objects(value: object, name: str) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"{name} is not a list of objects; send one", "invalid_type", name)
    return value


# -- messages ---------------------------------------------------------------------------------


class _Turns(ChatTurns):
    """A chat whose deferred tools are defined where a message first refers to them: what stands
    before stays as it was, and so does its prefix in the cache."""

    def __init__(self, tools: list[Json]) -> None:
        super().__init__()
        self._tools = tools
        self._unknown = {
            tool["function"]["name"]: tool["function"]
            for tool in tools
            if tool.get("defer_loading")
        }

    def reference(self, name: str) -> str:
        """What the model reads of a tool that a search has found."""
        found = self._unknown.pop(name, None)
        if found is None:
            return f"The tool {name} is available."
        described = {key: value for key, value in found.items() if key != "strict"}
        definition = json.dumps({"type": "function", "function": described}, ensure_ascii=False)
        return f"The tool {name} is available:\n{definition}"

    def known_tools(self) -> list[Json]:
        """Those at the front, and those that were referred to."""
        return [tool for tool in self._tools if tool["function"]["name"] not in self._unknown]


def _read_messages(chat: _Turns, body: RequestFields) -> None:
    given = body.get("messages")
    if not given:
        raise RequestError(
            "messages is missing; send a list of messages with role and content",
            "missing_required_parameter",
            "messages",
        )
    if (system := body.get("system")) is not None and (text := _text(system, "system")):
        chat.system(text)
    for message in _objects(given, "messages"):
        _add(chat, message)
    if chat.messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last message is the assistant's, and beginnings of answers are not supported; "
            "end with a message of the user",
            "unsupported_value",
            "messages",
        )


def _add(chat: _Turns, message: Json) -> None:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        chat.system(_text(content, "messages"))
    elif role not in ("user", "assistant"):
        raise RequestError(
            f"a message has the role {_shown(role)}; send user, assistant or system",
            param="messages",
        )
    elif isinstance(content, str):
        (chat.user if role == "user" else chat.assistant)(content)
    else:
        for block in _objects(content, "messages"):
            (_user_block if role == "user" else _assistant_block)(chat, block)


def _user_block(chat: _Turns, block: Json) -> None:
    match block:
        case {"type": "text", "text": str(text)}:
            chat.user(text)
        case {"type": "tool_result", "tool_use_id": str(call_id)}:
            content = block.get("content")
            text = "" if content is None else _result(chat, content)
            chat.result(call_id, f"Error: {text}" if block.get("is_error") else text)
        case _:
            raise _unknown_block(block, "text or tool_result")


def _assistant_block(chat: ChatTurns, block: Json) -> None:
    match block:
        case {"type": "text", "text": str(text)}:
            chat.assistant(text)
        case {"type": "thinking", "thinking": str(text)}:
            chat.reasoning(text)
        case {"type": "redacted_thinking"}:
            pass
        case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(given)}:
            chat.call(call_id, name, json.dumps(given, ensure_ascii=False))
        case _:
            raise _unknown_block(block, "text, tool_use or thinking")


def _result(chat: _Turns, content: object) -> str:
    """The text of a tool's result, which may be tools that a search has found."""
    if isinstance(content, list):
        content = [_found(chat, block) for block in content]
    return _text(content, "messages")


def _found(chat: _Turns, block: object) -> object:
    match block:
        case {"type": "tool_reference", "tool_name": str(name)}:
            return {"type": "text", "text": chat.reference(name)}
    return block


def _text(content: object, name: str) -> str:
    """A text, or the text of blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for block in _objects(content, name):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise _unknown_block(block, "text")
        texts.append(block["text"])
    return PARAGRAPH.join(texts)


def _unknown_block(block: Json, wanted: str) -> RequestError:
    kind = block.get("type")
    if kind in ("image", "document"):
        return RequestError(
            f"content of type {kind} is not supported; send its text in a block of type text",
            "unsupported_value",
            "messages",
        )
    return RequestError(
        f"a block of type {_shown(kind)} is unknown here or lacks a field; send {wanted}",
        "unsupported_value",
        "messages",
    )


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# -- tools ------------------------------------------------------------------------------------


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"tools of type {_shown(tool['type'])} are not supported; send tools with name and "
            "input_schema",
            "unsupported_value",
            "tools",
        )
    if not isinstance(tool.get("name"), str):
        raise RequestError("a tool has no name; send one", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise RequestError("a tool has no input_schema; send a JSON schema", param="tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    deferred = (
        {"defer_loading": True} if RequestFields(tool, "a tool").flag("defer_loading") else {}
    )
    return {"type": "function", "function": function, **deferred}


def _choose(chat: Json, choice: RequestFields) -> None:
    kind = choice.get("type")
    if kind == "tool":
        named = {"name": choice.text("name", "")}
        chat["tool_choice"] = {"type": "function", "function": named}
    elif kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[str(kind)]
    elif kind is not None:
        raise RequestError(
            f"tool_choice has the type {_shown(kind)}; send auto, any, tool or none",
            param="tool_choice",
        )
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _response_format(form: RequestFields) -> Json:
    if form.get("type") != "json_schema":
        raise RequestError(
            f"the output format has the type {_shown(form.get('type'))}; send json_schema",
            param="output_config",
        )
    if not isinstance(schema := form.get("schema"), dict):
        raise RequestError(
            "the output format has no schema; send a JSON schema as schema", param="output_config"
        )
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": True},
    }
