"""Strict tools in every format: what a grammar takes is read as calls that their schemas allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtide.engine import RequestError
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_compiler import GrammarError
from kvtide.server.tools.grammars import enforcement
from kvtide.server.tools.parser_registry import FORMATS
from kvtide.server.tools.tool_spec import FunctionTool, ToolChoice, ToolRequest
from tests.grids import everything
from tests.server.tools.strict_models import (
    AUTO,
    CLOSED,
    ONE_BY_ONE,
    QUICK,
    REQUIRED,
    TEXT,
    Schema,
    argument,
    calls,
    is_valid,
    model,
    strict,
    takes,
)
from tests.server.tools.written_calls import written

# -- keywords -------------------------------------------------------------------------------------

DEFS: Schema = {
    "$defs": {
        "count": {"type": "integer", "minimum": 1},
        "short": {"type": "string", "maxLength": 2},
        "node": {
            "type": "object",
            "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["n"],
            **CLOSED,
        },
    }
}
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "integer": ({"type": "integer"}, [3, -3, 1.5, "3", "x", None, True, [3]]),
    "number": ({"type": "number"}, [3, 1.5, 1e30, "x", None]),
    "bounds": ({"type": "integer", "minimum": 2, "maximum": 11}, [1, 2, 11, 12, -5, 100]),
    "exclusive": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0, 0.5, 1]),
    "multipleOf": ({"type": "integer", "multipleOf": 4}, [0, 2, 8, 10]),
    "boolean": ({"type": "boolean"}, [True, False, "true", 1, None]),
    "null": ({"type": "null"}, [None, "", 0]),
    "string": (TEXT, ["", "x", "5", "null", " a \n", "a\n\nb", "<b>", "\"'{[", "é世", "a/b\\c"]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+[0-9]$"}, ["a1", "abc9", "a", "xa1", "a1x"]),
    "searched": ({"type": "string", "pattern": "b[0-9]|^x$"}, ["b1", "abb22", "x", "xx", "b"]),
    "slash": ({"type": "string", "pattern": r"^/\w+/\d{2}$"}, ["/a_1/12", "/a/1"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "é世x", "abcd"]),
    "both": ({"type": "string", "pattern": "^a", "maxLength": 2}, ["a", "ab", "abc", "b"]),
    "const": ({"const": "a/b"}, ["a/b", "a", "a/b "]),
    "const number": ({"const": 5}, [5, 6, "5"]),
    "enum": ({"enum": ["a", "b c", 7, None]}, ["a", "b c", 7, None, 8, "b", True, "null"]),
    "enum of texts": ({"type": "string", "enum": ["x", "", "5"]}, ["x", "", "5", "y"]),
    "date": ({"format": "date", **TEXT}, ["2024-02-29", "2023-02-30", "2023-13-01", "x"]),
    "email": ({"format": "email", **TEXT}, ["a.b@c.de", "a"]),
    "ipv4": ({"format": "ipv4", **TEXT}, ["10.0.255.1", "10.0.256.1", "x"]),
    "ipv6": ({"format": "ipv6", **TEXT}, ["::1", "1:2:3:4:5:6:7:8", "fe80::", "1::2::3", "x"]),
    "uuid": ({"format": "uuid", **TEXT}, ["123e4567-e89b-12d3-a456-426614174000", "x"]),
    "text or null": ({"type": ["string", "null"]}, ["x", None, "12", "[x]", 'a "b"']),
    "short or null": ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
                      ["x", "abc", None]),
    "text or integer": ({"type": ["string", "integer"]}, ["x", 5, "5 apples"]),
    "text or large": ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer",
                      "minimum": 5}]}, ["ab", "a", 5, 4, 12, -7]),
    "text or list": ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, ["x", ["x"], [1], []]),
    "word or boolean": ({"enum": ["yes", "no", True]}, ["yes", True, False, "maybe"]),
    "anything": ({}, ["x", 5, None, [1, "x"], {"y": 1}, True]),
    "true": (True, ["x", 5, None]),
    "no type": ({"minimum": 3}, ["x", 5, 2, None, True]),
    "array": ({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2},
              [["x", "</parameter>"], ["</arg_value>", "</｜DSML｜parameter>\n"], [], [1]]),
    "object": ({"type": "object", "properties": {"x": {"type": "integer"}, "y": TEXT},
                "required": ["x"], **CLOSED},
               [{"x": 1}, {"x": 1, "y": "</tool_call>"}, {}, {"x": "1"}]),
    "$ref": ({"$ref": "#/$defs/count"}, [1, 0, "1"]),
    "$ref to a text": ({"$ref": "#/$defs/short"}, ["ab", "abc", ""]),
    "$ref that recurs": ({"$ref": "#/$defs/node"}, [{"n": [{"n": []}]}, {"n": [{}]}, {}]),
    "$ref to an argument": ({"type": "array", "items": {"$ref": "#/properties/z"}},
                            [[True], ["x"]]),
    "allOf": ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}, {"minimum": 2}]},
              [2, 1, "2"]),
    "allOf of texts": ({"allOf": [{"type": "string", "maxLength": 2}, {"pattern": "a"}]},
                       ["ab", "b", "aaa"]),
    "anyOf": ({"anyOf": [{"const": "a"}, {"const": "b"}, {"type": "integer", "maximum": 3}]},
              ["a", "b", "c", 3, 4]),
    "oneOf": ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, ["a", "ab", None]),
}  # fmt: skip
"""Schemas of an argument, and values of all kinds."""
OBJECTS: dict[str, tuple[Schema, list[Schema]]] = {
    "required": (
        {"properties": {"a": TEXT, "b": TEXT}, "required": ["b"]},
        [{"a": "x", "b": "y"}, {"b": "y"}, {"a": "x"}, {}],
    ),
    "additionalProperties": (
        {"properties": {"a": TEXT}, "required": ["a", "z"],
         "additionalProperties": {"type": "null"}},
        [{"a": "x", "z": None}, {"a": "x", "z": 1}, {"a": "x"}],
    ),
    "anyOf": (
        {"properties": {"a": {"type": "integer"}, "b": TEXT}, **CLOSED,
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}, {}],
    ),
    "oneOf": (
        {"oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}, "v": {"type": "integer"}},
             "required": ["k", "v"], **CLOSED},
            {"type": "object", "properties": {"k": {"const": "y"}, "w": TEXT},
             "required": ["k", "w"], **CLOSED}]},
        [{"k": "x", "v": 1}, {"k": "y", "w": "1"}, {"k": "x", "w": "1"}, {"k": "y"}, {}],
    ),
    "allOf": (
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"a": {"minimum": 3}}}]},
        [{"a": 3}, {"a": 2}, {}],
    ),
    "$ref": (
        {"$ref": "#/$defs/o",
         "$defs": {"o": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        [{"a": 3}, {"a": "x"}, {}],
    ),
    "minProperties": (
        {"properties": {"a": TEXT}, "required": ["a"], "minProperties": 1, **CLOSED},
        [{"a": "x"}, {}],
    ),
    "nothing": ({"properties": {}, **CLOSED}, [{}, {"a": 1}]),
    "names": (
        {"properties": {"file-path": TEXT, "class": {"type": "integer"}, "ü x": TEXT},
         "required": ["file-path", "class", "ü x"]},
        [{"file-path": "a", "class": 1, "ü x": "b"}, {"file-path": "a", "class": "x", "ü x": "b"}],
    ),
}  # fmt: skip
"""Schemas of all arguments together."""


def grid() -> Iterator[Any]:
    for name, (schema, values) in VALUES.items():
        other = {"z": {"type": "boolean"}}
        parameters = argument(schema, **DEFS)
        parameters["properties"] |= other
        yield pytest.param(parameters, [{"a": value} for value in values], id=name)
    for name, (parameters, calls_of_it) in OBJECTS.items():
        yield pytest.param(parameters, calls_of_it, id=f"object: {name}")


@pytest.mark.parametrize(("parameters", "given"), [*grid()])
def test_a_strict_call_is_taken_if_and_only_if_its_schema_allows_it(
    parameters: Schema, given: list[Schema]
) -> None:
    for name in FORMATS if everything() else QUICK:
        spoken = model(name)
        request = ToolRequest(strict(parameters), REQUIRED)
        grammar = spoken.grammars.compiled(request, "", None)
        assert grammar is not None
        new_parser = spoken.formats.parser_factory(request, "")
        for arguments in given:
            text = written(name, "f", arguments)
            ((_, read),) = calls(new_parser(), text)
            wrong = f"{name}: {text!r} is read as {read}"
            assert takes(grammar, spoken, text) == is_valid(read, parameters), wrong
            if name not in ONE_BY_ONE:
                assert json.loads(read) == arguments, wrong


@pytest.mark.parametrize(
    ("keywords", "good", "bad"),
    [
        ({"format": "time"}, ["23:59:59Z", "00:00:00.5+02:00"], ["24:00:00Z", "10:00", "x"]),
        ({"format": "date-time"}, ["2024-02-29T23:59:59Z"], ["2024-02-30T00:00:00Z", "2024-01-01"]),
        ({"format": "duration"}, ["P1DT2H", "P3W", "PT5M"], ["P", "PT", "1D"]),
        ({"format": "hostname"}, ["a-b.de", "x"], ["-a", "a..b", ""]),
        ({"format": "uri"}, ["https://a.b:80/c?d=e#f", "urn:isbn:5"], ["a b", "//x"]),
        ({"pattern": r"^\d$"}, ["7"], ["٣"]),
        ({"pattern": r"^\w$"}, ["_"], ["é"]),
    ],
    ids=str,
)
def test_formats_and_classes_mean_the_same_with_and_without_quotes(
    keywords: Schema, good: list[str], bad: list[str]
) -> None:
    request = ToolRequest(strict(argument({**TEXT, **keywords})), REQUIRED)
    for name in QUICK:
        grammar = model(name).grammars.compiled(request, "", None)
        assert grammar is not None
        for value in good + bad:
            text = written(name, "f", {"a": value})
            assert takes(grammar, model(name), text) == (value in good), (name, value)


# -- refusals -------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": (argument({"not": {"const": 5}}), 'the argument \'a\' of f cannot be enforced: Unimpl'),
    "if": (argument({"if": TEXT, "then": {"minLength": 1}}), "Unimplemented keys"),
    "format": (argument({**TEXT, "format": "own"}), "Unknown format: own"),
    "pattern": (argument({**TEXT, "pattern": "^(?=a)"}), "look-around"),
    "oneOf": (
        argument({"oneOf": [TEXT, {**TEXT, "maxLength": 3}]}),
        "the argument 'a' of f cannot be enforced: oneOf",
    ),
    "oneOf of objects": (
        {"type": "object", "properties": {"a": TEXT, "b": TEXT},
         "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "the parameters of f cannot be enforced: oneOf",
    ),
    "contradiction": (argument({**TEXT, "pattern": "^abc$", "maxLength": 2}), "unsatisfiable"),
    "$ref": (argument({"$ref": "#/$defs/none"}), "/$defs/none"),
    "a circle": (argument({"$ref": "#/properties/a"}), "#/properties/a refers to itself"),
    "uniqueItems": (argument({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "minProperties": (argument({"type": "object", "minProperties": 2}), "minProperties is 2"),
    "nothing": (argument(False), "unsatisfiable"),
}  # fmt: skip


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_every_format_in_the_same_words(
    reason: str, choice: ToolChoice
) -> None:
    parameters, words = REFUSED[reason]
    refusals = set()
    for name in FORMATS if everything() else QUICK:
        grammars = model(name).grammars
        with pytest.raises(RequestError) as caught:
            grammars.compiled(ToolRequest(strict(parameters), choice), "", None)
        assert caught.value.param == "tools" and words in str(caught.value)
        refusals.add(str(caught.value))
        loose = FunctionTool("f", "", parameters)
        assert grammars.compiled(ToolRequest((loose,), AUTO), "", None) is None
    assert len(refusals) == 1 and "leave strict out" in refusals.pop()


@pytest.mark.parametrize("name", FORMATS if everything() else QUICK)
def test_a_required_call_of_another_tool_ignores_what_cannot_be_enforced(name: str) -> None:
    spoken = model(name)
    for reason, (parameters, _) in REFUSED.items():
        tools = (FunctionTool("f", "", parameters), FunctionTool("g", "", argument({"const": 5})))
        grammar = spoken.grammars.compiled(ToolRequest(tools, REQUIRED), "", None)
        assert grammar is not None
        value = [] if "Items" in reason else {"x": 1, "y": 2} if "Prop" in reason else "abcd"
        assert takes(grammar, spoken, written(name, "f", {"a": value})), reason
        assert takes(grammar, spoken, written(name, "g", {"a": 5}))
        assert not takes(grammar, spoken, written(name, "g", {"a": 6}))


CONTRADICTING: list[tuple[Schema, Schema, Schema]] = [
    (
        {"anyOf": [{"required": ["z"]}, {"properties": {"a": {"type": "null"}}}],
         "properties": {"a": TEXT, "z": TEXT}, "required": ["a"]},
        {"a": "x", "z": "y"},
        {"a": "x"},
    ),
    (
        {"anyOf": [{"properties": {"a": {"pattern": "^b"}}},
                   {"properties": {"a": {"pattern": "^c"}, "b": {"type": "null"}}}],
         "properties": {"a": {**TEXT, "pattern": "^b$"}, "b": TEXT}, "required": ["a"]},
        {"a": "b", "b": "x"},
        {"a": "c"},
    ),
    (argument({"format": "date", "pattern": "b$"}), {"a": 5}, {"a": "2024-01-01"}),
]  # fmt: skip
"""Schemas of which a part is satisfied by nothing, a call that is valid, and one that is not."""


@pytest.mark.parametrize("number", range(len(CONTRADICTING)))
@pytest.mark.parametrize("name", FORMATS if everything() else QUICK)
def test_no_call_begins_what_nothing_can_complete(name: str, number: int) -> None:
    parameters, good, bad = CONTRADICTING[number]
    spoken, request = model(name), ToolRequest(strict(parameters), REQUIRED)
    grammar = spoken.grammars.compiled(request, "", None)
    assert grammar is not None
    assert takes(grammar, spoken, written(name, "f", good))
    assert not takes(grammar, spoken, written(name, "f", bad))
    assert not takes(grammar, spoken, written(name, "f", {}))
    head, found, _ = written(name, "f", bad).rpartition(next(iter(map(str, bad.values()))))
    state = spoken.compiler.compile(grammar).start()
    for token in spoken.tokenizer.encode(head, add_special=False):
        assert found and any(state.compute_bitmask()), "a dead end"
        if not state.consume_token(token):
            return
    assert any(state.compute_bitmask()), "a dead end"


@pytest.mark.parametrize("name", [*ONE_BY_ONE, "pythonic"])
@pytest.mark.parametrize("limit", ["number", "size"])
def test_limits_that_cannot_be_combined_are_refused_or_left_out(
    name: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict tool is refused. The arguments of another keep their types alone."""
    parameters = argument(
        {"type": "integer"}, anyOf=[{"properties": {"a": {"maximum": n}}} for n in range(5)]
    )
    spoken, reason = model(name), "more than 2 arguments combine limits"
    if limit == "number":
        monkeypatch.setattr(enforcement, "MAX_JUDGED", 2)
    else:
        reason = "too large"
        monkeypatch.setattr(spoken.compiler, "compile", limited(spoken.compiler.compile, reason))
    with pytest.raises(RequestError, match=rf"of f cannot be enforced: {reason}; simplify"):
        spoken.grammars.compiled(ToolRequest(strict(parameters), REQUIRED), "", None)
    loose = ToolRequest((FunctionTool("f", "", parameters),), REQUIRED)
    grammar = spoken.grammars.compiled(loose, "", None)
    assert grammar is not None and takes(grammar, spoken, written(name, "f", {"a": 50}))
    assert not takes(grammar, spoken, written(name, "f", {"a": "x"}))


