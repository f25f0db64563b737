"""The format that a body asks of its output: `response_format`, or `regex` or `choice`.

Also reads `logit_bias`, which asks for single tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvtide.engine import RequestError
from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_compiler import GrammarCompiler, GrammarError
from kvtide.engine.sampling.sampling_params import MAX_BIAS

FORMATS = ("response_format", "regex", "choice")
"""Fields that say what the output may be; a body has one of them at the most."""
_FIELDS = {"json_schema": "response_format", "regex": "regex", "choice": "choice"}
"""The fields by the kind of their grammar."""
MAX_CHOICE_TEXTS = 10_000
MAX_BIASED_TOKENS = 1024
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')


def output_grammar(body: Mapping[str, object]) -> Grammar | None:
    """The grammar of the output; None where it is any text."""
    readers = {"response_format": _response_format, "regex": _regex, "choice": _choice}
    found = {
        name: grammar
        for name, read in readers.items()
        if (value := body.get(name)) is not None and (grammar := read(value)) is not None
    }
    if len(found) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} exclude each other; send one of them", param=[*found][-1])
    return next(iter(found.values()), None)


def compiled_format(body: Mapping[str, object], compiler: GrammarCompiler) -> Grammar | None:
    """The same, compiled by itself: it is refused in the same words whatever stands around it."""
    grammar = output_grammar(body)
    if grammar is not None:
        try:
            compiler.compile(grammar)
        except GrammarError as flaw:
            raise RequestError(str(flaw), flaw.code, _FIELDS[grammar.kind]) from None
    return grammar


def _response_format(value: object) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema" and isinstance(value, dict):
        return _json_schema(value.get("json_schema"))
    raise RequestError(
        f"response_format has the type {kind!r:.60}, which is not supported; send an object with a "
        "type of text, json_object or json_schema",
        param="response_format",
    )


def _json_schema(value: object) -> Grammar:
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format has no schema; send it as an object in json_schema.schema",
            param="response_format",
        )
    try:
        return Grammar("json_schema", json.dumps(schema))
    except RecursionError:
        raise RequestError(
            "the JSON schema is nested too deeply; use $ref", param="response_format"
        ) from None


def _regex(value: object) -> Grammar:
    if not isinstance(value, str) or not value:
        raise RequestError("regex is no text; send a regular expression", param="regex")
    return Grammar("regex", value)


def _choice(value: object) -> Grammar:
    texts = value if isinstance(value, list) else []
    if not 0 < len(texts) <= MAX_CHOICE_TEXTS or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(
            f"choice is no list of 1 to {MAX_CHOICE_TEXTS} texts that are not empty; send one",
            param="choice",
        )
    return Grammar("choice", json.dumps(texts))


def logit_bias(body: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    """Tokens and what is added to their logits: an object of numbers by token id."""
    value = body.get("logit_bias")
    given = {} if value is None else value
    if not isinstance(given, dict) or len(given) > MAX_BIASED_TOKENS:
        raise _no_bias()
    return tuple(sorted((_token(key), _bias(bias)) for key, bias in given.items()))


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise _no_bias()
    return int(key)


def _bias(value: object) -> float:
    if not isinstance(value, int | float) or type(value) is bool or abs(value) > MAX_BIAS:
        raise _no_bias()
    return float(value)


def _no_bias() -> RequestError:
    return RequestError(
        f"logit_bias is no object of up to {MAX_BIASED_TOKENS} numbers from -{MAX_BIAS} to "
        f'{MAX_BIAS} by token id; send {{"token id": bias}}',
        param="logit_bias",
    )
