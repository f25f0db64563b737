"""Arguments that a format writes one by one, as text: their types come from the tool's schema.

The arguments become one JSON object, written as it comes: texts piece by piece, other values whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from kvtide.server.tools.marker_parser import CallWriter, beginning, first_marker

_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
_ANY = frozenset[str]().union(*_TYPES.values())
_JSON = frozenset({"json"})
"""Of a value that the format itself declares to be JSON."""
_MAX_DEPTH = 8


def schema_types(schema: Mapping[str, object], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema admits; all where it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(str(name) for name in named)
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset().union(*(_TYPES.get(type(value), _ANY) for value in values))
    inner = [s for key in ("anyOf", "oneOf") for s in _listed(schema.get(key))]
    if inner and depth < _MAX_DEPTH:
        return frozenset().union(*(schema_types(s, depth + 1) for s in inner))
    return _ANY


def _listed(value: object) -> Iterator[Mapping[str, object]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, Mapping))


def typed(text: str, types: frozenset[str]) -> object:
    """The value that a text stands for: JSON of one of the types, else the text itself."""
    if types == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        folded = text.strip().lower()
        literals = {"true": True, "false": False, "none": None, "null": None}
        if folded not in literals:
            return text
        value = literals[folded]
    if isinstance(value, float) and not math.isfinite(value):
        return text
    if types == _JSON:
        return value
    if isinstance(value, str) and types == _ANY:
        return text  # Quotes around a text whose type is unknown may belong to it.
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value) if "number" not in types else value
    return value if _TYPES[type(value)] & types else text


def _no_number(constant: str) -> NoReturn:
    raise ValueError(constant)


class ArgumentWriter:
    """Writes the arguments of the open call: `begin`, `read` until a value's end, and `close`.

    own_lines  a value stands on lines of its own: one line break before its end is not part of it
    """

    def __init__(self, out: CallWriter, *, own_lines: bool = False) -> None:
        assert out.open is not None
        self._out, self._own_lines = out, own_lines
        self._break = ""
        self._tool = out.offered.by_name.get(out.open)
        self._types = _ANY
        self._held = ""
        self._first = True
        self.in_value = False

    def begin(self, name: str, *, text: bool | None = None) -> None:
        """An argument; `text` says whether it is one where the format does."""
        schema = {} if self._tool is None else self._tool.property_schema(name)
        self._types = schema_types(schema)
        if text is not None:
            self._types = frozenset({"string"}) if text else _JSON
        self._out.arguments(("{" if self._first else ", ") + _json(name) + ": ")
        if self._is_text:
            self._out.arguments('"')
        self._first, self._held, self._break, self.in_value = False, "", "", True

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def read(self, text: str, ends: Sequence[str], *, final: bool) -> tuple[str, str | None]:
        """A value up to the first of its `ends`: what is left of the text, and which end it begins
        with; None where the value goes on. Unless it is `final`, what may become an end is left."""
        found = first_marker(text, ends)
        if found is None:
            certain = len(text) - (0 if final else beginning(text, ends))
            self._piece(text[:certain])
            return text[certain:], None
        at, end = found
        self._piece(text[:at])
        self._end()
        return text[at:], end

    def _piece(self, text: str) -> None:
        text = self._break + text
        if self._own_lines:
            self._break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._is_text:
            self._out.arguments(_json(text)[1:-1])
        else:
            self._held += text

    def _end(self) -> None:
        if self._is_text:
            self._out.arguments('"')
        else:
            self._out.arguments(_json(typed(self._held.strip(), self._types)))
        self.in_value = False

    def close(self) -> None:
        """All arguments have come. A value that is cut short leaves the object open."""
        if not self.in_value:
            self._out.arguments("{}" if self._first else "}")
        self._out.end()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
