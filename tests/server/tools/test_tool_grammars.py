"""Grammars of calls: valid for llguidance, and of the outputs that the parsers read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvtide.engine.grammar.grammar import Grammar
from kvtide.server.tools.grammars.lark_rules import LarkRules
from kvtide.server.tools.output_events import CallBegin
from kvtide.server.tools.parser_registry import FORMATS, ChatFormats
from kvtide.server.tools.tool_spec import ChoiceMode, FunctionTool, ToolChoice, ToolRequest
from tests.server.tools.recorded import NOW, TOOLS, WEATHER
from tests.server.tools.written_calls import ONE, TWO, written

BYTES = LLTokenizer("byte")
REQUIRED = ToolChoice(ChoiceMode.REQUIRED)
AUTO = ToolChoice(ChoiceMode.AUTO)


def grammar(
    name: str,
    choice: ToolChoice = REQUIRED,
    tools: tuple[FunctionTool, ...] = TOOLS,
    *,
    parallel: bool = True,
    prompt: str = "",
    reasoning: str = "none",
    content: Grammar | None = None,
) -> Grammar:
    spoken = "harmony" if name == "harmony" else reasoning
    formats = ChatFormats(None, "", name, spoken)
    composed = formats.grammar(ToolRequest(tools, choice, parallel), prompt, content)
    assert composed is not None
    return composed


def takes(composed: Grammar, text: str) -> bool:
    """Whether the whole text is one of the grammar's."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(composed.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_taken_and_nothing_else(name: str) -> None:
    composed = grammar(name)
    assert composed.kind == "lark"
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(composed.text), BYTES) == ""
    assert takes(composed, ONE[name])
    assert not takes(composed, "Paris is sunny.")
    assert not takes(composed, ONE[name].replace("get_weather", "get_whether"))
    assert not takes(composed, ONE[name].replace("3", '"many"'))
    assert not takes(composed, ONE[name][:-4])
    assert not takes(composed, ONE[name] + " And now?")


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_function_is_the_only_one(name: str) -> None:
    composed = grammar(name, replace(REQUIRED, name="get_weather"))
    assert takes(composed, ONE[name])
    other = grammar(name, replace(REQUIRED, name="now"))
    assert not takes(other, ONE[name])


