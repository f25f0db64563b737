"""What a request asks of its output, as a value."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")
MAX_GRAMMAR_BYTES = 256 * 1024
"""Of a grammar's text: compilation takes time and memory in proportion."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The output is a text of this grammar.

    kind  json_schema (`text` is the schema as JSON), regex, choice (a list of texts as JSON), or
          lark (llguidance's dialect, where `%json {...}` embeds a schema and `<name>` is a special
          token)
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"no grammar is of kind {self.kind!r}; use {', '.join(GRAMMAR_KINDS)}")
