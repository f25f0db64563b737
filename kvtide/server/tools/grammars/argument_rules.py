"""Rules of arguments that a format writes one by one, in the order of the schema.

What a parser of the format reads of an argument is a value that the schema admits. A schema that
this cannot hold is refused if its tool is strict; else the value is any of the argument's types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.engine import RequestError
from kvtide.engine.grammar.grammar_rules import ANY_TEXT, json_rule, quoted, without
from kvtide.server.tools.grammars.lark_rules import LarkRules, any_of, word
from kvtide.server.tools.schemas.alternatives import Conjunction, Schema, UnenforceableError
from kvtide.server.tools.schemas.argument_forms import ArgumentForm
from kvtide.server.tools.schemas.text_values import mixed_value, plain_text
from kvtide.server.tools.schemas.tool_schema import ToolSchema
from kvtide.server.tools.schemas.value_types import types_of
from kvtide.server.tools.tool_spec import FunctionTool


class WriteHead(Protocol):
    """The expression before a value; `as_text` is what the format itself says of the value."""

    def __call__(self, name: str, *, as_text: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ArgumentSyntax:
    """How a format writes an argument: head, value, end.

    end       the marker that ends a value
    ends      all markers that end one for the parser
    after     the expression behind the end
    readable  whether the parser reads an argument's name as it is
    declared  the head says whether the value is a text
    """

    head: WriteHead
    end: str
    ends: tuple[str, ...]
    after: str
    readable: Callable[[str], bool]
    declared: bool = False


class ArgumentRules:
    """The rules of one tool's arguments."""

    def __init__(self, tool: FunctionTool, rules: LarkRules) -> None:
        self.schema = ToolSchema(tool)
        self._tool, self._rules = tool, rules

    def forms(self) -> list[ArgumentForm]:
        try:
            return self.schema.forms
        except UnenforceableError as flaw:
            self.refuse("", flaw)
            return [self.schema.plain]

    def refuse(self, name: str, flaw: UnenforceableError) -> None:
        """Raise if the tool is strict."""
        if self._tool.strict:
            raise unenforceable(self._tool, name, str(flaw))

    def one_by_one(self, syntax: ArgumentSyntax) -> str:
        """The arguments of a call."""
        found = (self._arguments(form, syntax) for form in self.forms())
        return self.any_form([" ".join(form) for form in found if form is not None])

    def any_form(self, forms: Sequence[str]) -> str:
        """Any of the forms that can be written."""
        if not forms:
            self.refuse("", UnenforceableError("no arguments can be written that satisfy it"))
        return any_of(f"({form})" if form else quoted("") for form in dict.fromkeys(forms or [""]))

    def _arguments(self, form: ArgumentForm, syntax: ArgumentSyntax) -> list[str] | None:
        """The arguments of a form; None where one that it requires has no value."""
        found = []
        for name, schemas in form.arguments.items():
            written = self._written(name, schemas, syntax)
            if written is not None:
                found.append(f"({written})" if name in form.required else f"({written})?")
            elif name in form.required:
                return None
        return found

    def _written(
        self, name: str, schemas: tuple[object, ...], syntax: ArgumentSyntax
    ) -> str | None:
        """Head, value and end; None where no value can be written."""
        if not self.is_readable(name, syntax.readable):
            return None
        try:
            values = self._values(name, schemas, syntax)
        except UnenforceableError as flaw:
            self.refuse(name, flaw)
            values = self._any_values(name, syntax)
        after = f" {syntax.after}" if syntax.after else ""
        return any_of(f"{value}{after}" for value in values) or None

    def is_readable(self, name: str, readable: Callable[[str], bool]) -> bool:
        """Whether the parser reads a name as it is. Refuses a strict tool if it does not."""
        if not readable(name):
            self.refuse(name, UnenforceableError("a name that this model's form cannot write"))
        return readable(name)

    def _values(self, name: str, schemas: tuple[object, ...], syntax: ArgumentSyntax) -> list[str]:
        """The value in all ways that there are."""
        alternatives = self.schema.alternatives(schemas)
        types, admitted = self.schema.types(name), types_of(alternatives)
        text, as_json = self._parts(alternatives, types, admitted, syntax)
        found = []
        if text is not None and (limited := self._limited(text, syntax)) is not None:
            found.append(
                f"{syntax.head(name, as_text=True)} {self._rules.until(limited, syntax.end)}"
            )
        limits = None if as_json == admitted else as_json
        if as_json and (value := self.json(name, schemas, limits)) is not None:
            head = syntax.head(name, as_text=False)
            found.append(f"{head} {value} {self._rules.marker(syntax.end)}")
        return found

    def _limited(self, text: str, syntax: ArgumentSyntax) -> str | None:
        """The texts of a terminal without what ends a value; None if there are none."""
        limited = f"({text}) & {without(syntax.ends)}"
        is_plain = text == ANY_TEXT or self._rules.satisfiable(f'({limited}) "."')
        return limited if is_plain else None

    def _parts(
        self,
        alternatives: Sequence[Conjunction],
        types: frozenset[str],
        admitted: frozenset[str],
        syntax: ArgumentSyntax,
    ) -> tuple[str | None, frozenset[str]]:
        """The texts of a value, and the types that are written as JSON."""
        if syntax.declared or types == {"string"}:
            text = plain_text(alternatives, syntax.ends) if "string" in admitted else None
            return text, admitted - {"string"}
        if "string" not in types:
            return None, admitted
        value = mixed_value(alternatives, types, syntax.ends)
        return value.text, value.json

    def _any_values(self, name: str, syntax: ArgumentSyntax) -> list[str]:
        """Of a schema that is not enforced: a text, or JSON of the argument's types."""
        types = self.schema.types(name)
        if "string" in types:
            text = self._rules.until(f"{ANY_TEXT} & {without(syntax.ends)}", syntax.end)
            return [f"{syntax.head(name, as_text=True)} {text}"]
        value = self._json(name, {"type": sorted(types)})
        return [f"{syntax.head(name, as_text=False)} {value} {self._rules.marker(syntax.end)}"]

    def json(
        self, name: str, schemas: tuple[object, ...], types: frozenset[str] | None = None
    ) -> str | None:
        """A value as JSON, of some types alone if they are given; None if there is none."""
        limits = () if types is None else ({"type": sorted(types)},)
        try:
            schema = self.schema.root.standalone(*(schemas or (True,)), *limits)
            combined = len(schemas) + len(limits) > 1  # One schema alone has been compiled before.
            rule = json_rule(schema, {}, strict=self._tool.strict) if combined else ""
            if combined and not self._rules.satisfiable(rule):
                return None
        except UnenforceableError as flaw:
            self.refuse(name, flaw)
            schema = {"type": sorted(self.schema.types(name))}
        return self._json(name, schema)

    def rule(self, name: str, body: str) -> str:
        """A rule of this tool."""
        return self._rules.add(f"{name}_{word(self._tool.name)}", body)

    def _json(self, name: str, schema: Schema) -> str:
        rule = f"arg_{word(self._tool.name)}_{word(name)}"
        return self._rules.json(rule, schema, strict=self._tool.strict)


def unenforceable(tool: FunctionTool, argument: str, reason: str) -> RequestError:
    """The refusal of a strict tool."""
    named = f"the argument {argument!r:.60}" if argument else "the parameters"
    return RequestError(
        f"{named} of {tool.name} cannot be enforced: {reason}; simplify the schema, or leave "
        "strict out",
        param="tools",
    )
