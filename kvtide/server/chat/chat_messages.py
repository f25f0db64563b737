"""The messages of a chat's body, checked: roles, texts, calls of an assistant, results of tools.

Templates write roles and names into the prompt as they are, between markers: one that is not known
here could end its message and begin another. Arguments of calls stay the text that the client sent:
what a model wrote comes back letter by letter, and its pages in the cache match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvtide.engine import RequestError
from kvtide.server.tools.tool_spec import MAX_NAME, MAX_SCHEMA_DEPTH, NAME, deeper_than

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_ARGUMENTS_BYTES = 1 << 20
"""The arguments of one call."""
MAX_CALLS = 1024
"""Calls of one message."""
_SPEAKER = re.compile(r"[^\s<|>\\/]{1,64}")
"""The `name` of a message, as OpenAI has it."""


def read_messages(given: object) -> list[Mapping[str, object]]:
    """The messages with their content as text, or `RequestError`."""
    if not isinstance(given, list) or not given:
        raise RequestError(
            "messages is missing; send a list of messages with role and content",
            "missing_required_parameter" if given is None else "invalid_type",
            "messages",
        )
    names: dict[str, str] = {}
    return [_message(message, names) for message in given]


def _message(message: object, names: dict[str, str]) -> Mapping[str, object]:
    """`names` has the functions' names by the ids of their calls, for the results."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _problem(
            "a message has no role; send objects with role and content",
            "missing_required_parameter",
        )
    _check_names(message)
    calls = _calls(message.get("tool_calls"))
    if calls and message["role"] != "assistant":
        raise _problem(
            f"a message of role {message['role']} has tool_calls; send them with role assistant",
            "invalid_value",
        )
    content = _content(message.get("content"), optional=bool(calls))
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls:
        names.update((call["id"], call["function"]["name"]) for call in calls)
        return {**kept, "content": content or None, "tool_calls": calls}
    if message["role"] == "tool":
        return _result({**kept, "content": content}, names)
    return {**kept, "content": content}


def _check_names(message: Mapping[str, object]) -> None:
    role, name = message["role"], message.get("name")
    if role == "function":
        raise _problem(
            "the role function is not supported; send role tool, with a tool_call_id",
            "unsupported_value",
        )
    if role not in ROLES:
        raise _problem(
            f"there is no role {role!r:.60}; send one of {', '.join(ROLES)}", "invalid_value"
        )
    if name is not None and not (isinstance(name, str) and _SPEAKER.fullmatch(name)):
        raise _problem(
            f"the name {name!r:.80} of a message is not 1 to 64 characters without space and "
            "without < | > / \\; rename it",
            "invalid_value",
        )


def _content(content: object, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise _problem("a message's content is not text; send a text or parts of type text")
    return content


def _part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise _problem(
        f"content of type {kind!s:.60} is not supported; send parts of type text",
        "unsupported_value",
    )


def _result(message: dict[str, object], names: Mapping[str, str]) -> Mapping[str, object]:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise _problem(
            "a message of role tool has no tool_call_id; send the id of the call that it answers",
            "missing_required_parameter",
        )
    if "name" not in message and call_id in names:
        return {**message, "name": names[call_id]}
    return message


# -- calls ------------------------------------------------------------------------------------


def _calls(given: object) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise _problem("tool_calls of a message is not a list; send the calls as they came")
    if len(given) > MAX_CALLS:
        raise _problem(
            f"a message has {len(given)} tool_calls; send at most {MAX_CALLS}", "invalid_value"
        )
    return [_call(call) for call in given]


def _call(given: object) -> dict[str, Any]:
    call = given if isinstance(given, dict) else {}
    called = call.get("function")
    function: dict[str, Any] = called if isinstance(called, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _problem(
            "a call in tool_calls has no function with a name; send the calls as they came",
            "missing_required_parameter",
        )
    if not NAME.fullmatch(name):
        raise _problem(
            f"the name {name!r:.80} of a call is not 1 to {MAX_NAME} letters, digits, _ or -; send "
            "the calls as they came",
            "invalid_value",
        )
    arguments, call_id = function.get("arguments"), call.get("id")
    if arguments is not None and not isinstance(arguments, str):
        raise _problem("the arguments of a call are not a text; send its JSON as a text")
    _check_arguments(name, arguments or "")
    if call_id is not None and not isinstance(call_id, str):
        raise _problem("the id of a call is not a text; send the calls as they came")
    shown = {**function, "arguments": arguments or "{}"}
    return {**call, "id": call_id or "", "type": "function", "function": shown}


def _check_arguments(name: str, arguments: str) -> None:
    """Their size, and how deeply they are nested: templates want them as an object."""
    size = len(arguments.encode("utf-8", "replace"))
    if size > MAX_ARGUMENTS_BYTES:
        raise _problem(
            f"the arguments of a call of {name} are {size:,} bytes; send at most "
            f"{MAX_ARGUMENTS_BYTES:,}, and longer texts as content",
            "invalid_value",
        )
    try:
        deep = deeper_than(json.loads(arguments), MAX_SCHEMA_DEPTH)
    except ValueError:
        return
    except RecursionError:
        deep = True
    if deep:
        raise _problem(
            f"the arguments of a call of {name} are nested more than {MAX_SCHEMA_DEPTH} deep; "
            "send flatter ones",
            "invalid_value",
        )


def _problem(message: str, code: str = "invalid_type") -> RequestError:
    return RequestError(message, code, "messages")
