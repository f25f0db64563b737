"""Texts that a schema admits, as they stand between markers: terminals of a grammar.

Where a schema admits texts alone, the text is the value. Else its parser strips the space around
it, and what is JSON of another admitted type is that value. So texts that would be read as another
value than the one they are valid as are left out, and arrays and objects are written as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.engine.grammar.grammar_rules import (
    ANY_TEXT,
    pattern_rule,
    regex_rule,
    texts_rule,
)
from kvtide.server.tools.schemas.alternatives import Conjunction, Schema, UnenforceableError
from kvtide.server.tools.schemas.search_pattern import searched
from kvtide.server.tools.schemas.text_formats import TEXT_FORMATS
from kvtide.server.tools.schemas.value_types import (
    ANY_TYPE,
    NUMBERS,
    TYPES,
    admits,
    admitted_types,
    free_types,
    listed_values,
    types_of,
)

SPACE = r"[\s\x1c-\x1f]"
"""What Python strips."""
_TRIMMED = r"/([^\s\x1c-\x1f]((.|\n)*[^\s\x1c-\x1f])?)?/"
_STRUCTURED = frozenset({"array", "object"})
_BEGINNINGS = {"array": r"\[", "object": r"\{", **dict.fromkeys(NUMBERS, "[0-9-]")}
"""How JSON of a type begins."""
_WORDS = {"boolean": "true|false", "null": "null|none"}
_LITERALS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """text  a terminal's expression of what is written as it is; None for nothing
    json  the types that are written as JSON
    """

    text: str | None
    json: frozenset[str]


def plain_text(alternatives: Sequence[Conjunction], ends: Sequence[str]) -> str | None:
    """The texts that are valid and have none of the `ends` in them; None if there are none."""
    found = [
        text
        for schemas in alternatives
        if "string" in admitted_types(schemas) and (text := _text(schemas, ends)) is not None
    ]
    return ANY_TEXT if ANY_TEXT in found else _either(found)


def mixed_value(
    alternatives: Sequence[Conjunction], types: frozenset[str], ends: Sequence[str]
) -> WrittenValue:
    """A value that its parser reads as one of these types, of which text is one.

    A parser that knows no type takes brackets for a text up to the first end, which JSON may have
    in its texts: so arrays and objects are then written only where any text is valid.
    """
    free, is_known = free_types(alternatives), types != ANY_TYPE
    doubtful = types - free if "string" in free else types
    begun = (doubtful & NUMBERS) | ((types if is_known else doubtful) & _STRUCTURED)
    if not doubtful and not begun:
        return WrittenValue(ANY_TEXT, frozenset())
    terms = [f"({text})"] if (text := plain_text(alternatives, ends)) is not None else []
    beginnings = {_BEGINNINGS[kind] for kind in begun}
    if "string" not in free:
        terms.append(_TRIMMED)
        beginnings |= {'"'} if is_known else set()
    if beginnings:
        terms.append(rf"~/{SPACE}*({'|'.join(sorted(beginnings))})(.|\n)*/")
    for kind in sorted(doubtful & _WORDS.keys()):
        terms.append(f"~/{SPACE}*(?i:{_WORDS[kind]}){SPACE}*/")
    words = [
        word for word, value in _LITERALS.items() if _is_written(value, doubtful, alternatives)
    ]
    either = [*([" & ".join(terms)] if text is not None else [])]
    either += [texts_rule(words)] if words else []
    as_json = begun if is_known else begun & NUMBERS
    return WrittenValue(_either(either), as_json & types_of(alternatives))


def _is_written(
    value: object, doubtful: frozenset[str], alternatives: Sequence[Conjunction]
) -> bool:
    """Whether a word of JSON stands beside the texts."""
    named = bool(TYPES[type(value)] & doubtful)
    return named and any(admits(schemas, value) for schemas in alternatives)


def _either(expressions: Sequence[str]) -> str | None:
    return " | ".join(f"({each})" for each in dict.fromkeys(expressions)) or None


def _text(schemas: Conjunction, ends: Sequence[str]) -> str | None:
    """The texts for which all of these schemas hold."""
    terms = [term for schema in schemas for term in _constraints(schema)]
    lists = [values for schema in schemas if (values := listed_values(schema)) is not None]
    if lists:
        common = set.intersection(*({v for v in each if isinstance(v, str)} for each in lists))
        texts = [v for v in lists[0] if isinstance(v, str) and v in common]
        texts = [text for text in dict.fromkeys(texts) if not any(end in text for end in ends)]
        if not texts:
            return None
        terms.insert(0, f"({texts_rule(texts)})")
    return " & ".join(terms) or ANY_TEXT


def _constraints(schema: Schema) -> list[str]:
    terms = []
    if isinstance(pattern := schema.get("pattern"), str):
        terms.append(pattern_rule(searched(pattern)))
    least, most = (_length(schema.get(key)) for key in ("minLength", "maxLength"))
    if least is not None or most is not None:
        terms.append(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/")
    if isinstance(name := schema.get("format"), str):
        if name not in TEXT_FORMATS:
            raise UnenforceableError(f"the format {name!r:.40} of a text without quotes")
        terms.append(regex_rule(TEXT_FORMATS[name]))
    return terms


def _length(value: object) -> int | None:
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and isinstance(value, int | float) else None
