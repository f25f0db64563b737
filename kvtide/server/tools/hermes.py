"""Hermes' form, which Qwen and many others speak, and Qwen3-Coder's, which has the same marker.

<tool_call>                                     <tool_call>
{"name": "f", "arguments": {"a": 1}}            <function=f>
</tool_call>                                    <parameter=a>
                                                1
                                                </parameter>
                                                </function>
                                                </tool_call>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import ObjectParser
from kvtide.server.tools.grammars.argument_rules import ArgumentRules, ArgumentSyntax
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, json_call, repeated
from kvtide.server.tools.marker_parser import OfferedTools
from kvtide.server.tools.tool_spec import MAX_NAME, FunctionTool
from kvtide.server.tools.typed_arguments import ArgumentWriter

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _FUNCTION_END, END)


class HermesParser(ObjectParser):
    """Both forms. An end marker that is missing ends nothing: the object's last bracket does."""

    MARKERS = (BEGIN, END, FUNCTION)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._arguments: ArgumentWriter | None = None

    def _marked(self, marker: str) -> Callable[[], bool]:
        if marker == END:
            return self._stray_end
        return self._function_name if marker == FUNCTION else self._opened

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._rest[0] == "{":
            return self._read_object(self._closing)
        found = self._take(FUNCTION)
        if found is None:
            return False
        if not found:
            return self._broken()
        self._marker += FUNCTION
        self._state = self._function_name
        return True

    def _closing(self) -> bool:
        """After the arguments: brackets too many, and the end marker."""
        self._rest = self._rest.lstrip(" \t\r\n}")
        found = self._take(END) if self._rest else None
        if found is None:
            return False
        return self._in_text()

    def _cut_short(self) -> None:
        if self._object is not None:
            super()._cut_short()
        elif self._arguments is not None:
            self._arguments.close()
        elif self._state in (self._opened, self._function_name):
            self._out.text(self._marker)

    # -- Qwen3-Coder ------------------------------------------------------------------------

    def _function_name(self) -> bool:
        name, found, rest = self._rest.partition(">")
        if not found and len(name) <= MAX_NAME:
            return False
        name = name.strip().strip("\"'")
        if not found or not self._out.is_name(name):
            return self._broken()
        self._rest = rest
        self._out.begin(name)
        self._arguments = ArgumentWriter(self._out, own_lines=True)
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a parameter, or before the function's end."""
        assert self._arguments is not None
        if not self._skip_space():
            return False
        kinds = {marker: self._starts(marker) for marker in (_PARAMETER, _FUNCTION_END, END)}
        if kinds[_PARAMETER]:
            self._state = self._parameter_name
            return True
        if None in kinds.values() and not any(kinds.values()):
            return False
        self._take(_FUNCTION_END)
        self._arguments.close()
        self._arguments, self._state = None, self._closing
        return True

    def _parameter_name(self) -> bool:
        assert self._arguments is not None
        name, found, rest = self._rest.partition(">")
        if not found:
            return False
        self._rest = rest
        self._arguments.begin(name.removeprefix(_PARAMETER).strip().strip("\"'"))
        self._state = self._value_begin
        return True

    def _value_begin(self) -> bool:
        """One line break after the parameter's name is not its value."""
        if not self._rest:
            return False
        self._rest = self._rest.removeprefix("\n")
        self._state = self._in_parameter
        return True

    def _in_parameter(self) -> bool:
        assert self._arguments is not None
        self._rest, end = self._arguments.read(self._rest, _VALUE_ENDS, final=self._final)
        if end is None:
            return False
        self._rest = self._rest.removeprefix(_PARAMETER_END)
        self._state = self._between
        return True


# -- grammar ----------------------------------------------------------------------------------


def hermes_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """What follows the first marker; later calls have markers of their own."""
    begin, end = rules.marker(BEGIN), rules.marker(END)
    call = rules.add("call", any_of(json_call(tool, rules) for tool in tools))
    body = f"{quoted(chr(10))} {call} {quoted(chr(10))} {end}"
    return repeated(body, f"{quoted(chr(10))} {begin} {body}", parallel=parallel)


def qwen_coder_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The same for Qwen3-Coder's form."""
    begin, end = rules.marker(BEGIN), rules.marker(END)
    function = rules.add("function", any_of(_function(tool, rules) for tool in tools))
    call = f"{quoted(chr(10))} {quoted(FUNCTION)} {function} {quoted(chr(10))} {end}"
    return repeated(call, f"{quoted(chr(10))} {begin} {call}", parallel=parallel)


def bare_qwen_coder_grammar(
    tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool
) -> str:
    """A call without its first marker, as this family writes some; what follows `FUNCTION`."""
    function = rules.add("function", any_of(_function(tool, rules) for tool in tools))
    end = f"({quoted(chr(10))} {rules.marker(END)})?"
    begin = f"{quoted(chr(10))} ({rules.marker(BEGIN)} {quoted(chr(10))})?"
    further = f"{begin} {quoted(FUNCTION)} {function} {end}"
    return repeated(f"{function} {end}", further, parallel=parallel)


def _function(tool: FunctionTool, rules: LarkRules) -> str:
    syntax = ArgumentSyntax(_parameter, f"\n{_PARAMETER_END}", _VALUE_ENDS, quoted("\n"), _is_read)
    arguments = ArgumentRules(tool, rules).one_by_one(syntax)
    return f"{quoted(f'{tool.name}>' + chr(10))} ({arguments}) {quoted(_FUNCTION_END)}"


def _parameter(name: str, *, as_text: bool) -> str:
    return quoted(f"{_PARAMETER}{name}>\n")


def _is_read(name: str) -> bool:
    return ">" not in name and name == name.strip().strip("\"'")
