"""Tools whose schemas explode: served or refused, in bounded time and memory, in every format."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from kvtide.engine import RequestError
from kvtide.server.tools.parser_registry import FORMATS
from kvtide.server.tools.tool_spec import FunctionTool, ToolRequest
from tests.grids import everything
from tests.server.tools.strict_models import QUICK, REQUIRED, TEXT, Schema, argument, model

MANY = [f"value {n * 7919 % 100003}" for n in range(10_000)]


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def levels(depth: int, level: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    named = {f"d{n}": level(n, {"$ref": f"#/$defs/d{n + 1}"}) for n in range(depth)}
    return {"$defs": {**named, f"d{depth}": {}}}


def either(number: int, further: Schema) -> Schema:
    """Twice the alternatives of the next level."""
    two = [{"type": "object", "properties": {f"{letter}{number}": {}}} for letter in "ab"]
    return {"allOf": [{"anyOf": two}, further]}


EXPLODING: dict[str, Schema] = {
    "10,000 enums": argument({"enum": MANY}),
    "enums that match": argument({"enum": MANY, "pattern": "9"}),
    "deep": nested(31),
    "doubling forms": {**levels(22, either), "$ref": "#/$defs/d0"},
    "doubling allOf": argument(
        {"$ref": "#/$defs/d0"}, **levels(30, lambda _, further: {"allOf": [further, further]})
    ),
    "doubling anyOf": argument(
        {"$ref": "#/$defs/d0"}, **levels(30, lambda _, further: {"anyOf": [further, further]})
    ),
    "2,000 optional": {"type": "object", "properties": {str(n): {} for n in range(2000)}},
    "200 forms": {
        "type": "object",
        "properties": {f"p{n}": TEXT for n in range(200)},
        "anyOf": [{"required": [f"p{n}"]} for n in range(200)],
    },
    "forms that combine limits": {
        "type": "object",
        "properties": {f"p{n}": {**TEXT, "pattern": f"^[a-z]{{{n + 1}}}"} for n in range(20)},
        "anyOf": [
            {"required": [f"p{n}"], "additionalProperties": {"maxLength": 200 + n}}
            for n in range(20)
        ],
    },
    "300 patterns": argument(
        {"anyOf": [{**TEXT, "pattern": f"^{each}.*x"} for each in MANY[:300]]}
    ),
    "long pattern": argument({**TEXT, "pattern": "|".join(MANY)}),
    "counted pattern": argument({**TEXT, "pattern": "^((a|b){1,1000}){1,1000}$"}),
    "exponential pattern": argument({**TEXT, "pattern": "^(a|b)*a(a|b){25}$"}),
    "nested pattern": argument({**TEXT, "pattern": "(" * 1000 + "a" + ")" * 1000}),
    "long text": argument({**TEXT, "minLength": 10**6, "maxLength": 10**9}),
    "too large": {"type": "object", "properties": {str(n): TEXT for n in range(10_000)}},
}

SLOW = ("2,000 optional", "200 forms", "forms that combine limits", "long pattern")
"""Those that take seconds."""


@pytest.mark.quick(kind=[k for k in EXPLODING if k not in SLOW])
@pytest.mark.parametrize("name", FORMATS if everything() else QUICK)
@pytest.mark.parametrize("kind", EXPLODING)
def test_a_schema_that_explodes_takes_bounded_time_and_memory(kind: str, name: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refusals: list[RequestError] = []
    for strict in (True, False):
        tools = (FunctionTool("f", "", EXPLODING[kind], strict=strict),)
        try:
            assert model(name).grammars.compiled(ToolRequest(tools, REQUIRED), "", None)
        except RequestError as refusal:
            refusals.append(refusal)
    for each in refusals:
        assert each.param == "tools" and len(str(each)) < 300 and "; " in str(each)
    took_s = time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took_s < 20 and grown < 300_000, f"{took_s:.1f} s, {grown} KB"


@pytest.mark.parametrize("name", QUICK)
def test_many_tools_that_explode_are_refused_before_they_are_compiled(name: str) -> None:
    schema = {**levels(22, either), "$ref": "#/$defs/d0"}
    tools = tuple(FunctionTool(f"f{n}", "", schema) for n in range(512))
    started = time.process_time()
    with pytest.raises(RequestError, match="the schemas of these tools are") as caught:
        model(name).grammars.compiled(ToolRequest(tools, REQUIRED), "", None)
    assert caught.value.param == "tools" and time.process_time() - started < 5
