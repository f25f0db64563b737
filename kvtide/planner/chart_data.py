"""Charts as data: series, axes, ticks and label positions.

A `Curve` is a whole chart; `html_page` draws it as SVG, `charts` as PNG, from the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

LIGHT = ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#0891b2")
INK, QUIET, GRID = "#18181b", "#71717a", "#e4e4e7"
"""The colours of the series, and of text, secondary text and lines, on a light ground."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.x, f"series {self.name}: no points"
        assert len(self.x) == len(self.y), f"series {self.name}: {len(self.x)} x, {len(self.y)} y"
        assert list(self.x) == sorted(set(self.x)), f"series {self.name}: x must ascend"
        assert all(map(math.isfinite, self.x + self.y)), f"series {self.name}: not finite"

    def readings(self) -> dict[float, str]:
        """The y values as text, by x, with the same decimals for all."""
        whole = all(y == int(y) for y in self.y)
        digits = 0 if whole else min(6, _decimals(max(map(abs, self.y))))
        return {x: f"{y:,.{digits}f}" for x, y in zip(self.x, self.y, strict=True)}


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis worth a word, such as the knee."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A whole chart. The y axis begins at 0 unless a value lies below."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = False
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        assert self.series, f"chart {self.title!r}: no series"
        positive = all(x > 0 for x in [*self.all_x(), *(mark.x for mark in self.marks)])
        assert positive or not self.x_log, f"chart {self.title!r}: a log axis needs x above 0"

    def all_x(self) -> list[float]:
        """Every x of any series, once, ascending."""
        return sorted({x for series in self.series for x in series.x})


# -- axes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """Values `low` to `high`, laid out over pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        fraction = (self._scaled(value) - low) / (high - low)
        return self.start + fraction * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value


def linear_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values at even steps of 1, 2 or 5 times a power of ten, from low to high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 in every decade, or powers of ten where those would crowd."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 5 else (1,)
    values = (m * 10.0**d for d in decades for m in steps)
    return [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]


def x_ticks(curve: Curve) -> list[float]:
    """Log ticks where the axis is one and they are enough to read it by.

    Things that are counted have no ticks between their numbers.
    """
    low, high = x_range(curve)
    ticks = log_ticks(low, high) if curve.x_log else []
    counted = high - low >= 1 and all(x == int(x) for x in curve.all_x())
    about = min(6, int(high - low)) if counted else 6
    return ticks if len(ticks) > 1 else linear_ticks(low, high, about)


def x_range(curve: Curve) -> tuple[float, float]:
    xs = [*curve.all_x(), *(mark.x for mark in curve.marks)]
    low, high = min(xs), max(xs)
    if not _flat(low, high):
        return low, high
    return (low / 2, high * 2) if curve.x_log else (low - 1, high + 1)


def y_range(curve: Curve) -> tuple[float, float]:
    ys = [y for series in curve.series for y in series.y]
    low, high = min(0.0, *ys), max(0.0, *ys)
    if _flat(low, high):
        return low, low + 1
    step = linear_ticks(low, high)
    gap = step[1] - step[0] if len(step) > 1 else high - low
    return math.floor(low / gap) * gap, math.ceil(high / gap - 1e-9) * gap


def _flat(low: float, high: float) -> bool:
    """Whether values lie too close together to put ticks between them."""
    return high - low <= max(1e-100, 1e-12 * max(abs(low), abs(high)))


def number(value: float) -> str:
    """Four significant digits or the whole part, thousands apart: 0.1235, 12.5, 16,384."""
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.3g}"
    text = f"{value:,.{_decimals(value)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimals(value: float) -> int:
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart, within low to high if they fit.

    Labels that would overlap form a run, and a run is centred on what its labels want.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    runs: list[list[float]] = []
    for rank, i in enumerate(order):
        runs.append([wanted[i] - rank * gap])
        while len(runs) > 1 and fmean(runs[-2]) >= fmean(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
    settled = [fmean(run) for run in runs for _ in run]
    last = max(low, high - gap * (len(wanted) - 1))
    placed = [0.0] * len(wanted)
    for rank, (i, position) in enumerate(zip(order, settled, strict=True)):
        placed[i] = min(max(position, low), last) + rank * gap
    return placed


def late(curve: Curve, mark: Mark) -> bool:
    """Whether a mark stands in the right half, so that its text goes to its left."""
    return Axis(*x_range(curve), 0, 1, curve.x_log).place(mark.x) > 0.5
