"""Kimi's form: ids of calls that the model writes itself, and arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>                                 (without line breaks)

Templates write a call's id and no name, so a call keeps the id that the model gave it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import JsonText
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, repeated
from kvtide.server.tools.marker_parser import MAX_HELD, MarkerParser, OfferedTools
from kvtide.server.tools.tool_spec import FunctionTool

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
SPECIAL = (CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_-]+):\d{1,9}")


class KimiParser(MarkerParser):
    """Calls without a section around them are calls, too."""

    MARKERS = SPECIAL

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._value: JsonText | None = None
        self._section = ""

    def _marked(self, marker: str) -> Callable[[], bool]:
        if marker == CALLS:
            return self._opened
        return self._head if marker == CALL else self._stray_end

    def _opened(self) -> bool:
        """The section's marker is text unless a call follows."""
        if not self._skip_space() and not self._final:
            return False
        found = self._starts(CALL)
        if found is None:
            return False
        if not found:
            return self._broken()
        self._section, self._marker = self._marker, CALL
        self._take(CALL)
        self._state = self._head
        return True

    def _head(self) -> bool:
        head, found, rest = self._rest.partition(ARGUMENTS)
        if not found:
            return self._unread() if len(head) > MAX_HELD else False
        named = _ID.fullmatch(head.strip())
        if named is None or not self._out.is_name(named[1]):
            return self._unread()
        if not rest.strip():
            return False
        self._rest, self._section = rest.lstrip(), ""
        self._out.begin(named[1], head.strip())
        self._value, self._state = JsonText(), self._in_json
        return True

    def _unread(self) -> bool:
        self._marker, self._section = self._section + self._marker, ""
        return self._broken()

    def _in_json(self) -> bool:
        assert self._value is not None
        piece, end = self._value.feed(self._rest)
        self._rest = self._rest[end:]
        self._out.arguments(piece)
        if self._value.done or self._value.broken:
            self._value = None
            self._out.end()
            return self._in_text()
        return False

    def _cut_short(self) -> None:
        if self._state in (self._opened, self._head):
            self._out.text(self._section + self._marker)


# -- grammar ----------------------------------------------------------------------------------


def kimi_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """What follows the section's marker."""
    begin, arguments, end = (rules.marker(m) for m in (CALL, ARGUMENTS, CALL_END))
    named = (
        f"{quoted(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {arguments} {rules.arguments(tool)}"
        for tool in tools
    )
    call = rules.add("call", any_of(named))
    whole = f"{begin} {call} {end}"
    return f"{repeated(whole, whole, parallel=parallel)} {rules.marker(CALLS_END)}"
