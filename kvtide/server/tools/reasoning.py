"""What a model thinks aloud before it answers, split off.

    <think>…</think>answer        [THINK]…[/THINK]answer

A template may write the opening marker into the prompt. Space around the markers is dropped. The
answer goes on to the parser of calls.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtide.server.tools.marker_parser import beginning
from kvtide.server.tools.output_events import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
)

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
MARKERS = tuple(marker for pair in PAIRS for marker in pair)


def opened_by(prompt: str) -> str | None:
    """The marker that ends the reasoning which a prompt's last word opens; None if none does."""
    end = prompt.rstrip()
    return next((closing for opening, closing in PAIRS if end.endswith(opening)), None)


class ThinkParser:
    """`answer` parses what follows. `closing`: the prompt has opened the reasoning."""

    def __init__(self, answer: OutputParser, closing: str | None = None) -> None:
        self._answer = answer
        self._closing = closing or ""
        self._rest = self._space = ""
        self._has_text = self._final = False
        self._state: Callable[[], list[OutputEvent] | None]
        self._state = self._start if closing is None else self._thinking

    def feed(self, text: str) -> list[OutputEvent]:
        self._rest += text
        events: list[OutputEvent] = []
        while (more := self._state()) is not None:
            events += more
        return events

    def finish(self) -> list[OutputEvent]:
        self._final = True
        events = self.feed("")
        return [*events, *self._answer.finish()]

    def _start(self) -> list[OutputEvent] | None:
        """Before the answer's first character: the model may open its reasoning."""
        begun = self._rest.lstrip()
        for opening, closing in PAIRS:
            if begun.startswith(opening):
                self._rest = begun.removeprefix(opening)
                self._closing, self._state = closing, self._thinking
                return []
            if opening.startswith(begun) and not self._final:
                return None
        self._state = self._answering
        return []

    def _thinking(self) -> list[OutputEvent] | None:
        at = self._rest.find(self._closing)
        if at >= 0:
            events = self._reason(self._rest[:at])
            self._rest = self._rest[at + len(self._closing) :]
            self._state = self._after
            return events
        held = 0 if self._final else beginning(self._rest, (self._closing,))
        certain = len(self._rest) - held
        if not certain:
            return None
        events = self._reason(self._rest[:certain])
        self._rest = self._rest[certain:]
        return events

    def _reason(self, text: str) -> list[OutputEvent]:
        """Space waits for what follows it; at either end it is dropped."""
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if not self._has_text:
            shown = shown.lstrip()
            self._space = self._space if shown else ""
        self._has_text |= bool(shown)
        return [ReasoningDelta(shown)] if shown else []

    def _after(self) -> list[OutputEvent] | None:
        self._rest = self._rest.lstrip()
        if not self._rest:
            return None
        self._state = self._answering
        return []

    def _answering(self) -> list[OutputEvent] | None:
        if not self._rest:
            return None
        text, self._rest = self._rest, ""
        return self._answer.feed(text)


class ReasoningAsText:
    """Reasoning is a part of the answer's text."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[OutputEvent]:
        return [_as_text(event) for event in self._parser.feed(text)]

    def finish(self) -> list[OutputEvent]:
        return [_as_text(event) for event in self._parser.finish()]


def _as_text(event: OutputEvent) -> OutputEvent:
    return TextDelta(event.text) if isinstance(event, ReasoningDelta) else event
