"""Calls written as JSON, read character by character.

A value's text passes on as it is written, except that control characters in strings are escaped:
models write line breaks into strings. Beside that the text is checked for its characters and its
brackets alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

from kvtide.server.tools.marker_parser import MAX_HELD, CallWriter, MarkerParser, OfferedTools

_SPACE = " \t\r\n"
_PLAIN = re.compile(r"[^\"\\\x00-\x1f]+")
_TOKENS = re.compile(r"[-+.\w\s:,]+", re.ASCII)
_KEYS = ("name", "arguments", "parameters", "type", "id")
_CLOSING = {"{": "}", "[": "]"}


class JsonText:
    """One JSON value. `done`: its last character has come. `broken`: it is no JSON."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self._closing: list[str] = []
        self._in_string = self._escaped = self._began = self._scalar = False

    @property
    def in_text(self) -> bool:
        """Whether a text has begun in it that has not ended: markers are a part of it."""
        return self._in_string and not self.broken

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """The value's text from a position on, and where it ends or breaks."""
        out: list[str] = []
        while at < len(text) and not (self.done or self.broken):
            step = self._string if self._in_string else self._outside
            piece, at = step(text, at)
            out.append(piece)
        return "".join(out), at

    def _string(self, text: str, at: int) -> tuple[str, int]:
        letter = text[at]
        if self._escaped:
            self._escaped = False
        elif found := _PLAIN.match(text, at):
            return found[0], found.end()
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
            self.done = not self._closing
        if letter < " ":
            return json.dumps(letter)[1:-1], at + 1
        return letter, at + 1

    def _outside(self, text: str, at: int) -> tuple[str, int]:
        letter = text[at]
        if self._scalar and letter in ",}]" + _SPACE:
            self.done = True
            return "", at
        if not self._began and letter in _SPACE:
            return "", at + 1
        first, self._began = not self._began, True
        if letter == '"' and not self._scalar:
            self._in_string = True
        elif letter in _CLOSING and not self._scalar:
            self._closing.append(_CLOSING[letter])
        elif self._closing and letter == self._closing[-1]:
            self._closing.pop()
            self.done = not self._closing
        elif not self._closing and (letter.isalnum() or letter in "-+.") and letter.isascii():
            self._scalar = self._scalar or first
        elif self._closing and (found := _TOKENS.match(text, at)):
            return found[0], found.end()
        else:
            self.broken = True
            return "", at
        return letter, at + 1


class _Expect(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallObject:
    """`{"name": …, "arguments": {…}}`, or with `parameters`; further keys are ignored.

    known   a call must have the name of an offered tool, else the object is no call
    done    the object has ended, and its call is complete
    broken  it is no JSON, or no call; if the call has begun, it is incomplete

    Arguments that come before the name wait for it.
    """

    def __init__(self, out: CallWriter, *, known: bool = False) -> None:
        self.done = self.broken = self.begun = False
        self.read = ""
        self._out = out
        self._known = known
        self._expect = _Expect.OBJECT
        self._value: JsonText | None = None
        self._text = self._key = ""
        self._name: str | None = None
        self._held: str | None = None
        self._streams = False

    def feed(self, text: str) -> int:
        """Read on; how many characters belong to the object. `read` has them until it begins."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            before = at
            at = self._step(text, at)
            if not self.begun:
                self.read += text[before:at]
                self.broken |= len(self.read) > MAX_HELD
        return at

    def _step(self, text: str, at: int) -> int:
        if self._value is not None:
            return self._in_value(self._value, text, at)
        letter = text[at]
        if letter in _SPACE:
            return at + 1
        expect = self._expect
        if expect is _Expect.OBJECT and letter == "{":
            self._expect = _Expect.KEY
        elif expect is _Expect.COLON and letter == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA and letter == ",":
            self._expect = _Expect.KEY
        elif expect is _Expect.COMMA and letter == "}":
            self._close()
        elif (expect is _Expect.KEY and letter == '"') or expect is _Expect.VALUE:
            self._begin_value(letter)
            return at
        else:
            self.broken = True
            return at
        return at + 1

    def _begin_value(self, letter: str) -> None:
        self._value, self._text = JsonText(), ""
        is_arguments = self._expect is _Expect.VALUE and self._is_arguments
        self._streams = is_arguments and self._name is not None and letter == "{"
        if self._streams and not self.begun and self._accepts():
            self._out.begin(self._name or "")
            self.begun = True

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self.begun and self._held is None

    def _accepts(self) -> bool:
        name = self._name or ""
        if name in self._out.offered.by_name if self._known else self._out.is_name(name):
            return True
        self.broken = True
        return False

    def _in_value(self, value: JsonText, text: str, at: int) -> int:
        if self.broken:
            return at
        piece, at = value.feed(text, at)
        if self._streams:
            self._out.arguments(piece)
        else:
            self._text += piece
        self.broken = value.broken
        if value.done:
            self._end_value()
        return at

    def _end_value(self) -> None:
        self._value = None
        if self._expect is _Expect.KEY:
            self._key = str(_decoded(self._text))
            self._expect = _Expect.COLON
            self.broken = self._known and self._name is None and self._key not in _KEYS
            return
        self._expect = _Expect.COMMA
        if self._streams:
            self._streams = False
        elif self._key == "name" and self._name is None:
            name = _decoded(self._text)
            self._name = name if isinstance(name, str) else ""
            self.broken = self._known and self._name not in self._out.offered.by_name
        elif self._is_arguments:
            self._held = _held_arguments(self._text)

    def _close(self) -> None:
        if not self.begun:
            if not self._accepts():
                return
            self._out.begin(self._name or "")
            self._out.arguments(self._held or "")
            self.begun = True
        self.done = True


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _held_arguments(text: str) -> str:
    """Arguments that are no object: a text with an object in it is that object, null is none."""
    value = _decoded(text)
    if value is None:
        return "{}"
    inner = _decoded(value) if isinstance(value, str) else None
    return str(value) if isinstance(inner, dict) else text


class ObjectParser(MarkerParser):
    """Of formats whose calls are JSON objects. `_object` is the one that is being read."""

    def __init__(self, offered: OfferedTools) -> None:
        super().__init__(offered)
        self._object: CallObject | None = None
        self._behind: Callable[[], bool] = self._text

    def _read_object(self, behind: Callable[[], bool], *, known: bool = False) -> bool:
        """Read an object from here; `behind` is the state after it."""
        self._object, self._behind = CallObject(self._out, known=known), behind
        self._state = self._in_object
        return True

    def _in_object(self) -> bool:
        assert self._object is not None
        self._rest = self._rest[self._object.feed(self._rest) :]
        if self._object.broken and not self._object.begun:
            read, self._object = self._object.read, None
            return self._broken(read)
        if self._object.broken or self._object.done:
            self._out.end()
            self._object, self._state, self._marker = None, self._behind, ""
            return True
        return False

    def _cut_short(self) -> None:
        """An object without a call so far is text."""
        if self._object is not None and not self._object.begun:
            self._out.text(self._marker + self._object.read)
