"""Calls written as Python, as LFM2, Gemma and others do: read, never run.

    [f(a=1), g(b="x")]        <|tool_call_start|>[f(a=1)]<|tool_call_end|>

    ```tool_code
    print(f(a=1))
    ```

Without a marker a list is a call only if it names offered tools. A call's arguments come whole.
Arguments are read as JSON; where they are none, as literals of Python.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.grammars.argument_rules import ArgumentRules
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, repeated, word
from kvtide.server.tools.marker_parser import MarkerParser, OfferedTools
from kvtide.server.tools.schemas.alternatives import UnenforceableError
from kvtide.server.tools.schemas.argument_forms import ArgumentForm
from kvtide.server.tools.schemas.tool_schema import ToolSchema
from kvtide.server.tools.tool_spec import MAX_NAME, FunctionTool
from kvtide.server.tools.typed_arguments import DECODER, spaced

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
FENCE, FENCE_END = "```tool_code", "```"
MAX_CALL = 1 << 18
"""Characters of one call, or of one fence."""
_MAX_DEPTH = 64
_MAX_NUMBER = 1e300
_NAME = re.compile(rf"([\w-]{{1,{MAX_NAME}}})\s*\(", re.ASCII)
_NAME_BEGIN = re.compile(rf"(?:[\w-]{{1,{MAX_NAME}}}\s*)?", re.ASCII)
BARE_CALL = r"\[\s*[A-Za-z0-9_-]+\s*\("
"""How an answer begins that may be calls without a marker, as a regular expression."""
_SEPARATOR = re.compile(r"\s*,\s*")
_LITERALS = {"true": True, "false": False, "null": None}


class PythonicParser(MarkerParser):
    MARKERS = (BEGIN, END, FENCE)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._scan: _Brackets | None = None
        self._known = True
        self._state = self._start

    def _marked(self, marker: str) -> Callable[[], bool]:
        self._known = marker != BEGIN
        return {BEGIN: self._opened, FENCE: self._fence}.get(marker, self._stray_end)

    def _start(self) -> bool:
        """The answer's first characters: a bare list may be calls."""
        if not self._skip_space():
            return False
        if self._rest[0] != "[":
            self._out.text(self._marker)
            return self._in_text()
        return self._opened()

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._rest[0] == "[":
            self._marker, self._rest = self._marker + "[", self._rest[1:]
        self._state = self._name
        return True

    def _name(self) -> bool:
        """A call, up to its bracket."""
        if not self._skip_space():
            return False
        found = _NAME.match(self._rest)
        if found is None:
            begun = _NAME_BEGIN.fullmatch(self._rest) is not None
            return False if begun and not self._final else self._not_a_call()
        known = found[1] in self._out.offered.by_name
        if not known and (self._known or not self._out.is_name(found[1])):
            return self._not_a_call()
        self._scan, self._state = _Brackets(found.end()), self._in_call
        return True

    def _not_a_call(self) -> bool:
        if self._out.calls:
            return self._in_text()
        return self._broken()

    def _in_call(self) -> bool:
        assert self._scan is not None
        end = self._scan.find_end(self._rest)
        if end is None:
            return self._not_a_call() if len(self._rest) > MAX_CALL else False
        name, _, arguments = self._rest[: end - 1].partition("(")
        tool = self._out.offered.by_name.get(name.strip())
        written = _json_arguments(arguments, tool) or _python_arguments(arguments, tool)
        self._scan = None
        if written is None:
            return self._not_a_call()
        self._rest = self._rest[end:]
        self._write(name.strip(), written)
        self._marker, self._state = "", self._between
        return True

    def _write(self, name: str, arguments: str) -> None:
        self._out.begin(name)
        self._out.arguments(arguments)
        self._out.end()

    def _between(self) -> bool:
        if not self._skip_space():
            return False
        letter = self._rest[0]
        if letter in ",;":
            self._rest, self._state = self._rest[1:], self._name
            return True
        self._rest = self._rest.removeprefix("]")
        return self._in_text()

    def _fence(self) -> bool:
        at = self._rest.find(FENCE_END)
        if at < 0 and not self._final:
            return self._broken() if len(self._rest) > MAX_CALL else False
        code = self._rest if at < 0 else self._rest[:at]
        calls = _fenced(code, self._out.offered.by_name)
        if not calls:
            return self._broken()
        for name, values in calls:
            self._write(name, _json(values))
        self._rest = self._rest[len(code) + (0 if at < 0 else len(FENCE_END)) :]
        return self._in_text()

    def _cut_short(self) -> None:
        if self._state in (self._opened, self._name, self._in_call, self._start):
            self._out.text(self._marker)


class _Brackets:
    """Finds the bracket that ends a call, however its text is cut."""

    def __init__(self, at: int) -> None:
        self._at, self._depth, self._quote = at, 1, ""

    def find_end(self, text: str) -> int | None:
        """Where the call ends; None if it does not yet. `text` is all of it as far as it came."""
        while self._at < len(text):
            if self._quote:
                step = self._in_string(text)
            else:
                step = self._outside(text)
            if not step:
                return None
            if not self._depth:
                return self._at
        return None

    def _in_string(self, text: str) -> bool:
        letter = text[self._at]
        if letter == "\\":
            self._at += 2
        elif text.startswith(self._quote, self._at):
            self._at += len(self._quote)
            self._quote = ""
        else:
            if letter == self._quote[0] and len(text) - self._at < len(self._quote):
                return False  # Two quotes: a third may follow.
            self._at += 1
        return True

    def _outside(self, text: str) -> bool:
        letter = text[self._at]
        if letter in "\"'":
            if text.startswith(letter * 2, self._at) and len(text) - self._at < 3:
                return False  # An empty string, or the begin of a long one.
            if len(text) - self._at < 2:
                return False
            self._quote = letter * (3 if text.startswith(letter * 3, self._at) else 1)
            self._at += len(self._quote)
            return True
        self._depth += (letter in "([{") - (letter in ")]}")
        self._at += 1
        return True


