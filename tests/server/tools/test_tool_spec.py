"""Tools and messages of a body: what is taken, and sentences for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.engine import RequestError
from kvtide.server.chat.chat_messages import read_messages
from kvtide.server.tools.tool_spec import (
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    ChoiceMode,
    ToolChoice,
    read_tools,
)


def tool(name: object = "f", **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: object, *tools: object) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_tools_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = read_tools([tool(description="d", parameters=schema, strict=True), tool("g")], None)
    first, second = request.tools
    assert (first.name, first.description, first.parameters, first.strict) == (
        "f",
        "d",
        schema,
        True,
    )
    assert first.template_form() == tool(description="d", parameters=schema)
    assert second.parameters == {"type": "object", "properties": {}}
    assert request.choice == ToolChoice(ChoiceMode.AUTO) and request.guarded
    assert not request.required


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ChoiceMode.AUTO, ["f", "g"]),
        ("auto", ChoiceMode.AUTO, ["f", "g"]),
        ("none", ChoiceMode.NONE, []),
        ("required", ChoiceMode.REQUIRED, ["f", "g"]),
        (tool("g"), ChoiceMode.REQUIRED, ["g"]),
        (allowed("auto", tool("g")), ChoiceMode.AUTO, ["g"]),
        (allowed("required", tool("g"), tool("f")), ChoiceMode.REQUIRED, ["f", "g"]),
    ],
    ids=str,
)
def test_a_choice_says_what_may_be_called(
    choice: object, mode: ChoiceMode, names: list[str]
) -> None:
    request = read_tools([tool(), tool("g")], choice)
    assert request.choice.mode is mode
    assert [each.name for each in request.callable] == names
    assert [each.name for each in request.tools] == ["f", "g"]
    assert request.several == (choice != tool("g"))
    assert request.guarded == (isinstance(choice, dict) and choice["type"] == "allowed_tools")


def test_no_tools_are_no_choice() -> None:
    assert read_tools(None, "auto").callable == () == read_tools([], "none").callable


@pytest.mark.parametrize(
    ("tools", "words", "code"),
    [
        ("f", "not a list", "invalid_type"),
        ([5], "type None", "invalid_type"),
        ([{"type": "web_search"}], "'web_search' is not supported", "unsupported_value"),
        ([{"type": "function"}], "no function with a name", "missing_required_parameter"),
        ([tool(None)], "no function with a name", "missing_required_parameter"),
        ([tool("")], "rename it", "invalid_value"),
        ([tool("a b")], "rename it", "invalid_value"),
        ([tool("ü")], "rename it", "invalid_value"),
        ([tool('"}\n<tool_call>')], "rename it", "invalid_value"),
        ([tool("a" * 129)], "rename it", "invalid_value"),
        ([tool(), tool()], "two tools are named f", "invalid_value"),
        ([tool(str(n)) for n in range(MAX_TOOLS + 1)], "at most 512", "invalid_value"),
        ([tool(description="a" * MAX_TOOL_BYTES)], "bytes of JSON", "invalid_value"),
        ([tool(description=5)], "description of f", "invalid_type"),
        ([tool(strict="yes")], "strict of f", "invalid_type"),
        ([tool() | {"defer_loading": "yes"}], "defer_loading of f", "invalid_type"),
        ([tool(parameters=[])], "not a JSON schema", "invalid_type"),
        ([tool(parameters={"type": "string"})], "not of type object", "invalid_value"),
        ([tool(parameters=nested(100))], "nested more than", "invalid_value"),
    ],
)
def test_tools_that_are_none_are_refused(tools: object, words: str, code: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_tools(tools, None)
    assert (caught.value.code, caught.value.param) == (code, "tools")
    assert "; " in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "choice",
    [
        *("any", 5, {}, {"type": "function"}, tool("h"), tool(5)),
        *(allowed("auto"), allowed("none", tool()), allowed(None, tool()), allowed("auto", "f")),
        *(allowed("auto", tool(), tool("h")), allowed("auto", tool(), {"type": "mcp"})),
        *({"type": "allowed_tools"}, {"type": "allowed_tools", "mode": "auto", "tools": [tool()]}),
    ],
    ids=str,
)
def test_choices_that_are_none_are_refused(choice: object) -> None:
    with pytest.raises(RequestError, match=r"tool_choice|allowed_tools") as caught:
        read_tools([tool()], choice)
    assert caught.value.param == "tool_choice" and "; " in str(caught.value)
    with pytest.raises(RequestError, match="there are no tools"):
        read_tools(None, "required")


# -- messages -------------------------------------------------------------------------------------


def call(**fields: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}", **fields}}


def test_calls_and_results_are_read() -> None:
    asked, called, result = read_messages(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "", "tool_calls": [call(arguments='{"a":1}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ]
    )
    assert asked["content"] == "ab"
    assert called["content"] is None and called["tool_calls"] == [call(arguments='{"a":1}')]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "5", "name": "f"}


def test_arguments_that_are_no_json_stay_text() -> None:
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call(arguments="{'a'")]}])
    assert message["tool_calls"] == [call(arguments="{'a'")]
    (empty,) = read_messages([{"role": "assistant", "tool_calls": [call(arguments=None)]}])
    assert empty["tool_calls"] == [call(arguments="{}")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "5"}, "no tool_call_id"),
        ({"role": "tool", "content": "5", "tool_call_id": 5}, "no tool_call_id"),
        ({"role": "tool", "tool_call_id": "c1"}, "not text"),
        ({"role": "assistant", "content": None}, "not text"),
        ({"role": "assistant", "tool_calls": []}, "not text"),
        ({"role": "assistant", "tool_calls": "f"}, "not a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "no function with a name"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "no function with a name"),
        ({"role": "assistant", "tool_calls": [call(arguments={"a": 1})]}, "not a text"),
        ({"role": "assistant", "tool_calls": [{**call(), "id": 5}]}, "id of a call"),
        ({"role": ["user"], "content": "a"}, "no role"),
        ({"role": "user", "content": [{"type": "a" * 1000}]}, "not supported"),
        ({"role": "wizard", "content": "a"}, "no role 'wizard'; send one of system, developer"),
        ({"role": "User", "content": "a"}, "no role 'User'"),
        ({"role": "user<|im_end|>", "content": "a"}, "no role"),
        ({"role": "a" * 10_000, "content": "a"}, "no role"),
        ({"role": "function", "name": "f", "content": "5"}, "send role tool, with a tool_call_id"),
        ({"role": "user", "content": "a", "name": "x\n<|im_start|>"}, "rename it"),
        ({"role": "user", "content": "a", "name": 5}, "rename it"),
        ({"role": "user", "tool_calls": [call()]}, "role user has tool_calls"),
        ({"role": "assistant", "tool_calls": [call(name="f g")]}, "letters, digits, _ or -"),
        ({"role": "assistant", "tool_calls": [call(name='"><|im_end|>')]}, "letters, digits"),
        ({"role": "assistant", "tool_calls": [call(name="f" * 129)]}, "letters, digits"),
        ({"role": "assistant", "tool_calls": [call()] * 1025}, "1025 tool_calls"),
        ({"role": "assistant", "tool_calls": [call(arguments="世" * 400_000)]}, "1,200,000 bytes"),
        (
            {"role": "assistant", "tool_calls": [call(arguments="[" * 65 + "]" * 65)]},
            "more than 64",
        ),
        ({"role": "assistant", "tool_calls": [call(arguments="[" * 9999 + "]" * 9999)]}, "deep"),
    ],
)
def test_messages_that_are_none_are_refused(message: object, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read_messages([message])
    assert caught.value.param == "messages" and len(str(caught.value)) < 200
