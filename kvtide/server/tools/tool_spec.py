"""Tools of a chat's body, checked: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvtide.engine import RequestError

MAX_TOOLS = 512
MAX_TOOL_BYTES = 1 << 20
"""All tools of a request as JSON: the prompt has all of them."""
MAX_SCHEMA_DEPTH = 64
MAX_NAME = 128
"""Characters of a tool's name, as in Anthropic's API."""
NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call.

    parameters  the JSON schema of its arguments; `strict` enforces it by grammar
    deferred    a message describes it, so that the front of the prompt does not
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    strict: bool = False
    deferred: bool = False

    def template_form(self) -> dict[str, object]:
        """The tool as chat templates know it."""
        description = {"description": self.description} if self.description else {}
        function = {"name": self.name, **description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ChoiceMode(Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name`, with REQUIRED, is the one function that must be called. `allowed` are the functions
    that may be; None for all of them."""

    mode: ChoiceMode
    name: str | None = None
    allowed: frozenset[str] | None = None

    def may_call(self, name: str) -> bool:
        return self.name in (None, name) and (self.allowed is None or name in self.allowed)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """What a request says of tools. `parallel`: an answer may have several calls."""

    tools: tuple[FunctionTool, ...] = ()
    choice: ToolChoice = ToolChoice(ChoiceMode.NONE)
    parallel: bool = True

    @property
    def callable(self) -> tuple[FunctionTool, ...]:
        """The tools that this answer may call."""
        if self.choice.mode is ChoiceMode.NONE:
            return ()
        return tuple(tool for tool in self.tools if self.choice.may_call(tool.name))

    @property
    def several(self) -> bool:
        """Whether this answer may have several calls; a named function is called once."""
        return self.parallel and self.choice.name is None

    @property
    def required(self) -> bool:
        return self.choice.mode is ChoiceMode.REQUIRED

    @property
    def guarded(self) -> bool:
        """Whether a grammar holds calls in free text to these tools and their schemas."""
        return self.choice.allowed is not None or any(tool.strict for tool in self.callable)


NO_TOOLS = ToolRequest()


def read_tools(tools: object, choice: object, *, parallel: bool = True) -> ToolRequest:
    """The body's fields, or `RequestError` with the field at fault."""
    found = _tools(tools)
    return ToolRequest(found, _choice(choice, found), parallel)


# -- tools ------------------------------------------------------------------------------------


def _tools(given: object) -> tuple[FunctionTool, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _problem("tools is not a list; send a list of functions", "invalid_type")
    if len(given) > MAX_TOOLS:
        raise _problem(f"{len(given)} tools; send at most {MAX_TOOLS}")
    try:
        size = len(json.dumps(given).encode())
    except RecursionError:
        raise _problem("a tool's schema is nested too deeply; send a flatter one") from None
    if size > MAX_TOOL_BYTES:
        raise _problem(
            f"the tools are {size:,} bytes of JSON; send at most {MAX_TOOL_BYTES:,}: shorten "
            "descriptions and enums"
        )
    tools = tuple(_tool(tool) for tool in given)
    _check_names(tool.name for tool in tools)
    return tools


def _tool(given: object) -> FunctionTool:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "function":
        raise _problem(
            f"a tool of type {kind!r:.60} is not supported; send tools of type function",
            "unsupported_value" if isinstance(kind, str) else "invalid_type",
        )
    assert isinstance(given, dict)
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _problem(
            "one of the tools has no function with a name; send {type, function: {name, …}}",
            "missing_required_parameter",
        )
    name, description = function["name"], function.get("description")
    if not NAME.fullmatch(name):
        raise _problem(
            f"the tool name {name!r:.80} is not 1 to {MAX_NAME} letters, digits, _ or -; rename it"
        )
    if description is not None and not isinstance(description, str):
        raise _problem(f"the description of {name} is not a text; send one", "invalid_type")
    return FunctionTool(
        name,
        description or "",
        _parameters(name, function.get("parameters")),
        strict=_flag(name, "strict", function.get("strict")),
        deferred=_flag(name, "defer_loading", given.get("defer_loading")),
    )


def _flag(tool: str, name: str, given: object) -> bool:
    if given is not None and type(given) is not bool:
        raise _problem(f"{name} of {tool} is not true or false; send one", "invalid_type")
    return bool(given)


def _parameters(name: str, given: object) -> Mapping[str, object]:
    if given is None:
        return {"type": "object", "properties": {}}
    if not isinstance(given, dict):
        raise _problem(f"the parameters of {name} are not a JSON schema; send one", "invalid_type")
    if given.get("type", "object") != "object":
        raise _problem(f"the parameters of {name} are not of type object; send such a schema")
    if deeper_than(given, MAX_SCHEMA_DEPTH):
        raise _problem(
            f"the parameters of {name} are nested more than {MAX_SCHEMA_DEPTH} deep; send a "
            "flatter schema"
        )
    return given


def deeper_than(value: object, depth: int) -> bool:
    """Whether objects and lists lie in each other more than so many levels deep."""
    level: list[object] = [value]
    for _ in range(depth):
        level = [inner for outer in level for inner in _inner(outer)]
    return bool(level)


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_names(names: Iterable[str]) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise _problem(f"two tools are named {name}; rename one of them")
        seen.add(name)


# -- choice -----------------------------------------------------------------------------------


def _choice(given: object, tools: tuple[FunctionTool, ...]) -> ToolChoice:
    if given is None:
        return ToolChoice(ChoiceMode.AUTO if tools else ChoiceMode.NONE)
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return _allowed(given.get("allowed_tools"), tools)
    if isinstance(given, str) and given in {mode.value for mode in ChoiceMode}:
        mode, name = ChoiceMode(given), None
    elif (name := _chosen_name(given)) is not None:
        mode = ChoiceMode.REQUIRED
    else:
        raise RequestError(
            f"tool_choice is {given!r:.80}; send auto, none, required, allowed_tools, or "
            '{"type": "function", "function": {"name": …}}',
            "invalid_value" if isinstance(given, str) else "invalid_type",
            "tool_choice",
        )
    if mode is ChoiceMode.REQUIRED and not tools:
        raise RequestError(
            "tool_choice asks for a call and there are no tools; send tools, or leave it out",
            param="tool_choice",
        )
    if name is not None:
        _check_known([name], tools)
    return ToolChoice(mode if tools else ChoiceMode.NONE, name)


def _allowed(given: object, tools: tuple[FunctionTool, ...]) -> ToolChoice:
    fields = given if isinstance(given, dict) else {}
    mode, listed = fields.get("mode"), fields.get("tools")
    names = [_chosen_name(each) for each in listed] if isinstance(listed, list) else []
    known = [name for name in names if name is not None]
    if mode not in (ChoiceMode.AUTO.value, ChoiceMode.REQUIRED.value) or not known or None in names:
        raise RequestError(
            "allowed_tools has no mode or lists no functions; send a mode of auto or required, and "
            'tools as {"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    _check_known(known, tools)
    return ToolChoice(ChoiceMode(mode), allowed=frozenset(known))


def _check_known(names: Iterable[str], tools: tuple[FunctionTool, ...]) -> None:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is not among the tools; name one of them",
                param="tool_choice",
            )


def _chosen_name(given: object) -> str | None:
    if not isinstance(given, dict) or given.get("type") != "function":
        return None
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _problem(message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(message, code, "tools")
