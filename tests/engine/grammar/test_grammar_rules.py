"""Rules of Lark: what they take, and what they refuse that llguidance would not hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_rules import (
    ANY_LAYOUT,
    ANY_TEXT,
    TEMPLATE_LAYOUT,
    content_rule,
    json_rule,
    literal,
    pattern_rule,
    without,
)

BYTES = LLTokenizer("byte")
CLOSED = {"additionalProperties": False}


def takes(rule: str, text: str) -> bool:
    """Whether the whole text is one of a terminal or rule."""
    name = "rule" if rule.startswith("%json") else "RULE"
    lark = LLMatcher.grammar_from_lark(f"start: {name}\n{name}: {rule}")
    matcher = LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def test_a_name_cannot_be_spelled_past_its_schema() -> None:
    open_object = json_rule({"type": "object", "properties": {"a": {"type": "integer"}}}, {})
    assert takes(open_object, '{"a": 1}') and takes(open_object, '{"b": "x"}')
    assert not takes(open_object, r'{"\u0061": "x"}')
    closed = json_rule({"type": "object", "properties": {"a": {"type": "string"}}, **CLOSED}, {})
    assert takes(closed, r'{"a": "\u001b"}') and not takes(open_object, r'{"b": "\u001b"}')


@pytest.mark.parametrize(
    ("schema", "is_held"),
    [
        ({"minProperties": 1}, True),
        ({"minProperties": 2}, False),
        ({"minProperties": 2, "required": ["a"]}, True),
        ({"minProperties": 3, "properties": {"a": {}}, "required": ["a"], **CLOSED}, True),
        ({"type": "array", "items": {"minProperties": 2}}, False),
        ({"minProperties": 2, "patternProperties": {"^a": {}}, **CLOSED}, False),
    ],
)
def test_names_that_may_occur_twice_are_not_counted(schema: Any, *, is_held: bool) -> None:
    if is_held:
        assert json_rule(schema, {}).startswith("%json")
    else:
        with pytest.raises(ValueError, match=r"minProperties is \d where names may be anything"):
            json_rule(schema, {})
    assert json_rule(schema, {}, strict=False).startswith("%json")


def test_layouts_are_those_of_templates_and_of_models() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    spaced, loose = "[1, 2]", "[ 1,\n2 ]"
    templates, any_layout = (json_rule(schema, each) for each in (TEMPLATE_LAYOUT, ANY_LAYOUT))
    assert takes(templates, spaced) and not takes(templates, loose)
    assert takes(any_layout, spaced) and takes(any_layout, loose)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", r"\d+\/a/\w"), ["12/a/é", "1/a/b"], ["٣/a/b", "1/a", "x1/a/b"]),
        (Grammar("choice", json.dumps(["a", 'b"/\\', "世\n"])), ["a", 'b"/\\', "世\n"], ["b", ""]),
        (Grammar("json_schema", '{"enum": [1, "x"]}'), ["1", '"x"'], ["2", "x"]),
    ],
)
def test_a_form_is_a_rule(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    _, rule = content_rule(grammar)
    assert all(takes(rule, text) for text in good)
    assert not any(takes(rule, text) for text in bad)


def test_classes_of_patterns_are_ascii() -> None:
    assert takes(pattern_rule(r"\w\d"), "a1")
    assert not takes(pattern_rule(r"\w\d"), "é1") and not takes(pattern_rule(r"\w\d"), "a٣")


@pytest.mark.parametrize(
    "text", ["</tool_call>", "<｜DSML｜invoke", "[a]|^$.*+?(){}", "a\\b", "\n#&~-/", "'\"<>%@!"]
)
def test_a_text_is_found_in_others_whatever_its_letters(text: str) -> None:
    assert takes(f"/{literal(text)}/", text)
    free = f"{ANY_TEXT} & {without(['never', text])}"
    assert takes(free, text[:-1]) and takes(free, text[1:] + " ü\n")
    assert not takes(free, text) and not takes(free, f"a{text}\nb") and not takes(free, "never")
