"""Grammars of calls, composed of rules in llguidance's dialect of Lark.

A format writes the expression of its calls, from the end of its first marker on. `LarkRules` knows
which markers are special tokens of the model: a grammar names those by id, since they are no text.
Arguments are JSON of the tool's schema. A strict tool's schema is enforced wholly or refused; what
cannot be enforced of another's is left to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

from kvtide.engine import RequestError
from kvtide.engine.grammar.grammar import Grammar
from kvtide.server.tools.tool_spec import FunctionTool
from kvtide.server.tools.typed_arguments import schema_types

MAX_PARALLEL_CALLS = 16
"""Calls of one answer under a grammar: a model that repeats itself would call without end."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it."""
_OPEN = frozenset({"anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties"})
"""Keywords beside which a schema's own properties are not all there are."""
TEXT = r"/(.|\n)*/"


class LarkRules:
    """Rules of one grammar, by name; `special` has the ids of markers that are special tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = dict(special)
        self._rules: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar."""
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        return "\n".join(lines) + "\n"

    def add(self, name: str, body: str) -> str:
        """A rule; returns how others refer to it."""
        while self._rules.get(name, body) != body:
            name = f"{name}_{len(self._rules)}"
        self._rules[name] = body
        return name.partition("[")[0]

    def marker(self, text: str) -> str:
        """A text in which special tokens may occur."""
        return " ".join(self._spelled(part) for part in self._parts(text))

    def text_until(self, marker: str) -> str:
        """Any text up to the first such marker, which is included."""
        first, *rest = self._parts(marker)
        if first in self._special:
            return f"{TEXT} {self.marker(marker)}"
        if rest:  # Text that ends as the marker begins; a special token cannot be a part of it.
            ending = re.sub(r"([^\w\s])", r"\\\1", first).replace("\n", r"\n")
            return f"/(.|\\n)*{ending}/ {' '.join(map(self._spelled, rest))}"
        word = f"until_{marker.encode().hex()}"
        return self.add(f"{word}[lazy]", f"{TEXT} {quoted(marker)}")

    def _spelled(self, part: str) -> str:
        token = self._special.get(part)
        return quoted(part) if token is None else f"<[{token}]>"

    def _parts(self, text: str) -> list[str]:
        """The text, cut around special tokens."""
        if not self._special:
            return [text]
        pattern = "|".join(re.escape(special) for special in self._special)
        return [part for part in re.split(f"({pattern})", text) if part]

    def json(self, name: str, schema: Mapping[str, object], *, strict: bool) -> str:
        options = {**_LAYOUT, "lenient": not strict, "coerce_one_of": True}
        body = json.dumps({**schema, "x-guidance": options})
        return self.add(name, f"%json {body}")

    def embedded(self, content: Grammar) -> str:
        """What an answer's text must be."""
        if content.kind == "json_schema":
            return self.json("content", json.loads(content.text), strict=True)
        if content.kind == "regex":
            return self.add("content", "/" + content.text.replace("/", r"\/") + "/")
        found = re.fullmatch(r"start: ([A-Z]+)\n\1: (.*)\n?", content.text)
        if found is None:
            raise RequestError(
                "tools and this form of output exclude each other; leave one of them out",
                "unsupported_parameter",
                "tools",
            )
        return self.add("CONTENT", found[2])

    def arguments(self, tool: FunctionTool) -> str:
        """The arguments of a tool, as one JSON object."""
        closed = {} if _OPEN & tool.parameters.keys() else {"additionalProperties": False}
        schema = {"type": "object", **closed, **tool.parameters}
        return self.json(f"args_{word(tool.name)}", schema, strict=tool.strict)

    def parameters(
        self, tool: FunctionTool, begin: Callable[[str], str], end: str, after: str = ""
    ) -> str:
        """The arguments one by one, in the schema's order: `begin(name)`, value, `end`, `after`.

        begin  the expression before a value
        end    the marker that ends it
        """
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        parts = []
        for name in properties if isinstance(properties, Mapping) else {}:
            value = self._parameter(tool, name, end)
            needed = isinstance(required, list) and name in required
            parts.append(f"({begin(name)} {value} {after})" + ("" if needed else "?"))
        return " ".join(parts)

    def _parameter(self, tool: FunctionTool, name: str, end: str) -> str:
        schema = tool.property_schema(name)
        values = schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return f"({any_of(quoted(value) for value in values)}) {self.marker(end)}"
        if "string" in schema_types(schema):
            return self.text_until(end)
        shared = {k: v for k, v in tool.parameters.items() if k in ("$defs", "definitions")}
        rule = f"arg_{word(tool.name)}_{word(name)}"
        value = self.json(rule, {**shared, **schema}, strict=tool.strict)
        return f"{value} {self.marker(end)}"


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def any_of(alternatives: Iterable[str]) -> str:
    return " | ".join(alternatives)


def repeated(first: str, further: str, *, parallel: bool) -> str:
    """One call, or up to the most that an answer may have."""
    return f"{first} ({further}){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else first


def json_call(tool: FunctionTool, rules: LarkRules, key: str = "arguments") -> str:
    """A call as one JSON object."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{quoted(head)} {rules.arguments(tool)} {quoted('}')}"


def word(name: str) -> str:
    """A part of a rule's name: rules of different tools must differ."""
    plain = name.lower().isascii() and name.replace("_", "").isalnum() and name == name.lower()
    return name if plain else "x" + name.encode().hex()
