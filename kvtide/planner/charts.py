"""Charts on disk: a PNG, and an HTML page that needs nothing but itself.

A chart is a `chart_data.Curve`; `html_page` draws the page, and this module the PNG. A file
appears under its name whole or not at all.
"""

from __future__ import annotations

import importlib
import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtide.planner.chart_data import (
    GRID,
    INK,
    LIGHT,
    QUIET,
    Curve,
    Mark,
    late,
    linear_ticks,
    number,
    spread,
    x_ticks,
    y_range,
)
from kvtide.planner.html_page import HtmlTable, html_page


class ChartError(RuntimeError):
    """A chart that cannot be rendered or written here. The message names the remedy."""


# -- files ----------------------------------------------------------------------------------


def png(curve: Curve) -> bytes:
    """The chart rendered with matplotlib."""
    figure = check_png().Figure(figsize=(9.2, 5.2), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.2)
    _draw(figure.add_subplot(), curve)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def check_png() -> Any:
    """Refuse where `png` would: the module that draws, if it is installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ChartError(
            "a PNG needs matplotlib, which is not installed; pip install 'kvtide[plot]'"
        ) from None


def html(
    curve: Curve, parameters: Mapping[str, str] | None = None, tables: Sequence[HtmlTable] = ()
) -> bytes:
    """The page: the chart, its numbers and the parameters that made them."""
    return html_page(curve, parameters or {}, tables).encode(errors="replace")


def write(files: Mapping[Path, bytes]) -> None:
    """Write every file beside its place, then rename them all: before that, nothing appears."""
    beside: dict[Path, Path] = {}
    target = Path()
    try:
        try:
            for target, data in files.items():
                beside[target] = target.parent / f".{target.name}.{os.getpid()}.tmp"
                beside[target].write_bytes(data)
            for target, written in beside.items():
                os.replace(written, target)
        finally:
            for written in beside.values():
                written.unlink(missing_ok=True)
    except OSError as failure:
        raise ChartError(
            f"cannot write {target}: {failure.strerror}; name a file in a folder you can write to"
        ) from failure


# -- PNG ------------------------------------------------------------------------------------


def _draw(axes: Any, curve: Curve) -> None:
    if curve.x_log:
        axes.set_xscale("log")
    for i, series in enumerate(curve.series):
        style = "-" if i < len(LIGHT) else "--"
        axes.plot(series.x, series.y, style, color=_colour(i), lw=2, marker="o", markersize=4.5)
    _dress(axes, curve)
    _label_ends(axes, curve)
    for mark in curve.marks:
        _mark(axes, mark, late(curve, mark))


def _colour(i: int) -> str:
    return LIGHT[i % len(LIGHT)]


def _dress(axes: Any, curve: Curve) -> None:
    """Title, labels, ticks and grid. Nothing is parsed as mathematics: a `$` is a `$`."""
    y_low, y_high = y_range(curve)
    ticks, y_ticks = x_ticks(curve), linear_ticks(y_low, y_high)
    axes.set_xticks(ticks, [number(t) for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(y_ticks, [number(t) for t in y_ticks])
    axes.set_ylim(y_low, y_high + 0.02 * (y_high - y_low))
    title = axes.set_title(textwrap.fill(curve.title, 76), loc="left", pad=14, parse_math=False)
    title.set(color=INK, fontsize=13, fontweight="bold")
    axes.set_xlabel(curve.x_label, color=QUIET, labelpad=8, parse_math=False)
    axes.set_ylabel(curve.y_label, color=QUIET, labelpad=8, parse_math=False)
    axes.tick_params(colors=QUIET, length=0, pad=6)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=QUIET)


def _label_ends(axes: Any, curve: Curve) -> None:
    low, high = axes.get_ylim()
    ends = [series.y[-1] for series in curve.series]
    heights = spread(ends, 0.055 * (high - low), low, high)
    right = axes.get_yaxis_transform()
    for i, (series, height) in enumerate(zip(curve.series, heights, strict=True)):
        label = axes.text(1.01, height, series.name, transform=right, parse_math=False)
        label.set(va="center", color=_colour(i), fontweight="bold")


def _mark(axes: Any, mark: Mark, left: bool) -> None:
    axes.axvline(mark.x, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    foot = axes.get_xaxis_transform()
    text = axes.annotate(
        mark.text, (mark.x, 0.02), (-6 if left else 6, 0), foot, "offset points", parse_math=False
    )
    text.set(color=QUIET, fontsize=9, ha="right" if left else "left")
