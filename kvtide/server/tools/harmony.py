"""Harmony, the form of gpt-oss: messages in channels.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

`analysis` is reasoning, `final` and `commentary` are text, and a message to a function is a call. A
prompt ends with `<|start|>assistant`. The last marker ends the output and is not in its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kvtide.engine.grammar.grammar_rules import quoted
from kvtide.server.tools.call_json import JsonText
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of
from kvtide.server.tools.marker_parser import MAX_HELD, MarkerParser, OfferedTools, beginning
from kvtide.server.tools.tool_spec import FunctionTool

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
SPECIAL = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(MarkerParser):
    """Text outside of messages is text: a model may not have learned to use channels."""

    MARKERS = (START, CHANNEL, END, CALL, RETURN)

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._say_piece: Callable[[str], None] = self._out.text
        self._value: JsonText | None = None
        self._state = self._first

    def _marked(self, marker: str) -> Callable[[], bool]:
        return self._header if marker in (START, CHANNEL) else self._in_text

    def _first(self) -> bool:
        """A recipient may stand before the first channel."""
        found = self._starts(" to=functions.")
        if found is None:
            return False
        self._state = self._header if found else self._text
        return True

    def _header(self) -> bool:
        at = self._rest.find(MESSAGE)
        if at < 0:
            return self._broken() if len(self._rest) > MAX_HELD else False
        header = self._marker + self._rest[:at]
        self._rest = self._rest[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_call = recipient is not None and bool(self._out.offered.by_name)
        if is_call and recipient is not None and self._out.is_name(recipient[1]):
            self._out.begin(recipient[1])
            self._value = JsonText()
        elif channel is not None and channel[1] == "analysis":
            self._say_piece = self._out.reasoning
        else:
            self._say_piece = self._out.text
        self._marker = ""
        self._state = self._body if self._value is None else self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        """A marker in a text of the JSON is a part of it."""
        assert self._value is not None
        piece, at = self._value.feed(self._rest)
        self._out.arguments(piece)
        self._rest = self._rest[at:]
        if not (self._value.done or self._value.broken):
            return False
        self._value, self._say_piece, self._state = None, _drop, self._body
        return True

    def _body(self) -> bool:
        found = min((at for end in _ENDS if (at := self._rest.find(end)) >= 0), default=None)
        if found is None:
            held = 0 if self._final else beginning(self._rest, _ENDS)
            self._pass_on(len(self._rest) - held)
            return False
        self._pass_on(found)
        self._out.end()
        return self._in_text()

    def _pass_on(self, count: int) -> None:
        self._say_piece(self._rest[:count])
        self._rest = self._rest[count:]

    def _cut_short(self) -> None:
        """A header that is cut short says nothing."""
        if self._state == self._header:
            self._rest = ""


class WholeAnswerParser(HarmonyParser):
    """An answer goes on to the end of the output: a grammar holds its text, which may have what
    reads like markers in it."""

    def _body(self) -> bool:
        if self._say_piece != self._out.text:
            return super()._body()
        self._pass_on(len(self._rest))
        return False


def _drop(text: str) -> None:
    """What follows a call's arguments."""


# -- grammar ----------------------------------------------------------------------------------


def harmony_grammar(tools: Sequence[FunctionTool], rules: LarkRules, *, parallel: bool) -> str:
    """One call, after the channel's marker: a call ends the output, so there is no second one."""
    named = (
        f"{quoted(f'commentary to=functions.{tool.name} ')} {rules.marker(CONSTRAIN + 'json')} "
        f"{rules.marker(MESSAGE)} {rules.arguments(tool)}"
        for tool in tools
    )
    return rules.add("call", any_of(named))


def answer_grammar(rules: LarkRules, content: str | None) -> str:
    """An answer, after the channel's marker; `content` is the expression of its text."""
    if content is not None:
        return f"{rules.marker('final' + MESSAGE)} ({content})"
    text = rules.free_text(HarmonyParser.MARKERS)
    return f"({quoted('final')} | {quoted('commentary')}) {rules.marker(MESSAGE)} {text}"


def channels_grammar(tools: Sequence[FunctionTool], rules: LarkRules, answer: str | None) -> str:
    """An optional analysis, then a call of one of the tools or the answer."""
    last = [harmony_grammar(tools, rules, parallel=False)] if tools else []
    last += [answer] if answer is not None else []
    after = rules.marker(START + "assistant" + CHANNEL)
    thought = rules.text_until(END, HarmonyParser.MARKERS)
    analysis = f"({rules.marker('analysis' + MESSAGE)} {thought} {after})?"
    return f"{rules.marker(CHANNEL)} {analysis} ({any_of(last)})"
