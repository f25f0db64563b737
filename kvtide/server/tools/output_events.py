"""What a model's output means: text, reasoning, and calls of functions, as a stream of events.

Parsers read the output's text piece by piece. The events of one output, joined, do not depend on
where its text was cut. A parser never raises: output that breaks its format becomes text, or ends
the call that it breaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks aloud before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; calls of one output are numbered from 0 and never interleave."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON when joined, if the model completes the call."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


OutputEvent = TextDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """Parses one output. A `CallEnd` follows every `CallBegin`, at the latest at the end."""

    def feed(self, text: str) -> list[OutputEvent]:
        """The events that are certain after this piece of text."""

    def finish(self) -> list[OutputEvent]:
        """The output is over: what was held back."""


class PlainText:
    """The parser of outputs that are text and nothing else."""

    def feed(self, text: str) -> list[OutputEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []


class FirstCallOnly:
    """The events of another parser, without the calls after the first."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[OutputEvent]:
        return [event for event in self._parser.feed(text) if _is_wanted(event)]

    def finish(self) -> list[OutputEvent]:
        return [event for event in self._parser.finish() if _is_wanted(event)]


class CallsOrAnswer:
    """The events of another parser for an output that is calls or an answer, from its first
    character on: within an answer there are no markers."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser: OutputParser = parser
        self._read = ""
        self._decided = False

    def feed(self, text: str) -> list[OutputEvent]:
        return self._decide(text, self._parser.feed(text))

    def finish(self) -> list[OutputEvent]:
        return self._decide("", self._parser.finish())

    def _decide(self, text: str, events: list[OutputEvent]) -> list[OutputEvent]:
        if self._decided:
            return events
        self._read += text
        first = next((event for event in events if isinstance(event, TextDelta | CallBegin)), None)
        if first is None:
            return events
        self._decided = True
        if isinstance(first, CallBegin):
            return events
        self._parser = PlainText()
        return self._parser.feed(self._read)


def _is_wanted(event: OutputEvent) -> bool:
    return not isinstance(event, CallBegin | CallArguments | CallEnd) or event.index == 0


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The events with neighbouring pieces of one kind joined, and empty pieces left out."""
    whole: list[OutputEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        match event, last:
            case ((TextDelta() | ReasoningDelta() | CallArguments()), _) if not event.text:
                continue
            case TextDelta(), TextDelta():
                whole[-1] = TextDelta(last.text + event.text)
            case ReasoningDelta(), ReasoningDelta():
                whole[-1] = ReasoningDelta(last.text + event.text)
            case CallArguments(), CallArguments() if last.index == event.index:
                whole[-1] = replace(last, text=last.text + event.text)
            case _:
                whole.append(event)
    return whole
