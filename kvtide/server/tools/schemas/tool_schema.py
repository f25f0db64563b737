"""The arguments of one tool: what its grammar writes and what its parser reads of them."""

from __future__ import annotations

from functools import cached_property

from kvtide.server.tools.schemas.alternatives import Conjunction, RootSchema, UnenforceableError
from kvtide.server.tools.schemas.argument_forms import ArgumentForm, argument_forms, plain_form
from kvtide.server.tools.schemas.value_types import ANY_TYPE, types_of
from kvtide.server.tools.tool_spec import FunctionTool


class ToolSchema:
    """Parser and grammar of a request each have their own: it belongs to one thread."""

    def __init__(self, tool: FunctionTool) -> None:
        self.tool = tool
        self.root = RootSchema(tool.parameters)
        self._types: dict[str, frozenset[str]] = {}

    @cached_property
    def forms(self) -> list[ArgumentForm]:
        """Raises `UnenforceableError`."""
        return argument_forms(self.root)

    @cached_property
    def plain(self) -> ArgumentForm:
        """The arguments that the schema names itself."""
        return plain_form(self.tool.parameters)

    def alternatives(self, schemas: tuple[object, ...]) -> list[Conjunction]:
        """What a value is for which all of these hold."""
        return self.root.alternatives(*schemas)

    def types(self, name: str) -> frozenset[str]:
        """The types that an argument may have; all where the schema does not say."""
        if name not in self._types:
            self._types[name] = self._found_types(name) or ANY_TYPE
        return self._types[name]

    def _found_types(self, name: str) -> frozenset[str]:
        try:
            return self._types_in(self.forms, name)
        except UnenforceableError:
            pass
        try:
            return self._types_in([self.plain], name)
        except UnenforceableError:
            return ANY_TYPE

    def _types_in(self, forms: list[ArgumentForm], name: str) -> frozenset[str]:
        named = [form.arguments[name] for form in forms if name in form.arguments]
        return frozenset[str]().union(*(types_of(self.alternatives(each)) for each in named))
