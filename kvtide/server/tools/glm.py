"""GLM's form, since 4.5: arguments one by one, whose types are the schema's.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

Line breaks between the markers mean nothing; later models write none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.grammars.argument_rules import ArgumentRules, ArgumentSyntax
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, repeated
from kvtide.server.tools.marker_parser import MarkerParser, OfferedTools
from kvtide.server.tools.tool_spec import MAX_NAME, FunctionTool
from kvtide.server.tools.typed_arguments import ArgumentWriter

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_VALUE_ENDS = (VALUE_END, END)


class GlmParser(MarkerParser):
    MARKERS = (BEGIN, END)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._arguments: ArgumentWriter | None = None

    def _marked(self, marker: str) -> Callable[[], bool]:
        return self._name if marker == BEGIN else self._stray_end

    def _name(self) -> bool:
        """Up to the first marker or, after the name's characters, a line break."""
        if not self._skip_space():
            return False
        line = self._rest.partition("\n")[0].partition("<")[0]
        if len(line) == len(self._rest) and not self._final and len(line) <= MAX_NAME:
            return False
        name = line.strip()
        if not self._out.is_name(name):
            return self._broken()
        self._rest = self._rest[len(line) :]
        self._out.begin(name)
        self._arguments = ArgumentWriter(self._out)
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a key, a value or the call's end."""
        assert self._arguments is not None
        if not self._skip_space():
            return False
        found = {marker: self._starts(marker) for marker in (KEY, END)}
        if found[KEY]:
            self._state = self._key
            return True
        if not found[END] and None in found.values():
            return False
        self._take(END)
        self._arguments.close()
        self._arguments = None
        return self._in_text()

    def _key(self) -> bool:
        assert self._arguments is not None
        found = self._until(VALUE)
        if found is None:
            return False
        name = found[0].removeprefix(KEY).strip().removesuffix(KEY_END)
        self._arguments.begin(name.strip())
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        assert self._arguments is not None
        self._rest, end = self._arguments.read(self._rest, _VALUE_ENDS, final=self._final)
        if end is None:
            return False
        self._rest = self._rest.removeprefix(VALUE_END)
        self._state = self._between
        return True

    def _cut_short(self) -> None:
        if self._arguments is not None:
            self._arguments.close()
        elif self._state == self._name:
            self._out.text(self._marker)


def glm_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    begin, end = rules.marker(BEGIN), rules.marker(END)
    new_line = f"{quoted(chr(10))}?"
    call = rules.add("call", any_of(_call(tool, rules, new_line) for tool in tools))
    body = f"{call} {end}"
    return repeated(body, f"{new_line} {begin} {body}", parallel=parallel)


def _call(tool: FunctionTool, rules: LarkRules, new_line: str) -> str:
    key, key_end, value = (rules.marker(marker) for marker in (KEY, KEY_END, VALUE))

    def head(name: str, *, as_text: bool) -> str:
        return f"{key} {quoted(name)} {key_end} {new_line} {value}"

    syntax = ArgumentSyntax(head, VALUE_END, _VALUE_ENDS, new_line, _is_read)
    return f"{quoted(tool.name)} {new_line} ({ArgumentRules(tool, rules).one_by_one(syntax)})"


def _is_read(name: str) -> bool:
    return name == name.strip() and not any(marker in name for marker in (KEY, KEY_END, VALUE))
