"""Which arguments a call of a tool may have, for formats that write them one by one.

`anyOf` of a whole schema, as "a or b is required", is a form each. Arguments without a schema of
their own are never written unless they are required.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtide.server.tools.schemas.alternatives import (
    Conjunction,
    RootSchema,
    Schema,
    UnenforceableError,
)
from kvtide.server.tools.schemas.value_types import admitted_types, listed_values


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """Arguments by name, in the schema's order: the schemas that hold for each at once."""

    arguments: Mapping[str, tuple[object, ...]]
    required: frozenset[str]


def argument_forms(root: RootSchema) -> list[ArgumentForm]:
    """The forms of a call; raises `UnenforceableError` for what is none."""
    objects = [found for found in root.alternatives(root.root) if "object" in admitted_types(found)]
    forms = [form for schemas in objects if (form := _form(schemas)) is not None]
    if not forms:
        raise UnenforceableError("no arguments satisfy it")
    return forms


def plain_form(parameters: Schema) -> ArgumentForm:
    """The arguments that a schema names itself, whatever else it says."""
    named = parameters.get("properties")
    properties: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
    arguments = {name: (schema,) for name, schema in properties.items()}
    return ArgumentForm(arguments, _required([parameters]) & properties.keys())


def _form(schemas: Conjunction) -> ArgumentForm | None:
    """None where nothing satisfies all of these schemas."""
    for schema in schemas:
        if listed_values(schema) is not None or "patternProperties" in schema:
            raise UnenforceableError("enum, const or patternProperties of all arguments together")
    required = _required(schemas)
    names = [name for schema in schemas for name in _named(schema, "properties")]
    arguments: dict[str, tuple[object, ...]] = {}
    for name in dict.fromkeys([*names, *sorted(required)]):
        found = tuple(_schema_of(name, schema) for schema in schemas)
        if not any(each is False for each in found):
            arguments[name] = tuple(each for each in found if each is not True)
    if not required <= arguments.keys() or not _counts(schemas, required, len(arguments)):
        return None
    return ArgumentForm(arguments, required)


def _required(schemas: Iterable[Schema]) -> frozenset[str]:
    lists = (schema.get("required") for schema in schemas)
    return frozenset(
        name
        for listed in lists
        if isinstance(listed, list)
        for name in listed
        if isinstance(name, str)
    )


def _schema_of(name: str, schema: Schema) -> object:
    """What one object's schema says of the argument of this name."""
    properties = _named(schema, "properties")
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _named(schema: Schema, keyword: str) -> Mapping[str, object]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _counts(schemas: Conjunction, required: frozenset[str], known: int) -> bool:
    """Whether any choice of the arguments has a count that is allowed; False if none has."""
    least = max((_count(schema, "minProperties", 0) for schema in schemas), default=0)
    most = min((_count(schema, "maxProperties", known) for schema in schemas), default=known)
    if least > known or most < len(required):
        return False
    if least > len(required) or most < known:
        raise UnenforceableError("minProperties or maxProperties of all arguments together")
    return True


def _count(schema: Schema, keyword: str, default: int) -> int:
    value = schema.get(keyword)
    return value if type(value) is int else default
