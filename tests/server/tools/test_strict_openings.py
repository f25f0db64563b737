"""Answers beside strict tools: a call opens only where its grammar begins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from kvtide.engine.grammar.grammar import Grammar
from kvtide.server.tools.output_events import OutputParser, TextDelta
from kvtide.server.tools.parser_registry import FORMATS
from kvtide.server.tools.tool_spec import ToolChoice, ToolRequest
from tests.grids import everything
from tests.server.tools.strict_models import (
    AUTO,
    CLOSED,
    REQUIRED,
    TEXT,
    Model,
    Schema,
    argument,
    calls,
    is_valid,
    model,
    strict,
    takes,
)
from tests.server.tools.written_calls import written

# -- openings -------------------------------------------------------------------------------------

BAD = {"a": "bad"}
OPENINGS = [
    *(written(name, "f", BAD) for name in FORMATS),
    "<function=f>\n<parameter=a>\nbad\n</parameter>\n</function>",
    "<tool_call><function=f><parameter=a>bad</parameter></function></tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": "bad"}}',
    '{"name": "f", "parameters": {"a": "bad"}}',
    '[f(a="bad")]',
    '```tool_code\nprint(f(a="bad"))\n```',
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "bad"}<｜tool▁call▁end｜>',
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">bad</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "bad"}<|tool_call_end|>',
    '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": "bad"}',
    '<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": "bad"}',
    '<think>Hm.</think>{"name": "f", "parameters": {"a": "bad"}}',
    '[THINK]Hm.[/THINK][f(a="bad")]',
]
"""Calls with an argument that is no integer, in all ways that some parser reads."""


@pytest.mark.quick
@pytest.mark.parametrize("reasoning", ["none", "think"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_text_opens_a_call_that_the_grammar_does_not_hold(name: str, reasoning: str) -> None:
    parameters = argument({"type": "integer"})
    request = ToolRequest(strict(parameters), AUTO)
    opened = 0
    for special in (False, True):
        spoken = model(name, reasoning, special=special)
        grammar = spoken.grammars.compiled(request, "", None)
        assert grammar is not None
        new_parser = spoken.formats.parser_factory(request, "")
        final = "<|channel|>final<|message|>" if name == "harmony" else ""
        assert takes(grammar, spoken, final + "It is < 5 > [4] {3}, `f(a)`.")
        for before in ("", " \n", "\x1c", "Look: ", "[x] ", "<think>a</think>", final, "\n"):
            for text in OPENINGS:
                opened += bool(calls(new_parser(), before + text))
                if takes(grammar, spoken, before + text):
                    assert not calls(new_parser(), before + text), before + text
    assert opened, "the parser reads some of them"


@pytest.mark.parametrize("name", FORMATS)
def test_qwens_call_without_its_first_marker_is_held_too(name: str) -> None:
    spoken = model(name)
    request = ToolRequest(strict(argument({"type": "integer"})), AUTO)
    grammar = spoken.grammars.compiled(request, "", None)
    assert grammar is not None
    call = "I look.\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>"
    wanted = [("f", '{"a": 5}')] if name == "qwen3_coder" else None
    if wanted is None:
        assert not takes(grammar, spoken, call.format(5)) or not calls(
            spoken.formats.parser_factory(request, "")(), call.format(5)
        )
        return
    for end in ("", "\n</tool_call>"):
        assert takes(grammar, spoken, call.format(5) + end)
        assert not takes(grammar, spoken, call.format("bad") + end)
    parser = spoken.formats.parser_factory(request, "")()
    assert calls(parser, call.format(5)) == wanted


FORMED: list[tuple[Grammar, Any]] = [
    (Grammar("json_schema", '{"type": "object"}'), lambda text: {"x": text, "y": [text]}),
    (Grammar("json_schema", '{"type": "array"}'), lambda text: [text]),
]


@pytest.mark.quick
@pytest.mark.parametrize("reasoning", ["none", "think"])
@pytest.mark.parametrize("name", FORMATS)
def test_markers_in_an_answers_json_are_a_part_of_it(name: str, reasoning: str) -> None:
    """Beside tools, whether or not they are strict: a grammar says where calls begin."""
    request = ToolRequest(strict(argument({"type": "integer"})), AUTO)
    spoken = model(name, reasoning)
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    for content, wrapped in FORMED:
        grammar = spoken.grammars.compiled(request, "", content)
        assert grammar is not None
        new_parser = spoken.formats.parser_factory(request, "", formed=True)
        for opening in OPENINGS:
            answer = json.dumps(wrapped(opening), ensure_ascii=False)
            assert takes(grammar, spoken, begin + answer)
            assert text_of(new_parser(), begin + answer) == answer
        call = written(name, "f", {"a": 5})
        if name == "llama3":
            call = "<|python_tag|>" + call
        assert takes(grammar, spoken, call) and calls(new_parser(), call) == [("f", '{"a": 5}')]


def text_of(parser: OutputParser, text: str) -> str:
    """The text of an output that has no calls."""
    events = [*parser.feed(text[:9]), *parser.feed(text[9:]), *parser.finish()]
    assert all(isinstance(event, TextDelta) for event in events)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("name", ["llama3", "pythonic", "hermes"])
def test_a_form_without_quotes_does_not_look_like_a_call(name: str) -> None:
    spoken, request = model(name), ToolRequest(strict(argument({"type": "integer"})), AUTO)
    grammar = spoken.grammars.compiled(request, "", Grammar("regex", r"(.|\n)*"))
    assert grammar is not None
    assert takes(grammar, spoken, "It is {5} [4].")
    new_parser = spoken.formats.parser_factory(request, "", formed=True)
    for text in OPENINGS:
        if takes(grammar, spoken, text):
            assert not calls(new_parser(), text), text


# -- random outputs -------------------------------------------------------------------------------

DIFFICULT: list[Schema] = [
    argument({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 5}]}),
    argument({"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 2}]}),
    argument({"enum": ["a", "b c", 7, None, True]}),
    argument({"type": "array", "items": TEXT, "minItems": 1}),
    argument({"type": "object", "properties": {"x": {"type": "integer"}}}),
    argument({"pattern": "^[a-c]"}),
    {"properties": {"a": {"type": "integer"}, "b": {**TEXT, "maxLength": 9}}, **CLOSED,
     "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    argument({}),
]  # fmt: skip
ENDS = ["</parameter>", "\n</parameter>\n", "</function>", "</tool_call>", "</arg_value>", '"', "]"]
ENDS += [
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n",
    "}",
    '"}',
    ")",
    "null",
    "12",
    "\\u0061",
    "[1",
]


@pytest.mark.parametrize("choice", [AUTO, REQUIRED], ids=["auto", "required"])
@pytest.mark.parametrize("special", [False, True], ids=["spelled", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_outputs_of_a_grammar_are_valid_calls(
    name: str, special: bool, choice: ToolChoice
) -> None:
    spoken = model(name, special=special)
    finished = 0
    for number in range(len(DIFFICULT) * 4 if everything() else 2):
        rng = Random(f"{name} {special} {choice.mode} {number}")
        parameters = DIFFICULT[number % len(DIFFICULT)] if everything() else rng.choice(DIFFICULT)
        request = ToolRequest(strict(parameters), choice)
        grammar = spoken.grammars.compiled(request, "", None)
        assert grammar is not None
        text = random_output(spoken, grammar, rng, hurried=choice is REQUIRED)
        if text is None:
            continue
        finished += 1
        made = calls(spoken.formats.parser_factory(request, "")(), text)
        assert made or choice is AUTO, text
        for called, arguments in made:
            assert called == "f" and is_valid(arguments, parameters), (arguments, text)
    assert finished or not everything()


def random_output(spoken: Model, grammar: Grammar, rng: Random, *, hurried: bool) -> str | None:
    """A text of the grammar, with many markers; None where it found no end."""
    state = spoken.compiler.compile(grammar).start()
    pieces = [*OPENINGS, *ENDS, *ENDS, *(spoken.formats._format.parser.MARKERS * 3)]
    written: list[int] = []
    for step in range(1200):
        done = state.is_accepting() and rng.random() < (0.3 if hurried or step > 300 else 0.03)
        if done or state.is_stopped():
            words = [spoken.tokenizer.token_bytes(t) or spoken.special[t] for t in written]
            return b"".join(words).decode()
        if rng.random() < 0.5:
            written += accepted(state, spoken, rng.choice(pieces))
        else:
            allowed = allowed_tokens(state, spoken)
            assert allowed or state.is_accepting(), "a dead end"
            token = rng.choice(allowed)
            assert state.consume_token(token)
            written.append(token)
    return None


def accepted(state: LLMatcher, spoken: Model, piece: str) -> list[int]:
    """The first tokens of the piece, as many as the grammar takes."""
    tokens = spoken.tokenizer.encode(piece, add_special=False)
    return tokens[: state.try_consume_tokens(tokens)]


def allowed_tokens(state: LLMatcher, spoken: Model) -> Sequence[int]:
    words = np.frombuffer(state.compute_bitmask(), np.uint8)
    bits = np.unpackbits(words, bitorder="little", count=256 + len(spoken.special))
    found: list[int] = np.flatnonzero(bits).tolist()
    plain = [t for t in found if t in spoken.special or 32 <= spoken.byte(t) < 127]
    return plain or found