@pytest.mark.parametrize("name", TWO)
def test_one_call_where_calls_are_not_parallel(name: str) -> None:
    assert takes(grammar(name), TWO[name])
    assert not takes(grammar(name, parallel=False), TWO[name])
    assert takes(grammar(name, parallel=False), ONE[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_leaves_text_free(name: str) -> None:
    composed = grammar(name, AUTO, (replace(WEATHER, strict=True), NOW))
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(composed.text), BYTES) == ""
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert takes(composed, final + "Paris is < sunny > {or} so.")
    assert takes(composed, ONE[name])
    assert not takes(composed, ONE[name].replace("3", '"many"'))
    if FORMATS[name].trigger and name != "harmony":
        assert takes(composed, "I look.\n" + ONE[name])
        assert not takes(composed, "I look.\n" + ONE[name].replace("get_weather", "gets"))


@pytest.mark.parametrize("name", FORMATS)
def test_allowed_tools_are_the_only_ones_that_free_text_calls(name: str) -> None:
    composed, other = (
        grammar(name, replace(AUTO, allowed=frozenset({each}))) for each in ("get_weather", "now")
    )
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert takes(composed, final + "Paris is < sunny > {or} so.")
    assert takes(composed, ONE[name]) and not takes(other, ONE[name])


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_calls_without_parameters_are_taken_as_the_template_writes_them(name: str) -> None:
    block, body = (
        ONE[name].partition("\n")[0],
        '\n<｜DSML｜invoke name="now">\n{}</｜DSML｜invoke>\n',
    )
    for empty in ("", "\n"):
        assert takes(grammar(name), block + body.format(empty) + block.replace("<", "</"))


def test_without_strict_tools_an_answer_is_free() -> None:
    formats = ChatFormats(None, "")
    assert formats.grammar(ToolRequest(TOOLS, AUTO), "") is None
    assert formats.grammar(ToolRequest(TOOLS, ToolChoice(ChoiceMode.NONE)), "") is None
    assert formats.grammar(ToolRequest(), "") is None


def test_reasoning_may_come_before_a_required_call() -> None:
    opened = grammar("hermes", reasoning="think", prompt="<|im_start|>assistant\n<think>\n")
    assert takes(opened, "I should look.\n</think>\n\n" + ONE["hermes"])
    assert not takes(opened, ONE["hermes"])
    closed = grammar("hermes", reasoning="think", prompt="<think>\n\n</think>\n\n")
    assert takes(closed, ONE["hermes"])
    assert takes(closed, "<think>Hm.</think>\n\n" + ONE["hermes"])
    assert not takes(closed, "<think>Hm.</think>\n\nSo.")


def test_calls_and_a_form_of_the_answer_go_together() -> None:
    schema = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    composed = grammar("hermes", AUTO, content=schema)
    assert takes(composed, ONE["hermes"]) and takes(composed, '{"a": 1}')
    assert not takes(composed, "Well.")
    worded = grammar("hermes", AUTO, content=Grammar("regex", "yes|a/b"))
    assert takes(worded, ONE["hermes"]) and takes(worded, "a/b")
    formats = ChatFormats(None, "", "hermes")
    assert formats.grammar(ToolRequest(), "", schema) is schema
    chosen = grammar("hermes", AUTO, content=Grammar("choice", '["a", "b"]'))
    assert takes(chosen, ONE["hermes"]) and takes(chosen, "b") and not takes(chosen, "c")


def test_the_form_of_an_answer_binds_what_follows_the_reasoning() -> None:
    schema = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    thinking = ChatFormats(None, "", "hermes", "think").grammar(ToolRequest(), "<think>\n", schema)
    assert thinking is not None
    assert takes(thinking, 'So?\n</think>\n\n{"a": 1}') and not takes(thinking, '{"a": 1}')
    channels = ChatFormats(None, "gpt_oss").grammar(ToolRequest(), "", schema)
    assert channels is not None
    assert takes(channels, '<|channel|>final<|message|>{"a": 1}')
    assert not takes(channels, "<|channel|>final<|message|>So.")
    both = grammar("harmony", AUTO, content=schema)
    assert takes(both, ONE["harmony"]) and takes(both, '<|channel|>final<|message|>{"a": 1}')


def test_markers_that_are_special_tokens_are_named_by_id() -> None:
    rules = LarkRules({"｜DSML｜": 300, "<tool_call>": 301})
    assert rules.marker("<tool_call>\n") == '<[301]> "\\n"'
    assert rules.marker("</｜DSML｜invoke>") == '"</" <[300]> "invoke>"'
    assert rules.text_until("</｜DSML｜invoke>") == 'TEXT <[300]> "invoke>"'
    assert rules.text_until("<tool_call>").endswith(" <[301]>")
    assert '"</"' in rules.text("TEXT")


def test_names_that_differ_only_in_case_have_rules_of_their_own() -> None:
    tools = tuple(
        FunctionTool(name, "", {"type": "object", "properties": {"a": {"const": name}}})
        for name in ("Get", "get", "g-et", "g_et")
    )
    for name in ("hermes", "glm", "pythonic"):
        composed = grammar(name, tools=tools)
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(composed.text), BYTES) == ""
    taken = grammar("hermes", tools=tools)
    for tool in tools:
        for other in tools:
            call = json.dumps({"name": tool.name, "arguments": {"a": other.name}})
            assert takes(taken, f"<tool_call>\n{call}\n</tool_call>") == (tool is other)


def test_alternatives_keep_their_properties() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}},
                         "required": ["a"], "additionalProperties": False}]}  # fmt: skip
    composed = grammar("hermes", tools=(FunctionTool("f", "", schema),))
    assert takes(composed, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')


def test_schemas_that_cannot_be_enforced_bind_strict_tools_alone() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "own"}}}
    loose = grammar("hermes", tools=(FunctionTool("f", "", schema),))
    assert takes(loose, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>')
    strict = grammar("hermes", tools=(FunctionTool("f", "", schema, strict=True),))
    assert "format" in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(strict.text), BYTES)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_odd_and_long_names_are_taken_and_read(name: str) -> None:
    for called in ("a" * 128, "3d", "3d-render", "-x_", "mcp__plugin_long-name__read"):
        tools = (FunctionTool(called, "", {"type": "object", "properties": {"a": {}}}),)
        request = ToolRequest(tools, REQUIRED)
        composed = grammar(name, tools=tools)
        text = written(name, called, {"a": 5})
        assert takes(composed, text), called
        parser = ChatFormats(None, "", name).parser_factory(request, "")()
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        events = [event for piece in pieces for event in parser.feed(piece)]
        begun = [e.name for e in (*events, *parser.finish()) if isinstance(e, CallBegin)]
        assert begun == [called]
