"""Arguments that a format writes one by one, as text: their types come from the tool's schema.

The arguments become one JSON object, written as it comes: texts piece by piece, other values whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn

from kvtide.server.tools.call_json import JsonText
from kvtide.server.tools.marker_parser import CallWriter, beginning, first_marker
from kvtide.server.tools.schemas.value_types import ANY_TYPE, TYPES

TEXT = frozenset({"string"})
DECLARED_JSON = frozenset({"json"})
"""Of a value that the format itself declares to be JSON."""
_BRACKETS = {"[": "array", "{": "object"}
_LITERALS = {"true": (True, "true"), "false": (False, "false"), "none": (None, "null")}
_MAX_DIGITS = 400
"""Of whole numbers that are looked at for their type."""


def value_json(text: str, types: frozenset[str]) -> str:
    """The value that a text stands for, as JSON: it is JSON of one of the types, else a text."""
    if types == TEXT:
        return _json(text)
    try:
        value, as_json = DECODER.decode(text), spaced(text)
    except (ValueError, RecursionError):
        folded = text.strip().lower()
        value, as_json = _LITERALS.get("none" if folded == "null" else folded, (text, ""))
        if not as_json:
            return _json(text)
    if types == DECLARED_JSON:
        return as_json
    if isinstance(value, str) and types == ANY_TYPE:
        return _json(text)  # Quotes around a text whose type is unknown may belong to it.
    if isinstance(value, float) and value.is_integer() and types & TYPES[int] == {"integer"}:
        return str(int(value))
    return as_json if TYPES[type(value)] & types else _json(text)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)


DECODER = json.JSONDecoder(
    parse_constant=_no_number, parse_int=lambda digits: int(digits[:_MAX_DIGITS])
)
"""What JSON says; a large number is some number of its type."""


def spaced(text: str) -> str:
    """JSON with its usual spaces, unless Python has no room for one of its numbers."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return text


class ArgumentWriter:
    """Writes the arguments of the open call: `begin`, `read` until a value's end, and `close`.

    An end within a text of JSON is a part of it. Where that JSON never becomes complete, the value
    ended there after all.

    own_lines  a value stands on lines of its own: one line break before its end is not part of it
    """

    def __init__(self, out: CallWriter, *, own_lines: bool = False) -> None:
        assert out.open is not None
        self._out, self._own_lines = out, own_lines
        self._break = ""
        self._tool = out.offered.by_name.get(out.open)
        self._types = ANY_TYPE
        self._held = ""
        self._brackets: JsonText | None = None
        self._passed: tuple[int, int] | None = None
        self._first = True
        self.in_value = False

    def begin(self, name: str, *, text: bool | None = None) -> None:
        """An argument; `text` says whether it is one where the format does."""
        self._types = ANY_TYPE if self._tool is None else self._tool.types(name)
        if text is not None:
            self._types = TEXT if text else DECLARED_JSON
        self._out.arguments(("{" if self._first else ", ") + _json(name) + ": ")
        if self._is_text:
            self._out.arguments('"')
        self._first, self._held, self._break, self.in_value = False, "", "", True
        self._brackets = self._passed = None

    @property
    def _is_text(self) -> bool:
        return self._types == TEXT

    def read(self, text: str, ends: Sequence[str], *, final: bool) -> tuple[str, str | None]:
        """A value up to the first of its `ends`: what is left of the text, and which end it begins
        with; None where the value goes on. Unless it is `final`, what may become an end is left."""
        while (found := first_marker(text, ends)) is not None:
            at, end = found
            self._piece(text[:at])
            if self._brackets is None or not self._brackets.in_text:
                self._end()
                return text[at:], end
            if self._passed is None:
                self._passed = len(self._held), len(self._held) + len(self._break)
            self._piece(end)
            text = text[at + len(end) :]
        certain = len(text) - (0 if final else beginning(text, ends))
        self._piece(text[:certain])
        if final and self._passed is not None:
            return self._back_to(self._passed, ends)
        return text[certain:], None

    def _back_to(self, passed: tuple[int, int], ends: Sequence[str]) -> tuple[str, str | None]:
        """The value ended where it passed the first of its ends."""
        value_end, at = passed
        rest = self._held[at:] + self._break
        self._held = self._held[:value_end]
        self._end()
        return rest, next(end for end in ends if rest.startswith(end))

    def _piece(self, text: str) -> None:
        text = self._break + text
        if self._own_lines:
            self._break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._is_text:
            self._out.arguments(_json(text)[1:-1])
            return
        begun = self._held.strip() != ""
        self._held += text
        if not begun and self._is_bracketed(self._held.lstrip()[:1]):
            self._brackets = JsonText()
        if self._brackets is not None:
            self._brackets.feed(text)

    def _is_bracketed(self, letter: str) -> bool:
        """Whether a value that begins so is JSON: a text of an unknown type need not be."""
        if self._types == DECLARED_JSON:
            return letter in _BRACKETS
        return self._types != ANY_TYPE and _BRACKETS.get(letter) in self._types

    def _end(self) -> None:
        if self._is_text:
            self._out.arguments('"')
        else:
            self._out.arguments(value_json(self._held.strip(), self._types))
        self.in_value = False

    def close(self) -> None:
        """All arguments have come. A value that is cut short leaves the object open."""
        if not self.in_value:
            self._out.arguments("{}" if self._first else "}")
        self._out.end()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
