"""Mistral's two forms, and Nemotron Nano 2's, which has the list of the first between markers.

[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}
<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import JsonText, ObjectParser
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, json_call, repeated
from kvtide.server.tools.marker_parser import MAX_HELD, OfferedTools
from kvtide.server.tools.tool_spec import FunctionTool

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NEMOTRON, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"


class CallListParser(ObjectParser):
    """A list of objects after a marker. Subclasses say which, and what else may follow it."""

    def _marked(self, marker: str) -> Callable[[], bool]:
        return self._opened

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._rest[0] == "[":
            self._marker, self._rest = self._marker + "[", self._rest[1:]
            self._state = self._in_list
            return True
        return self._no_list()

    def _no_list(self) -> bool:
        return self._broken()

    def _in_list(self) -> bool:
        """Before an object, or at the list's end."""
        if not self._skip_space():
            return False
        if self._rest[0] == "{":
            return self._read_object(self._in_list)
        if not self._out.calls:
            return self._broken()
        if self._rest[0] == ",":
            self._rest = self._rest[1:]
            return True
        self._rest = self._rest.removeprefix("]")
        return self._in_text()

    def _cut_short(self) -> None:
        if self._object is not None:
            return super()._cut_short()
        if self._state == self._opened or (self._state == self._in_list and not self._out.calls):
            self._out.text(self._marker)


class NemotronParser(CallListParser):
    """A single object may stand where the list should."""

    MARKERS = (NEMOTRON, NEMOTRON_END)

    def _marked(self, marker: str) -> Callable[[], bool]:
        return self._opened if marker == NEMOTRON else self._stray_end

    def _no_list(self) -> bool:
        return self._read_object(self._in_text) if self._rest[0] == "{" else self._broken()


class MistralParser(CallListParser):
    MARKERS = (BEGIN,)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._value: JsonText | None = None

    def _no_list(self) -> bool:
        self._state = self._name
        return True

    # -- a name and its arguments -----------------------------------------------------------

    def _name(self) -> bool:
        at = self._rest.find("{")
        if at < 0:
            return self._broken() if len(self._rest) > MAX_HELD else False
        head = self._rest[:at]
        name = head.removesuffix(ARGUMENTS).partition(CALL_ID)[0].strip()
        if not self._out.is_name(name):
            return self._broken()
        self._rest = self._rest[at:]
        self._out.begin(name)
        self._value, self._state = JsonText(), self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        assert self._value is not None
        piece, end = self._value.feed(self._rest)
        self._rest = self._rest[end:]
        self._out.arguments(piece)
        if self._value.done or self._value.broken:
            self._out.end()
            self._value = None
            return self._in_text()
        return False

    def _cut_short(self) -> None:
        if self._state == self._name:
            self._out.text(self._marker)
        else:
            super()._cut_short()


# -- grammar ----------------------------------------------------------------------------------


def mistral_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The list of objects."""
    call = rules.add("call", any_of(json_call(tool, rules) for tool in tools))
    calls = repeated(call, f"{quoted(', ')} {call}", parallel=parallel)
    return f"{quoted('[')} {calls} {quoted(']')}"


def nemotron_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    return f"{mistral_grammar(tools, rules, parallel=parallel)} {rules.marker(NEMOTRON_END)}"


def mistral_args_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """Names and their arguments."""
    arguments = rules.marker(ARGUMENTS)
    named = (f"{quoted(tool.name)} {arguments} {rules.arguments(tool)}" for tool in tools)
    call = rules.add("call", any_of(named))
    return repeated(call, f"{rules.marker(BEGIN)} {call}", parallel=parallel)
