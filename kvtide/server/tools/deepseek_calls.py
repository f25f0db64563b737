"""DeepSeek's forms: of V3, of V3.1, and the one of V3.2 and V4.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>…

<｜DSML｜function_calls>                        V4: tool_calls
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import JsonText
from kvtide.server.tools.grammars.argument_rules import ArgumentRules, ArgumentSyntax
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, repeated
from kvtide.server.tools.marker_parser import (
    MAX_HELD,
    MarkerParser,
    OfferedTools,
    first_marker,
)
from kvtide.server.tools.tool_spec import FunctionTool
from kvtide.server.tools.typed_arguments import ArgumentWriter

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
SPECIAL = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END, DSML)
"""Texts that are special tokens in these vocabularies."""
INVOKE, INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
_VALUE_ENDS = (PARAMETER_END, INVOKE_END)
_BLOCKS = tuple(f"<{DSML}{name}>" for name in ("function_calls", "tool_calls"))
_BLOCK_ENDS = tuple(f"</{DSML}{name}>" for name in ("function_calls", "tool_calls"))
_IGNORED = (CALLS, CALLS_END, CALL_END, *_BLOCKS, *_BLOCK_ENDS, INVOKE_END)
_NAME = re.compile(r'name="([^"]*)"')
_IS_TEXT = re.compile(r'string="(true|false)"')
_FENCE = re.compile(r"\s*```(?:json)?\s*")


class DeepSeekParser(MarkerParser):
    """All forms. Markers around calls are dropped where a call has come; else they are text."""

    MARKERS = (CALL, INVOKE, *_IGNORED)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._value: JsonText | None = None
        self._arguments: ArgumentWriter | None = None
        self._wrapper = ""

    def _marked(self, marker: str) -> Callable[[], bool]:
        states = {CALL: self._head, INVOKE: self._invoke}
        return states.get(marker, self._around)

    def _around(self) -> bool:
        """A marker before or after calls. One that opens a list waits for its first call."""
        if self._marker.startswith((CALLS, *_BLOCKS)):
            if not self._skip_space() and not self._final:
                return False
            first = INVOKE if self._marker.startswith(_BLOCKS) else CALL
            found = self._starts(first)
            if found is None:
                return False
            if not found:
                self._out.text(self._marker)
            self._wrapper = self._marker if found else ""
        elif not self._out.calls:
            self._out.text(self._marker)
        return self._in_text()

    def _broken(self, read: str = "") -> bool:
        self._marker, self._wrapper = self._wrapper + self._marker, ""
        return super()._broken(read)

    # -- V3 and V3.1 ------------------------------------------------------------------------

    def _head(self) -> bool:
        """`f<sep>{` of V3.1, or `function<sep>f`, a line break and a fence of V3."""
        head, found, rest = self._rest.partition(SEPARATOR)
        if not found:
            return self._broken() if len(head) > MAX_HELD else False
        first = first_marker(rest, ("{", CALL_END))
        if first is None:
            return self._broken() if len(rest) > MAX_HELD else False
        at, marker = first
        named = _FENCE.split(rest[:at])[0].strip()
        name = named or head.strip()
        if not self._out.is_name(name):
            return self._broken()
        self._rest, self._wrapper = rest[at:], ""
        self._out.begin(name)
        if marker == CALL_END:
            self._out.end()
            return self._in_text()
        self._value, self._state = JsonText(), self._in_json
        return True

    def _in_json(self) -> bool:
        assert self._value is not None
        piece, end = self._value.feed(self._rest)
        self._rest = self._rest[end:]
        self._out.arguments(piece)
        if self._value.done or self._value.broken:
            self._value = None
            self._out.end()
            self._state = self._fence_end
            return True
        return False

    def _fence_end(self) -> bool:
        if not self._skip_space():
            return False
        return False if self._take("```") is None else self._in_text()

    # -- V3.2 and V4 ------------------------------------------------------------------------

    def _invoke(self) -> bool:
        head, found, rest = self._rest.partition(">")
        if not found:
            return self._broken() if len(head) > MAX_HELD else False
        name = _NAME.search(head)
        if name is None or not self._out.is_name(name[1]):
            return self._broken()
        self._rest, self._wrapper = rest, ""
        self._out.begin(name[1])
        self._arguments = ArgumentWriter(self._out)
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Before a parameter, or at the end of the call."""
        assert self._arguments is not None
        if not self._skip_space():
            return False
        found = {marker: self._starts(marker) for marker in (PARAMETER, INVOKE_END)}
        if found[PARAMETER]:
            self._state = self._parameter
            return True
        if not found[INVOKE_END] and None in found.values():
            return False
        self._take(INVOKE_END)
        self._arguments.close()
        self._arguments = None
        return self._in_text()

    def _parameter(self) -> bool:
        assert self._arguments is not None
        head, found, rest = self._rest.partition(">")
        if not found:
            return False
        name, is_text = _NAME.search(head), _IS_TEXT.search(head)
        self._rest = rest
        text = None if is_text is None else is_text[1] == "true"
        self._arguments.begin(name[1] if name else "", text=text)
        self._state = self._in_parameter
        return True

    def _in_parameter(self) -> bool:
        assert self._arguments is not None
        self._rest, end = self._arguments.read(self._rest, _VALUE_ENDS, final=self._final)
        if end is None:
            return False
        self._rest = self._rest.removeprefix(PARAMETER_END)
        self._state = self._between
        return True

    def _cut_short(self) -> None:
        if self._arguments is not None:
            self._arguments.close()
        elif self._state in (self._head, self._invoke):
            self._out.text(self._wrapper + self._marker)