# -- JSON -------------------------------------------------------------------------------------


def _json_arguments(text: str, tool: ToolSchema | None) -> str | None:
    """`name=` and JSON, name by name; None if there is anything else."""
    text, at, written = text.strip(), 0, dict[str, str]()
    names = sorted(_names(tool), key=len, reverse=True)
    while at < len(text):
        named = next((name for name in names if text.startswith(name + "=", at)), None)
        if named is None or named in written:
            return None
        at += len(named) + 1
        try:
            _, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        written[named] = spaced(text[at:end])
        separator = _SEPARATOR.match(text, end)
        if separator is None and end < len(text):
            return None
        at = end if separator is None else separator.end()
    return "{" + ", ".join(f"{_json(name)}: {value}" for name, value in written.items()) + "}"


def _names(tool: ToolSchema | None) -> Iterable[str]:
    """The arguments that a tool may have, in their order."""
    if tool is None:
        return ()
    try:
        forms = tool.forms
    except UnenforceableError:
        forms = [tool.plain]
    return dict.fromkeys(name for form in forms for name in form.arguments)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- Python's literals ------------------------------------------------------------------------


def _python_arguments(text: str, tool: ToolSchema | None) -> str | None:
    """The arguments between a call's brackets; None if they are no literals."""
    call = _parsed(f"f({text}\n)")
    values = None if not isinstance(call, ast.Call) else _values(call, tool)
    return None if values is None else _json(values)


def _parsed(code: str) -> ast.AST | None:
    try:
        return ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _values(call: ast.Call, tool: ToolSchema | None) -> dict[str, object] | None:
    names = list(_names(tool))
    if len(call.args) > len(names):
        return None
    try:
        placed = {name: _literal(node) for name, node in zip(names, call.args, strict=False)}
        named = {str(k.arg): _literal(k.value) for k in call.keywords if k.arg is not None}
    except ValueError:
        return None
    return placed | named if all(k.arg is not None for k in call.keywords) else None


def _literal(node: ast.AST, depth: int = 0) -> object:
    """The JSON value of an expression, or ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=str() | None as value):
            return value
        case ast.Constant(value=int() | float() as value) if abs(value) < _MAX_NUMBER:
            return value
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if (
            abs(value) < _MAX_NUMBER
        ):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            return dict(_items(keys, values, depth + 1))
    raise ValueError("no literal")


def _items(
    keys: Sequence[ast.expr | None], values: Sequence[ast.expr], depth: int
) -> Iterator[tuple[str, object]]:
    for key, value in zip(keys, values, strict=True):
        name = None if key is None else _literal(key, depth)
        if not isinstance(name, str):
            raise ValueError("a key is no text")
        yield name, _literal(value, depth)


def _fenced(
    code: str, tools: Mapping[str, ToolSchema]
) -> list[tuple[str, dict[str, object]]] | None:
    """The calls of a fence; None if it has anything else."""
    try:
        body = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = []
    for statement in body:
        value = getattr(statement, "value", None)
        inner = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for node in inner:
            call = _called(node, tools)
            if call is None:
                return None
            calls.append(call)
    return calls


def _called(node: object, tools: Mapping[str, ToolSchema]) -> tuple[str, dict[str, object]] | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    name = node.func.id
    if name == "print" and name not in tools and len(node.args) == 1:
        return _called(node.args[0], tools)
    values = _values(node, tools[name]) if name in tools else None
    return None if values is None else (name, values)


# -- grammar ----------------------------------------------------------------------------------


def pythonic_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The list, after its marker."""
    call = rules.add("call", any_of(_call(tool, rules) for tool in tools))
    calls = repeated(call, f"{quoted(', ')} {call}", parallel=parallel)
    return f"{quoted('[')} {calls} {quoted(']')} {rules.marker(END)}"


def bare_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The list without a marker."""
    call = rules.add("call", any_of(_call(tool, rules) for tool in tools))
    calls = repeated(call, f"{quoted(', ')} {call}", parallel=parallel)
    return f"{quoted('[')} {calls} {quoted(']')}"


def _call(tool: FunctionTool, rules: LarkRules) -> str:
    arguments = ArgumentRules(tool, rules)
    found = (_form(form, arguments) for form in arguments.forms())
    forms = arguments.any_form([form for form in found if form is not None])
    return f"{quoted(tool.name + '(')} ({forms}) {quoted(')')}"


def _form(form: ArgumentForm, arguments: ArgumentRules) -> str | None:
    """The arguments in the schema's order, with commas between those that there are; None where one
    that the form requires has no value."""
    first = rest = ""
    for name, schemas in reversed([*form.arguments.items()]):
        needed = name in form.required
        is_written = arguments.is_readable(name, _is_read)
        as_json = arguments.json(name, schemas) if is_written else None
        if as_json is None:
            if needed:
                return None
            continue
        value = f"{quoted(name + '=')} {as_json}"
        first = arguments.rule(
            f"first_{word(name)}",
            f"{value} {rest}" + ("" if needed else f" | {first or quoted('')}"),
        )
        further = f"({quoted(', ')} {value})" + ("" if needed else "?")
        rest = arguments.rule(f"rest_{word(name)}", f"{further} {rest}")
    return first


def _is_read(name: str) -> bool:
    return name == name.strip() and not set("'\"()[]{}\\") & set(name)
