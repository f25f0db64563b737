"""Grammars of calls, composed of rules in llguidance's dialect of Lark.

A format writes the expression of its calls, from the end of its first marker on. `LarkRules` knows
which markers are special tokens of the model: a grammar names those by id, since they are no text.
A text that spells such a marker reads like it, so free text has the spelling of none.

Arguments are JSON of the tool's schema. A strict tool's schema is enforced wholly or refused; what
cannot be enforced of another's is left to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtide.engine.grammar.grammar import Grammar
from kvtide.engine.grammar.grammar_rules import (
    ANY_TEXT,
    TEMPLATE_LAYOUT,
    content_rule,
    json_rule,
    quoted,
    without,
)
from kvtide.server.tools.schemas.text_values import SPACE
from kvtide.server.tools.tool_spec import FunctionTool

MAX_PARALLEL_CALLS = 16
"""Calls of one answer under a grammar: a model that repeats itself would call without end."""
_OPEN = frozenset({"anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties"})
"""Keywords beside which a schema's own properties are not all there are."""


def always(rule: str) -> bool:
    """Every rule is taken to match some text."""
    return True


class LarkRules:
    """Rules of one grammar, by name.

    special      the ids of markers that are special tokens
    satisfiable  whether some text matches a terminal or a rule of JSON; may raise
                 `UnenforceableError`
    """

    def __init__(
        self, special: Mapping[str, int], satisfiable: Callable[[str], bool] = always
    ) -> None:
        self._special = dict(special)
        self.satisfiable = satisfiable
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def text(self, start: str) -> str:
        """The whole grammar."""
        lines = [f"start: {start}", *(f"{name}{body}" for name, body in self._rules.items())]
        return "\n".join(lines) + "\n"

    def add(self, name: str, body: str, attributes: str = "") -> str:
        """A rule, or a terminal if the name is in capitals; returns how others refer to it."""
        known = f"{name.isupper()} {attributes} {body}"
        if known not in self._names:
            while name in self._rules:
                name = f"{name}_{len(self._rules)}"
            self._rules[name] = f"{attributes}: {body}"
            self._names[known] = name
        return self._names[known]

    def marker(self, text: str) -> str:
        """A text in which special tokens may occur."""
        return " ".join(self._spelled(part) for part in self._parts(text))

    def free_text(self, markers: Sequence[str], opening: str = "") -> str:
        """Any text without these markers that does not begin as `opening`, an expression, does."""
        return self.add("TEXT", _free(markers, opening))

    def text_until(self, marker: str, besides: Sequence[str] = (), opening: str = "") -> str:
        """Such a text up to the first marker, which is included."""
        return self.until(_free((marker, *besides), opening), marker)

    def until(self, expression: str, marker: str) -> str:
        """Texts of a terminal's expression, which have no marker in them, and the marker."""
        first, *rest = self._parts(marker)
        if first in self._special:
            return f"{self.add('TEXT', expression)} {self.marker(marker)}"
        if rest:  # Text that ends as the marker begins; a special token cannot be a part of it.
            begun = self.add("TEXT", f"({expression}) {quoted(first)}")
            return f"{begun} {' '.join(map(self._spelled, rest))}"
        return self.add("until", f"({expression}) {quoted(marker)}", "[lazy]")

    def _spelled(self, part: str) -> str:
        token = self._special.get(part)
        return quoted(part) if token is None else f"<[{token}]>"

    def _parts(self, text: str) -> list[str]:
        """The text, cut around special tokens."""
        if not self._special:
            return [text] if text else []
        pattern = "|".join(re.escape(special) for special in self._special)
        return [part for part in re.split(f"({pattern})", text) if part]

    def json(self, name: str, schema: Mapping[str, object], *, strict: bool) -> str:
        return self.add(name, json_rule(schema, TEMPLATE_LAYOUT, strict=strict))

    def content(self, content: Grammar, markers: Sequence[str] = (), opening: str = "") -> str:
        """What an answer's text must be. Without quotes it has none of these markers in it."""
        name, body = content_rule(content)
        if name.isupper() and (markers or opening):
            body = f"({body}) & {_free(markers, opening)}"
        return self.add(name, body)

    def arguments(self, tool: FunctionTool) -> str:
        """The arguments of a tool, as one JSON object."""
        return self.json(f"args_{word(tool.name)}", arguments_schema(tool), strict=tool.strict)


def arguments_schema(tool: FunctionTool) -> dict[str, object]:
    """The schema of a call's arguments: those that the tool names, where it does not say more."""
    closed = {} if _OPEN & tool.parameters.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **tool.parameters}


def _free(markers: Sequence[str], opening: str) -> str:
    terms = [without(markers)] if markers else []
    terms += [rf"~/{SPACE}*({opening})(.|\n)*/"] if opening else []
    return " & ".join([ANY_TEXT, *terms])


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
