"""Models of every format with a vocabulary of bytes, and what their grammars take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_compiler import GrammarCompiler
from kvtide.models.tokenizer import Tokenizer
from kvtide.server.tools.grammars.enforcement import AnswerGrammars
from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    OutputEvent,
    OutputParser,
)
from kvtide.server.tools.parser_registry import FORMATS, ChatFormats
from kvtide.server.tools.tool_spec import ChoiceMode, FunctionTool, ToolChoice
from tests.server.tools.byte_tokenizer import tokenizer

Schema = dict[str, Any]

AUTO, REQUIRED = ToolChoice(ChoiceMode.AUTO), ToolChoice(ChoiceMode.REQUIRED)
ONE_BY_ONE = ("qwen3_coder", "glm", "deepseek_v32", "deepseek_v4")
"""Formats that write texts without quotes."""
QUICK = ("hermes", "pythonic", "qwen3_coder", "glm", "deepseek_v4")
"""One format of each way to write arguments."""
TEXT: Schema = {"type": "string"}
CLOSED: Schema = {"additionalProperties": False}


@dataclass
class Model:
    """A format with a vocabulary of bytes, and with its markers as special tokens or not."""

    name: str
    formats: ChatFormats
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    special: dict[int, bytes]

    def byte(self, token: int) -> int:
        return self.tokenizer.token_bytes(token)[0]

    @property
    def grammars(self) -> AnswerGrammars:
        return AnswerGrammars(self.formats, self.compiler)


_MODELS: dict[tuple[str, str, bool], Model] = {}


def model(name: str, reasoning: str = "none", *, special: bool = False) -> Model:
    """Compilers keep what they have compiled, so that grammars of a test are compiled once."""
    key = name, "harmony" if name == "harmony" else reasoning, special
    if key not in _MODELS:
        markers = (*FORMATS[name].special, "<think>", "</think>") if special else ()
        spoken = tokenizer(None, markers)
        formats = ChatFormats(spoken, "", *key[:2])
        compiler = GrammarCompiler(spoken, 256 + len(markers))
        ids = {256 + number: marker.encode() for number, marker in enumerate(markers)}
        _MODELS[key] = Model(name, formats, spoken, compiler, ids)
    return _MODELS[key]


def strict(parameters: Schema) -> tuple[FunctionTool, ...]:
    return (FunctionTool("f", "", parameters, strict=True),)


def argument(schema: Any, **shared: Schema) -> Schema:
    """A schema of one required argument."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **shared}


def takes(grammar: Grammar, spoken: Model, text: str) -> bool:
    """Whether the whole text is one of the grammar's."""
    matcher = spoken.compiler.compile(grammar).start()
    tokens = spoken.tokenizer.encode(text, add_special=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def calls(parser: OutputParser, text: str) -> list[tuple[str, str]]:
    events: list[OutputEvent] = [*parser.feed(text), *parser.finish()]
    found: list[tuple[str, str]] = []
    for event in events:
        match event:
            case CallBegin(_, _, name):
                found.append((name, ""))
            case CallArguments(_, piece):
                found[-1] = found[-1][0], found[-1][1] + piece
    return found


def is_valid(arguments: str, parameters: Schema) -> bool:
    validator = jsonschema.Draft202012Validator(
        {"type": "object", **parameters},
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
    return bool(validator.is_valid(json.loads(arguments)))