def limited(compile: Callable[[Grammar], Any], reason: str) -> Callable[[Grammar], Any]:
    """A compiler for which a terminal or JSON by itself exceeds a limit."""

    def judged(grammar: Grammar) -> Any:
        if grammar.text.lower().startswith("start: rule"):
            raise GrammarError(grammar, reason)
        return compile(grammar)

    return judged


ENDS = "</parameter></arg_value></｜DSML｜parameter>"


@pytest.mark.parametrize("name", [*ONE_BY_ONE, "pythonic"])
def test_what_one_form_cannot_hold_is_refused_for_it(name: str) -> None:
    """Names that its parser would not read, and bounds on what it writes in an order."""
    odd = {"qwen3_coder": "a>", "glm": " a", "pythonic": "a)"}.get(name, 'a"')
    every = {"type": "object", "properties": {"a": TEXT}}
    for parameters, words in [
        ({"type": "object", "properties": {odd: TEXT}}, "a name that this model's form"),
        ({**every, "patternProperties": {"^a": {"maxLength": 3}}, **CLOSED}, "patternProperties"),
        ({**every, "minProperties": 1, **CLOSED}, "minProperties"),
        (argument({"enum": [ENDS]}), "no arguments can be written that satisfy it"),
        (argument({**TEXT, "pattern": f"^ab?{ENDS}"}), "no arguments can be written that"),
        (argument({**TEXT, "pattern": "(a|^b)c"}), "^ inside of the pattern"),
    ]:
        if name == "pythonic" and ("no arguments" in words or "^ ins" in words):
            continue  # It writes texts with quotes.
        with pytest.raises(RequestError, match=re.escape(words)):
            model(name).grammars.compiled(ToolRequest(strict(parameters), AUTO), "", None)
        assert model("hermes").grammars.compiled(ToolRequest(strict(parameters), AUTO), "", None)
