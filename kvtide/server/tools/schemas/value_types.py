"""Which JSON types a value may have, and which of them its schema constrains further."""

from __future__ import annotations

from collections.abc import Iterable

from kvtide.server.tools.schemas.alternatives import Conjunction, Schema

NUMBERS = frozenset({"integer", "number"})
TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: NUMBERS,
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
"""The types that admit a value of Python's."""
ANY_TYPE = frozenset[str]().union(*TYPES.values())
_STRING_KEYWORDS = frozenset({"minLength", "maxLength", "pattern", "format"})
_NUMBER_KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_ARRAY_KEYWORDS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"})
_OBJECT_KEYWORDS = frozenset(
    {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames"),
    }
)
_CONSTRAINING = (
    (_STRING_KEYWORDS, frozenset({"string"})),
    (_NUMBER_KEYWORDS, NUMBERS),
    (_ARRAY_KEYWORDS, frozenset({"array"})),
    (_OBJECT_KEYWORDS, frozenset({"object"})),
)


def types_of(alternatives: Iterable[Conjunction]) -> frozenset[str]:
    """The types that some of these alternatives admit."""
    return frozenset[str]().union(*map(admitted_types, alternatives))


def admitted_types(schemas: Conjunction) -> frozenset[str]:
    """The types that all of these schemas admit."""
    return ANY_TYPE.intersection(*map(_admitted, schemas))


def free_types(alternatives: Iterable[Conjunction]) -> frozenset[str]:
    """The types of which every value is valid."""
    return frozenset[str]().union(*map(_free, alternatives))


def admits(schemas: Conjunction, value: object) -> bool:
    """Whether a value without parts is valid, as far as types and enumerations say."""
    return all(
        TYPES[type(value)] & declared_types(schema)
        and (listed_values(schema) is None or is_listed(value, schema))
        for schema in schemas
    )


def listed_values(schema: Schema) -> list[object] | None:
    """The values of `const` or `enum`; None where a schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def is_listed(value: object, schema: Schema) -> bool:
    """In JSON true is not 1."""
    listed = listed_values(schema) or []
    return any(type(each) is type(value) and each == value for each in listed)


def _admitted(schema: Schema) -> frozenset[str]:
    values = listed_values(schema)
    if values is None:
        return declared_types(schema)
    return declared_types(schema) & frozenset[str]().union(*map(_types_of_value, values))


def _types_of_value(value: object) -> frozenset[str]:
    if isinstance(value, float) and value.is_integer():
        return NUMBERS
    return TYPES.get(type(value), ANY_TYPE)


def declared_types(schema: Schema) -> frozenset[str]:
    """All where the schema names no types, or names that are none."""
    named = schema.get("type")
    names = frozenset(map(str, named if isinstance(named, list) else [named]))
    if named is None or not names <= ANY_TYPE:
        return ANY_TYPE
    return names | NUMBERS if "number" in names else names


def _free(schemas: Conjunction) -> frozenset[str]:
    free = admitted_types(schemas)
    for schema in schemas:
        if listed_values(schema) is not None:
            return frozenset()
        for keywords, types in _CONSTRAINING:
            if keywords & schema.keys():
                free -= types
    return free
