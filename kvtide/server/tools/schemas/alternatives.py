"""A schema as alternatives: lists of schemas that hold at once, without `$ref` and `allOf`.

`anyOf` and `oneOf` are alternatives. Those of a `oneOf` are taken to exclude each other: a strict
tool's schema is compiled as JSON first, which refuses others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
Conjunction = tuple[Schema, ...]
"""Schemas that hold at once; none of them hold for any value."""

MAX_ALTERNATIVES = 1024
MAX_STEPS = 10_000
"""Schemas that are looked at for one tool: references can double the work at every level."""
_MAX_DEPTH = 100
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_INDEX = re.compile(r"[0-9]{1,6}")
_BASES = ("$id", "$schema")
"""Keywords that would change what a reference refers to."""
_VERBATIM = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""


class UnenforceableError(ValueError):
    """A schema that this server cannot enforce; the message says why."""


class CircularReferenceError(UnenforceableError):
    """A schema that is itself, whatever it is."""


class RootSchema:
    """A whole schema, into which `$ref` points."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._steps = 0
        self._known: dict[tuple[int, ...], list[Conjunction]] = {}

    def alternatives(self, *schemas: object) -> list[Conjunction]:
        """What it means that all of these parts of the root hold; nothing satisfies them where
        there are no alternatives."""
        known = tuple(map(id, schemas))
        if known not in self._known:
            found: list[Conjunction] = [()]
            for schema in schemas:
                found = _both(found, self._expanded(schema, (), 0))
            self._known[known] = found
        return self._known[known]

    def _expanded(self, schema: object, within: tuple[str, ...], depth: int) -> list[Conjunction]:
        """`within`: the references that lead here."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise UnenforceableError(f"it has more than {MAX_STEPS} parts with all references")
        if depth > _MAX_DEPTH:
            raise UnenforceableError("its references and alternatives are nested too deeply")
        if isinstance(schema, bool):
            return [()] if schema else []
        if not isinstance(schema, Mapping):
            raise UnenforceableError(f"a part of it is no schema but {schema!r:.60}")
        plain = {key: value for key, value in schema.items() if key not in _COMBINING}
        found: list[Conjunction] = [(plain,)] if plain else [()]
        if (pointer := schema.get("$ref")) is not None:
            found = _both(found, self._referred(pointer, within, depth + 1))
        for each in _listed(schema, "allOf"):
            found = _both(found, self._expanded(each, within, depth + 1))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                listed = _listed(schema, key)
                either = (self._expanded(each, within, depth + 1) for each in listed)
                found = _both(found, [*chain.from_iterable(either)])
        return found

    def _referred(self, pointer: object, within: tuple[str, ...], depth: int) -> list[Conjunction]:
        if pointer in within:
            raise CircularReferenceError(f"{pointer} refers to itself")
        return self._expanded(self.target(pointer), (*within, str(pointer)), depth)

    def target(self, pointer: object) -> object:
        """What a `$ref` points to."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise UnenforceableError(f"$ref {pointer!r:.80} is no pointer into the schema")
        found: Any = self.root
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
                found = found[int(key)]
            else:
                raise UnenforceableError(f"$ref {pointer!r:.80} points to nothing")
        return found

    def standalone(self, *schemas: object) -> Schema:
        """One schema that says that all of these hold, with the parts of the root it refers to."""
        names: dict[str, str] = {}
        whole = [_moved(schema, names) for schema in schemas]
        moved: dict[str, object] = {}
        while missing := [pointer for pointer in names if names[pointer] not in moved]:
            for pointer in missing:
                moved[names[pointer]] = _moved(self.target(pointer), names)
        alone = whole[0] if len(whole) == 1 else {"allOf": whole}
        if not isinstance(alone, Mapping):
            alone = {"allOf": [alone]}
        return {**alone, "$defs": moved} if moved else alone


def _both(left: list[Conjunction], right: list[Conjunction]) -> list[Conjunction]:
    if len(left) * len(right) > MAX_ALTERNATIVES:
        raise UnenforceableError(f"it has more than {MAX_ALTERNATIVES} alternatives")
    return [(*first, *second) for first in left for second in right]


def _listed(schema: Schema, key: str) -> Iterator[object]:
    value = schema.get(key)
    if value is not None and not isinstance(value, list):
        raise UnenforceableError(f"{key} is no list")
    yield from value or ()


def _moved(schema: object, names: dict[str, str]) -> object:
    """The schema with references to `$defs` of these names, by what they pointed to."""
    if isinstance(schema, list):
        return [_moved(each, names) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, object] = {}
    for key, value in schema.items():
        if key in _BASES and isinstance(value, str):
            continue
        if key == "$ref" and isinstance(value, str):
            moved[key] = f"#/$defs/{names.setdefault(value, f'r{len(names)}')}"
        elif key in _NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, names) for name, each in value.items()}
        else:
            moved[key] = value if key in _VERBATIM else _moved(value, names)
    return moved
