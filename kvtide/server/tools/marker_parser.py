"""The skeleton of parsers: text, and calls that begin at a marker.

A state is a method that reads `_rest`, the text which is not decided yet. It returns False when it
needs more text. States decide by characters alone and hold back what may become a marker, so the
joined events do not depend on where the text was cut.

    text ──marker──▶ a state of the format ──call begun──▶ … ──call ended──▶ text
     ▲                        │
     └──── broken: the marker is text, and what follows is read again ────┘
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.server.tools.output_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvtide.server.tools.schemas.tool_schema import ToolSchema
from kvtide.server.tools.tool_spec import NAME, FunctionTool

MAX_HELD = 16_384
"""Characters that may wait for the name of a call; an output that holds back more is text."""
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: other ids are refused by templates of Mistral's models."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that an answer may call, by name; `new_id` makes the id of a call."""

    by_name: dict[str, ToolSchema] = field(default_factory=dict)
    new_id: Callable[[], str] = new_call_id

    @classmethod
    def of(
        cls, tools: Sequence[FunctionTool], new_id: Callable[[], str] = new_call_id
    ) -> OfferedTools:
        return cls({tool.name: ToolSchema(tool) for tool in tools}, new_id)


def beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of a text that one of the markers begins with."""
    longest = min(len(text), max(map(len, markers), default=0))
    for count in range(longest, 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first marker is, and which."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


class CallWriter:
    """The events of one output, in order. Space before calls and between them is no text."""

    def __init__(self, offered: OfferedTools) -> None:
        self.offered = offered
        self.calls = 0
        self.open: str | None = None
        self._events: list[OutputEvent] = []
        self._space = ""
        self._has_text = self._after_call = False
        self._has_arguments = False

    def take(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if not shown:
            return
        if self._after_call and not self._has_text:
            shown = shown.lstrip()
        self._after_call, self._has_text = False, True
        self._events.append(TextDelta(shown))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def is_name(self, name: str) -> bool:
        """Whether a call may have this name. A marked call of an unknown function is a call."""
        return name in self.offered.by_name or NAME.fullmatch(name) is not None

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; `call_id` is the one that the model wrote."""
        self.end()
        self._space = ""
        self._events.append(CallBegin(self.calls, call_id or self.offered.new_id(), name))
        self.open, self._has_arguments = name, False
        self.calls += 1

    def arguments(self, text: str) -> None:
        assert self.open is not None
        if text:
            self._has_arguments = True
            self._events.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """End the open call, if there is one. A call without arguments has an empty object."""
        if self.open is None:
            return
        if not self._has_arguments:
            self.arguments("{}")
        self._events.append(CallEnd(self.calls - 1))
        self.open, self._after_call = None, True

    def finish(self) -> None:
        self.end()
        if self._space and not self._after_call:
            self._events.append(TextDelta(self._space))
        self._space = ""


class MarkerParser:
    """Reads text up to one of `MARKERS`; `_marked` gives the state that follows a marker."""

    MARKERS: tuple[str, ...] = ()

    def __init__(self, offered: OfferedTools) -> None:
        self._out = CallWriter(offered)
        self._rest = ""
        self._marker = ""
        self._state: Callable[[], bool] = self._text
        self._final = False

    def feed(self, text: str) -> list[OutputEvent]:
        self._rest += text
        self._run()
        return self._out.take()

    def finish(self) -> list[OutputEvent]:
        self._final = True
        self._run()
        self._cut_short()
        self._out.text(self._rest)
        self._rest = ""
        self._out.finish()
        return self._out.take()

    def _run(self) -> None:
        while self._state():
            pass

    def _marked(self, marker: str) -> Callable[[], bool]:
        """The state after a marker in text."""
        raise NotImplementedError

    def _cut_short(self) -> None:
        """The output is over, in whatever state."""

    # -- text -------------------------------------------------------------------------------

    def _text(self) -> bool:
        found = first_marker(self._rest, self.MARKERS)
        if found is None:
            held = 0 if self._final else beginning(self._rest, self.MARKERS)
            self._say(len(self._rest) - held)
            return False
        at, marker = found
        self._say(at)
        self._rest = self._rest[len(marker) :]
        self._marker = marker
        self._state = self._marked(marker)
        return True

    def _say(self, count: int) -> None:
        """So many characters are text."""
        if count:
            self._out.text(self._rest[:count])
            self._rest = self._rest[count:]

    def _broken(self, read: str = "") -> bool:
        """No call follows the marker: it is text, and what was read since is read again."""
        self._out.text(self._marker)
        self._rest = read + self._rest
        self._state = self._text
        return True

    def _in_text(self) -> bool:
        """Go on with text."""
        self._state = self._text
        return True

    def _stray_end(self) -> bool:
        """An end marker in text is text, where no call came before."""
        if not self._out.calls:
            self._out.text(self._marker)
        return self._in_text()

    # -- reading ----------------------------------------------------------------------------

    def _skip_space(self) -> bool:
        """Drop space at the front; False if nothing else is there yet.

        It belongs to the marker before it, should that turn out to be text.
        """
        rest = self._rest.lstrip()
        self._marker += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest
        return bool(rest)

    def _starts(self, marker: str) -> bool | None:
        """Whether the rest begins with a marker; None if more text must decide."""
        if self._rest.startswith(marker):
            return True
        return None if not self._final and marker.startswith(self._rest) else False

    def _take(self, marker: str) -> bool | None:
        """The same, and drops the marker."""
        found = self._starts(marker)
        if found:
            self._rest = self._rest[len(marker) :]
        return found

    def _until(self, *markers: str) -> tuple[str, str] | None:
        """The text before the first of the markers, and which; drops both. None if none came."""
        found = first_marker(self._rest, markers)
        if found is None:
            return None
        at, marker = found
        read, self._rest = self._rest[:at], self._rest[at + len(marker) :]
        return read, marker
