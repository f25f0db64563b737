"""PromQL as far as dashboards and rules need it: which series an expression reads, and by what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

FUNCTIONS = {"rate", "increase", "histogram_quantile", "sum", "avg", "max", "min", "count"}
OVER_COUNTERS = {"rate", "increase"}
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool"}
_TOKEN = re.compile(
    r"""\s+|(?P<word>[a-zA-Z_:][\w:]*)|(?P<text>"[^"]*")|(?P<number>\d+(?:\.\d+)?[smhdw]?)"""
    r"""|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/<>=(){}\[\],])"""
)


class PromQLError(ValueError):
    """An expression that Prometheus would refuse, or that this reader does not know."""


@dataclass(frozen=True)
class Selector:
    """A series by name: `matchers` are (label, operator, value); `inside` the functions around."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    inside: tuple[str, ...] = ()


@dataclass
class Expression:
    selectors: list[Selector] = field(default_factory=list)
    grouped_by: list[str] = field(default_factory=list)


def parse(text: str) -> Expression:
    reader = _Reader(list(_tokens(text)))
    reader.read()
    return reader.found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise PromQLError(f"not PromQL from here on: {text[at:]!r}")
        at = token.end()
        if token.lastgroup is not None:
            yield token.lastgroup, token[0]


class _Reader:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.found = Expression()
        self._tokens = [*tokens, ("end", "")]
        self._at = 0
        self._open: list[str] = []

    def read(self) -> None:
        while self._kind != "end":
            kind, token = self._tokens[self._at]
            self._at += 1
            if kind == "word":
                self._word(token)
            elif token == "(":
                self._open.append("")
            elif token == ")":
                if not self._open:
                    raise PromQLError("a parenthesis is closed that was not opened")
                self._open.pop()
            elif token == "[":
                if self._kind != "number":
                    raise PromQLError("a range without a duration")
                self._at += 1
                self._expect("]")
        if self._open:
            raise PromQLError("a parenthesis is not closed")

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _next(self) -> str:
        return self._tokens[self._at][1]

    def _expect(self, token: str) -> None:
        if self._next != token:
            raise PromQLError(f"{token!r} expected, got {self._next!r}")
        self._at += 1

    def _word(self, word: str) -> None:
        if word in GROUPINGS:
            if self._next == "(":
                self.found.grouped_by += self._labels()
        elif word in OPERATORS:
            pass
        elif word in FUNCTIONS:
            if self._next in GROUPINGS:
                self._at += 1
                self.found.grouped_by += self._labels()
            self._expect("(")
            self._open.append(word)
        elif self._next == "(":
            raise PromQLError(f"there is no function {word!r} here")
        else:
            matchers = tuple(self._matchers()) if self._next == "{" else ()
            inside = tuple(filter(None, self._open))
            self.found.selectors.append(Selector(word, matchers, inside))

    def _labels(self) -> list[str]:
        self._expect("(")
        labels = []
        while self._next != ")":
            labels.append(self._next)
            self._at += 1
            if self._next == ",":
                self._at += 1
        self._at += 1
        return labels

    def _matchers(self) -> Iterator[tuple[str, str, str]]:
        self._expect("{")
        while self._next != "}":
            label, operator, value = (token for _, token in self._tokens[self._at : self._at + 3])
            if operator not in ("=", "=~", "!=", "!~") or not value.startswith('"'):
                raise PromQLError(f"no matcher: {label}{operator}{value}")
            yield label, operator, value.strip('"')
            self._at += 3
            if self._next == ",":
                self._at += 1
        self._at += 1
