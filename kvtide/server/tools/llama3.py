"""Llama 3's form: JSON after `<|python_tag|>`, or an answer that is JSON and nothing else.

    <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

Without the marker an object is a call only if it names an offered tool: an answer may be JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import ObjectParser
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, json_call, repeated
from kvtide.server.tools.marker_parser import OfferedTools
from kvtide.server.tools.tool_spec import FunctionTool

BEGIN = "<|python_tag|>"


class Llama3Parser(ObjectParser):
    MARKERS = (BEGIN,)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._state = self._start

    def _marked(self, marker: str) -> Callable[[], bool]:
        return self._opened

    def _start(self) -> bool:
        """The answer's first characters: a bare object may be a call."""
        if not self._skip_space():
            return False
        if self._rest[0] == "{":
            return self._read_object(self._between, known=True)
        self._out.text(self._marker)
        return self._in_text()

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._rest[0] != "{":
            return self._broken()
        return self._read_object(self._between)

    def _between(self) -> bool:
        """After a call: another one, or text."""
        self._rest = self._rest.lstrip(" \t\r\n;}")
        if not self._rest:
            return False
        if self._rest[0] == "{":
            return self._read_object(self._between, known=True)
        return self._in_text()

    def _cut_short(self) -> None:
        if self._object is not None:
            super()._cut_short()
        elif self._state in (self._opened, self._start):
            self._out.text(self._marker)


class MarkedLlama3Parser(Llama3Parser):
    """Beside answers that may be JSON themselves a call has its marker."""

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._state = self._text


def llama3_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    call = rules.add("call", any_of(json_call(tool, rules, "parameters") for tool in tools))
    return repeated(call, f"{quoted('; ')} {call}", parallel=parallel)