# -- grammar ----------------------------------------------------------------------------------


def deepseek_v3_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """The form of V3, with fences."""
    head = f"{quoted('function')} {rules.marker(SEPARATOR)}"
    return _listed(
        (
            f"{head} {quoted(tool.name + chr(10) + '```json' + chr(10))} {rules.arguments(tool)} "
            f"{quoted(chr(10) + '```')}"
            for tool in tools
        ),
        rules,
        between=f"{quoted(chr(10))} ",
        parallel=parallel,
    )


def deepseek_v31_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    separator = rules.marker(SEPARATOR)
    bodies = (f"{quoted(tool.name)} {separator} {rules.arguments(tool)}" for tool in tools)
    return _listed(bodies, rules, between="", parallel=parallel)


def _listed(bodies: Iterable[str], rules: LarkRules, *, between: str, parallel: bool) -> str:
    call = rules.add("call", any_of(bodies))
    begin, end, last = (rules.marker(m) for m in (CALL, CALL_END, CALLS_END))
    whole = f"{begin} {call} {end}"
    return f"{repeated(whole, between + whole, parallel=parallel)} {last}"


def deepseek_v32_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    return _dsml(tools, rules, _BLOCK_ENDS[0], parallel=parallel)


def deepseek_v4_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    return _dsml(tools, rules, _BLOCK_ENDS[1], parallel=parallel)


def _dsml(tools: Sequence[FunctionTool], rules: LarkRules, last: str, *, parallel: bool) -> str:
    call = rules.add("call", any_of(_dsml_call(tool, rules) for tool in tools))
    return f"{quoted(chr(10))} {repeated(call, call, parallel=parallel)} {rules.marker(last)}"


def _dsml_call(tool: FunctionTool, rules: LarkRules) -> str:
    def head(name: str, *, as_text: bool) -> str:
        kind = "true" if as_text else "false"
        return rules.marker(f'{PARAMETER} name="{name}" string="{kind}">')

    syntax = ArgumentSyntax(head, PARAMETER_END, _VALUE_ENDS, quoted("\n"), _is_read, declared=True)
    # Without parameters there is an empty line.
    parameters = ArgumentRules(tool, rules).one_by_one(syntax)
    body = f"{quoted(chr(10))}?" if parameters == '""' else f"({parameters})"
    begin = rules.marker(f'{INVOKE} name="{tool.name}">\n')
    return f"{begin} {body} {rules.marker(INVOKE_END + chr(10))}"


def _is_read(name: str) -> bool:
    return not set('">') & set(name)
