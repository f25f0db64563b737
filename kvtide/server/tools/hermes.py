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

from kvtide.server.tools.call_json import CallObject
from kvtide.server.tools.lark_rules import LarkRules, any_of, json_call, quoted, repeated
from kvtide.server.tools.marker_parser import MarkerParser, OfferedTools, beginning
from kvtide.server.tools.tool_spec import FunctionTool
from kvtide.server.tools.typed_arguments import ArgumentWriter

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _FUNCTION_END, END)


class HermesParser(MarkerParser):
    """Both forms. An end marker that is missing ends nothing: the object's last bracket does."""

    MARKERS = (BEGIN, END, _FUNCTION)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._object: CallObject | None = None
        self._arguments: ArgumentWriter | None = None
        self._break = ""

    def _marked(self, marker: str) -> Callable[[], bool]:
        if marker == END:
            return self._stray_end
        return self._function_name if marker == _FUNCTION else self._opened

    def _stray_end(self) -> bool:
        """An end marker is text where no call came before."""
        if not self._out.calls:
            self._out.text(END)
        return self._in_text()

    def _opened(self) -> bool:
        if not self._skip_space():
            return False
        if self._rest[0] == "{":
            self._object = CallObject(self._out)
            self._state = self._in_object
            return True
        found = self._take(_FUNCTION)
        if found is None:
            return False
        if not found:
            return self._broken()
        self._marker += _FUNCTION
        self._state = self._function_name
        return True

    def _in_object(self) -> bool:
        assert self._object is not None
        self._rest = self._rest[self._object.feed(self._rest) :]
        if self._object.broken and not self._object.begun:
            read, self._object = self._object.read, None
            return self._broken(read)
        if self._object.broken or self._object.done:
            self._out.end()
            self._object, self._state = None, self._closing
            return True
        return False

    def _closing(self) -> bool:
        """After the arguments: brackets too many, and the end marker."""
        self._rest = self._rest.lstrip(" \t\r\n}")
        found = self._take(END) if self._rest else None
        if found is None:
            return False
        return self._in_text()

    def _cut_short(self) -> None:
        if self._object is not None and not self._object.begun:
            self._out.text(self._marker + self._object.read)
        elif self._arguments is not None:
            self._value(final=True)
            self._arguments.close()
        elif self._state in (self._opened, self._function_name):
            self._out.text(self._marker)

    # -- Qwen3-Coder ------------------------------------------------------------------------

    def _function_name(self) -> bool:
        name, found, rest = self._rest.partition(">")
        if not found and len(name) <= 64:
            return False
        name = name.strip().strip("\"'")
        if not found or not self._out.is_name(name):
            return self._broken()
        self._rest = rest
        self._out.begin(name)
        self._arguments = ArgumentWriter(self._out)
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
        self._break = ""
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
        return self._value(final=False)

    def _value(self, *, final: bool) -> bool:
        """The value as far as it is certain; one line break before its end is not a part of it."""
        arguments = self._arguments
        if arguments is None or not arguments.in_value:
            return False
        ends = [(at, end) for end in _VALUE_ENDS if (at := self._rest.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            arguments.piece((self._break + self._rest[:at]).removesuffix("\n"))
            arguments.end()
            self._rest = self._rest[at + (len(end) if end == _PARAMETER_END else 0) :]
            self._state = self._between
            return True
        held = 0 if final else beginning(self._rest, _VALUE_ENDS)
        certain = self._break + self._rest[: len(self._rest) - held]
        self._rest = self._rest[len(self._rest) - held :]
        self._break = "\n" if certain.endswith("\n") else ""
        arguments.piece(certain.removesuffix("\n"))
        return False


# -- grammar ----------------------------------------------------------------------------------


def hermes_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """What follows the first marker; later calls have markers of their own."""
    begin, end = rules.marker(BEGIN), rules.marker(END)
    call = rules.add("call", any_of(json_call(tool, rules) for tool in tools))
    body = f"{quoted(chr(10))} {call} {quoted(chr(10))} {end}"
    return repeated(body, f"{quoted(chr(10))} {begin} {body}", parallel=parallel)


def qwen_coder_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The same for Qwen3-Coder's form: texts are free, other values follow the schema."""
    begin, end = rules.marker(BEGIN), rules.marker(END)
    call = rules.add("call", any_of(_function(tool, rules) for tool in tools))
    body = f"{quoted(chr(10))} {call} {quoted(chr(10))} {end}"
    return repeated(body, f"{quoted(chr(10))} {begin} {body}", parallel=parallel)


def _function(tool: FunctionTool, rules: LarkRules) -> str:
    parameters = rules.parameters(
        tool, lambda name: quoted(f"{_PARAMETER}{name}>\n"), f"\n{_PARAMETER_END}", quoted("\n")
    )
    return f"{quoted(f'{_FUNCTION}{tool.name}>' + chr(10))} {parameters} {quoted(_FUNCTION_END)}"
