"""Schemas as alternatives, forms and types: what grammar and parser of a tool know of it."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from kvtide.server.tools.schemas.alternatives import RootSchema, UnenforceableError
from kvtide.server.tools.schemas.search_pattern import searched
from kvtide.server.tools.schemas.tool_schema import ToolSchema
from kvtide.server.tools.schemas.value_types import types_of
from kvtide.server.tools.tool_spec import FunctionTool

Schema = dict[str, Any]


def types(schema: Any, **root: Any) -> set[str]:
    parameters = {"type": "object", "properties": {"a": schema}, **root}
    return set(ToolSchema(FunctionTool("f", "", parameters)).types("a"))


ANY = {"null", "boolean", "integer", "number", "string", "array", "object"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, ANY),
        (True, ANY),
        ({"type": "any"}, ANY),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"const": 5}, {"integer", "number"}),
        ({"enum": ["a", None, True]}, {"string", "null", "boolean"}),
        ({"enum": [1, "a"], "type": "integer"}, {"integer"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, {"string", "array"}),
        ({"oneOf": [{"$ref": "#/properties/b"}, {"type": "null"}]}, {"boolean", "null"}),
        ({"$ref": "#/properties/a"}, ANY),
        ({"$ref": "http://elsewhere"}, ANY),
        ({"$ref": "#/$defs/list/" + "9" * 5000}, ANY),
        ({"$ref": "#/$defs/list/1"}, {"null"}),
        ({"$ref": "#/$defs/a~1b%20c"}, {"object"}),
    ],
    ids=lambda given: "-".join(sorted(given)) if isinstance(given, set) else str(given)[:60],
)
def test_the_types_of_an_argument(schema: Any, expected: set[str]) -> None:
    known = {
        "x": {"type": "array"},
        "list": [{}, {"type": "null"}],
        "a/b c": {"type": "object"},
    }
    parameters = {"a": schema, "b": {"type": "boolean"}}
    found = ToolSchema(
        FunctionTool("f", "", {"type": "object", "properties": parameters, "$defs": known})
    )
    assert found.types("a") == expected and found.types("unknown") == ANY


def test_the_types_of_an_argument_are_those_of_all_forms() -> None:
    two = [{"properties": {"a": {"type": kind}}} for kind in ("string", "integer")]
    assert types({}, anyOf=two) == {"string", "integer"}
    assert types({"type": "null"}, anyOf=two) == ANY, "nothing satisfies it"
    assert types({"type": "string"}, enum=[{"a": "x"}]) == {"string"}, "the plain form is read"


def chain(length: int, nesting: int) -> Schema:
    """References in a row, each behind some levels of allOf."""
    definitions: Schema = {f"d{length}": {"type": "string"}}
    for number in range(length):
        schema: Schema = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(nesting):
            schema = {"allOf": [schema]}
        definitions[f"d{number}"] = schema
    return {"$defs": definitions}


def test_references_may_be_nested_up_to_a_depth() -> None:
    first = {"$ref": "#/$defs/d0"}
    assert types(first, **chain(20, 2)) == {"string"}
    assert types(first, **chain(60, 60)) == ANY
    with pytest.raises(UnenforceableError, match="nested too deeply"):
        RootSchema(chain(60, 60)).alternatives(first)
    with pytest.raises(UnenforceableError, match="refers to itself"):
        RootSchema({"$defs": {"d0": {"anyOf": [first]}}}).alternatives(first)


def test_a_part_stands_alone_with_what_it_refers_to() -> None:
    root = RootSchema(
        {
            "$id": "https://elsewhere/schema",
            "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}, "unused": {}},
            "properties": {"$ref": {"type": "null"}, "p": {"$ref": "#/properties/$ref"}},
        }
    )
    alone = root.standalone({"$ref": "#/$defs/n", "default": {"$ref": "#"}}, {"maxItems": 1})
    assert alone["$defs"].keys() == {"r0"} and alone["allOf"][0]["default"] == {"$ref": "#"}
    check = jsonschema.Draft202012Validator(alone)
    assert check.is_valid([[]]) and not check.is_valid([[], []]) and not check.is_valid([5])
    whole = root.standalone({"$ref": "#"})
    check = jsonschema.Draft202012Validator(whole)
    assert check.is_valid({"p": None, "$ref": None}) and not check.is_valid({"p": 5})
    assert root.standalone({"type": "null"}) == {"type": "null"}
    assert types_of(root.alternatives({"$ref": "#/properties/p"})) == {"null"}


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a", ["a", "xax", "\na\n"], ["x", ""]),
        ("^a", ["a", "ax"], ["xa"]),
        ("a$", ["xa"], ["ax"]),
        ("^a|b$", ["ax", "xb"], ["xax", "bx"]),
        ("(^a|(?:b|c)$)", ["ax", "xb", "xc"], ["xax", "bx"]),
        (r"^[$^]\$$", ["$$", "^$"], ["$", "x$"]),
        ("^[]^]+$", ["]^"], ["x]"]),
        ("", ["", "x"], []),
    ],
)
def test_a_pattern_is_searched_for(pattern: str, good: list[str], bad: list[str]) -> None:
    whole = re.compile(searched(pattern))
    assert all(whole.fullmatch(text) for text in good)
    assert not any(whole.fullmatch(text) for text in bad)


@pytest.mark.parametrize("pattern", ["a(^b)", "a$|b$c", r"\bword", r"a\Z", "(a|(b|^c)d)"])
def test_a_look_inside_of_a_pattern_is_none_of_this(pattern: str) -> None:
    with pytest.raises(UnenforceableError, match="inside of the pattern"):
        searched(pattern)
