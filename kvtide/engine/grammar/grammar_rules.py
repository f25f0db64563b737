"""What grammars are compiled from: rules of llguidance's dialect of Lark.

A JSON schema, a regular expression or a list of texts means the same as a whole answer and as a
part of a larger grammar: both are written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from llguidance import regex_to_lark

from kvtide.engine.grammar.grammar import Grammar

ANY_TEXT = r"/(.|\n)*/"
WHITESPACE = r"[ \t\n\r]{1,20}"
"""Between the tokens of JSON. A model that repeats itself would write it without end."""
ANY_LAYOUT = {"whitespace_pattern": WHITESPACE}
TEMPLATE_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON as chat templates write it."""
_DIGITS, _DIGITS_AND_WORDS = "d", "dw"
"""`\\d` has ten digits: all others are rarely meant. In a schema's pattern `\\w` is ASCII too."""
_ESCAPES = 'nrbtf\\"'


def content_rule(grammar: Grammar) -> tuple[str, str]:
    """The name and the body of the rule that an answer of this grammar is. Raises ValueError with
    the reason for what is no schema or no expression."""
    if grammar.kind == "json_schema":
        return "content", json_rule(_schema(grammar.text), ANY_LAYOUT)
    if grammar.kind == "regex":
        return "CONTENT", regex_rule(grammar.text)
    assert grammar.kind == "choice", "a whole grammar is no rule"
    return "CONTENT", texts_rule(json.loads(grammar.text))


def json_rule(
    schema: Mapping[str, object], layout: Mapping[str, object], *, strict: bool = True
) -> str:
    """JSON of a schema. Without `strict`, what cannot be enforced is left to the model.

    Names of properties may be anything where an object is open, so an escaped letter could spell a
    name whose value has a schema: then `\\u` is no escape.
    """
    if strict and (flaw := _unheld(schema)) is not None:
        raise ValueError(flaw)
    open_names = any(_is_open(each) and each.get("properties") for each in _objects(schema))
    options = {
        **layout,
        "lenient": not strict,
        "coerce_one_of": not strict,
        "json_allowed_escapes": _ESCAPES if open_names else _ESCAPES + "u",
    }
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def regex_rule(expression: str) -> str:
    """The texts that match the whole expression; a terminal may combine it with others."""
    return f"/{regex_to_lark(expression, _DIGITS)}/"


def pattern_rule(expression: str) -> str:
    """The same of an expression that comes from a schema's pattern."""
    return f"/{regex_to_lark(expression, _DIGITS_AND_WORDS)}/"


def texts_rule(texts: Iterable[str]) -> str:
    """One of these texts. As a terminal, all of them are one regular expression."""
    return " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def without(texts: Iterable[str]) -> str:
    """A terminal's expression of texts that have none of these in them."""
    return rf"~/(.|\n)*({'|'.join(map(literal, texts))})(.|\n)*/"


def literal(text: str) -> str:
    """The regular expression of one text, as rules write it."""
    return re.sub(r"[][\\/.+*?(){}|^$-]", r"\\\g<0>", text).replace("\n", r"\n")


def _schema(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as flaw:
        raise ValueError(f"it is not JSON ({flaw})") from None
    if not isinstance(schema, dict):
        raise ValueError("it is not a JSON object")
    return schema


# -- what llguidance takes and does not hold --------------------------------------------------


def _objects(schema: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """All objects of a schema: its subschemas are among them."""
    level: list[object] = [schema]
    while level:
        yield from (each for each in level if isinstance(each, Mapping))
        level = [inner for outer in level for inner in _inner(outer)]


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _is_open(schema: Mapping[str, object]) -> bool:
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _unheld(schema: Mapping[str, object]) -> str | None:
    """Names that occur twice are counted twice, so a lower bound may be missed."""
    for each in _objects(schema):
        least, required = each.get("minProperties"), each.get("required")
        named = len(required) if isinstance(required, list) else 0
        if type(least) is int and least - named > 1 and _is_open(each):
            return f"minProperties is {least} where names may be anything"
    return None
