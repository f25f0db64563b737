"""How benchmarks show progress: their callers say where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

ShowProgress = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Passes items on, so many in all, under a label."""


def quietly(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    return iter(items)
