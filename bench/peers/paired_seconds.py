"""Seconds by what was measured, a figure for each turn: as cells of a table."""

from __future__ import annotations

import statistics

Seconds = dict[str, list[float]]


def median(seconds: Seconds, name: str) -> str:
    return f"{statistics.median(seconds[name]):.2f}"


def ratio(seconds: Seconds, above: str, below: str) -> str:
    """The median of the turns' ratios."""
    pairs = zip(seconds[above], seconds[below], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}×"
