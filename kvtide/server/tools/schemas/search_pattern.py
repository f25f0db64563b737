"""A schema's `pattern`, which is searched for anywhere, as an expression of the whole text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvtide.server.tools.schemas.alternatives import UnenforceableError

_ANYTHING = r"(?:.|\n)*"
_LOOKS = re.compile(r"\\[bBAzZ<>]")
_GROUP = re.compile(r"\((?:\?:)?(?!\?)")
_MAX_DEPTH = 20


def searched(pattern: str, depth: int = 0) -> str:
    """`^` and `$` may stand at the ends of the pattern, and of its alternatives."""
    by_anchors: dict[tuple[str, str], list[str]] = {}
    for alternative in _alternatives(pattern):
        before, inner, after = _anchored(alternative, depth)
        by_anchors.setdefault((before, after), []).append(inner)
    whole = (f"{a}(?:{'|'.join(inner)}){b}" for (a, b), inner in by_anchors.items())
    return "|".join(whole)


def _anchored(pattern: str, depth: int) -> tuple[str, str, str]:
    """One alternative, and what may stand before and after it. A group around all of it is opened:
    its alternatives may have anchors."""
    group = _GROUP.match(pattern)
    if group and depth < _MAX_DEPTH and _closing(pattern) == len(pattern) - 1:
        return "", searched(pattern[group.end() : -1], depth + 1), ""
    begins, ends = pattern.startswith("^"), _ends(pattern)
    inner = pattern[begins : len(pattern) - ends]
    for letter, _ in _outside_classes(inner):
        if letter in "^$" or _LOOKS.match(letter):
            raise UnenforceableError(f"{letter} inside of the pattern {pattern!r:.80}")
    return "" if begins else _ANYTHING, inner, "" if ends else _ANYTHING


def _ends(pattern: str) -> bool:
    """Whether it ends with an anchor."""
    last = [*_outside_classes(pattern)][-1:]
    return bool(last) and last[0] == ("$", len(pattern) - 1)


def _alternatives(pattern: str) -> Iterator[str]:
    begin = depth = 0
    for letter, at in _outside_classes(pattern):
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            yield pattern[begin:at]
            begin = at + 1
    yield pattern[begin:]


def _closing(pattern: str) -> int:
    """Where the group that begins the pattern ends."""
    depth = 0
    for letter, at in _outside_classes(pattern):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at
    return -1


def _outside_classes(pattern: str) -> Iterator[tuple[str, int]]:
    """The letters and escapes outside of classes, each with its place."""
    at = depth = 0
    while at < len(pattern):
        step = 2 if pattern[at] == "\\" else 1
        letter = pattern[at : at + step]
        if depth == 0 and letter != "[":
            yield letter, at
        depth += (letter == "[") - (letter == "]" and depth > 0)
        if letter == "[":
            step += 1 if pattern[at + 1 : at + 2] == "^" else 0
            step += 1 if pattern[at + step : at + step + 1] == "]" else 0
        at += step
