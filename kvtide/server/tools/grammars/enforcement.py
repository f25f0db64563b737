"""The grammar of an answer, compiled, or the refusal of the request's part that is at fault.

What an answer must be and the schema of every strict tool are compiled by themselves first: so they
mean the same, and are refused in the same words, whatever form the model writes calls in. What
cannot be enforced of another tool's schema is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from kvtide.engine import RequestError
from kvtide.engine.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from kvtide.engine.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvtide.engine.grammar.grammar_rules import TEMPLATE_LAYOUT, json_rule
from kvtide.server.tools.grammars.argument_rules import unenforceable
from kvtide.server.tools.grammars.lark_rules import arguments_schema
from kvtide.server.tools.parser_registry import ChatFormats
from kvtide.server.tools.schemas.alternatives import (
    CircularReferenceError,
    RootSchema,
    UnenforceableError,
)
from kvtide.server.tools.schemas.argument_forms import plain_form
from kvtide.server.tools.schemas.value_types import ANY_TYPE, declared_types
from kvtide.server.tools.tool_spec import FunctionTool, ToolRequest

_MAX_NAMED = 64
"""Arguments among which the one at fault is looked for."""
MAX_JUDGED = 4096
"""Rules of one answer that are compiled to see whether any text matches them."""


class AnswerGrammars:
    """The grammars of one model's answers."""

    def __init__(self, formats: ChatFormats, compiler: GrammarCompiler) -> None:
        self._formats, self._compiler = formats, compiler

    def compiled(
        self, request: ToolRequest, prompt: str, content: Grammar | None
    ) -> Grammar | None:
        """The grammar of an answer that follows a prompt; None where the answer is free."""
        if request.callable and (request.guarded or request.required or content is not None):
            _check_size(request)
            callable_names = {tool.name for tool in request.callable}
            request = replace(
                request,
                tools=tuple(
                    self._enforceable(tool) if tool.name in callable_names else tool
                    for tool in request.tools
                ),
            )
        judge = _RuleJudge(self._compiler)
        grammar = self._formats.grammar(request, prompt, content, judge.satisfiable)
        if grammar is not None and grammar is not content:
            self._compile(grammar)
        return grammar

    def _compile(self, grammar: Grammar) -> None:
        try:
            self._compiler.compile(grammar)
        except GrammarError as flaw:
            raise RequestError(
                f"the calls of these tools cannot be held to a grammar: {flaw.reason}; send fewer "
                "tools, or simpler ones",
                param="tools",
            ) from None

    def _enforceable(self, tool: FunctionTool) -> FunctionTool:
        """The tool, or one with the types of its arguments alone; refuses a strict one."""
        if tool.strict:
            self._check(tool)
            return tool
        schemas = (arguments_schema(tool), _every_argument(tool.parameters))
        if any(self._flaw(schema, strict=False) or _circle(schema) for schema in schemas):
            return replace(tool, parameters=_types_alone(tool.parameters))
        return tool

    def _check(self, tool: FunctionTool) -> None:
        every = _every_argument(tool.parameters)
        whole = arguments_schema(tool)
        flaw = self._flaw(whole) or self._flaw(every) or _circle(whole)
        if flaw is not None:
            raise unenforceable(tool, self._at_fault(every, flaw), flaw)

    def _flaw(self, schema: Mapping[str, object], *, strict: bool = True) -> str | None:
        """Why a schema cannot be enforced."""
        try:
            rule = json_rule(schema, TEMPLATE_LAYOUT, strict=strict)
            self._compiler.compile(Grammar("lark", f"start: {rule}"))
        except GrammarError as flaw:
            return flaw.reason
        except ValueError as flaw:
            return str(flaw)
        return None

    def _at_fault(self, every: Mapping[str, object], flaw: str) -> str:
        """The argument that has this flaw by itself; empty if none has."""
        properties = every["properties"]
        assert isinstance(properties, Mapping)
        if len(properties) > _MAX_NAMED:
            return ""
        alone = (
            {**every, "properties": {name: properties[name]}, "required": [name]}
            for name in properties
        )
        return next(
            (
                name
                for name, each in zip(properties, alone, strict=True)
                if self._flaw(each) == flaw
            ),
            "",
        )


class _RuleJudge:
    """Judges the rules of one answer."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._left = MAX_JUDGED

    def satisfiable(self, rule: str) -> bool:
        """Whether some text matches a terminal or a rule of JSON; raises `UnenforceableError` where
        a limit leaves that open."""
        if not self._left:
            raise UnenforceableError(f"more than {MAX_JUDGED} arguments combine limits")
        self._left -= 1
        name = "rule" if rule.startswith("%json") else "RULE"
        try:
            self._compiler.compile(Grammar("lark", f"start: {name}\n{name}: {rule}"))
        except GrammarError as flaw:
            if not flaw.matches_nothing:
                raise UnenforceableError(flaw.reason) from None
            return False
        return True


def _circle(schema: Mapping[str, object]) -> str | None:
    """Which reference of the schema or of an argument leads to itself, and so never to a value."""
    root = RootSchema(schema)
    try:
        for each in (schema, *(each for (each,) in plain_form(schema).arguments.values())):
            root.alternatives(each)
    except CircularReferenceError as flaw:
        return str(flaw)
    except UnenforceableError:
        return None  # What cannot be followed is the compiler's to judge.
    return None


def _every_argument(parameters: Mapping[str, object]) -> dict[str, object]:
    """A schema of which every argument is required: each must have some value."""
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    form = plain_form(parameters)
    properties = {name: schema for name, (schema,) in form.arguments.items()}
    closed = {"type": "object", "additionalProperties": False}
    return {**shared, **closed, "properties": properties, "required": list(properties)}


def _types_alone(parameters: Mapping[str, object]) -> dict[str, object]:
    form = plain_form(parameters)
    types = {
        name: declared_types(schema) if isinstance(schema, Mapping) else ANY_TYPE
        for name, (schema,) in form.arguments.items()
    }
    properties = {
        name: {} if found == ANY_TYPE else {"type": sorted(found)} for name, found in types.items()
    }
    return {"type": "object", "properties": properties, "required": sorted(form.required)}


def _check_size(request: ToolRequest) -> None:
    """Compilation takes time and memory in proportion."""
    size = sum(len(json.dumps(tool.parameters)) for tool in request.callable)
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"the schemas of these tools are {size:,} bytes, and calls of {MAX_GRAMMAR_BYTES:,} at "
            "most can be held to a grammar; send fewer or shorter ones, with tool_choice auto and "
            "without strict",
            param="tools",
        )
