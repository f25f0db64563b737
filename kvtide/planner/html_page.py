"""The HTML page of a chart: SVG, tables and style in one document that loads nothing.

The page reacts to the pointer without a script, follows the reader's light or dark setting and
repeats every number of the chart in a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from kvtide.planner.chart_data import (
    GRID,
    INK,
    LIGHT,
    QUIET,
    Axis,
    Curve,
    Mark,
    Series,
    late,
    linear_ticks,
    number,
    spread,
    x_range,
    x_ticks,
    y_range,
)

_DARK = ("#60a5fa", "#fbbf24", "#34d399", "#e879f9", "#f87171", "#22d3ee")


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Numbers that stand beside a chart, as they are printed."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


# -- SVG ------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 960, 460
_GLYPH = 8.0  # a generous guess at the width of a character, since nothing here can measure it
_TOP, _BOTTOM = 20, 58


def svg(curve: Curve) -> str:
    """The chart as an <svg> element; its colours are the page's `--s0`, `--ink` and so on."""
    y = Axis(*y_range(curve), _HEIGHT - _BOTTOM, _TOP)
    left = 44 + _GLYPH * max(len(number(tick)) for tick in linear_ticks(y.low, y.high))
    right = 28 + _GLYPH * max(len(series.name) for series in curve.series)
    x = Axis(*x_range(curve), left, _WIDTH - min(right, _WIDTH / 3), curve.x_log)
    parts = [
        *_grid(curve, x, y),
        *(_mark_line(mark, late(curve, mark), x, y) for mark in curve.marks),
        *(_line(i, series, x, y) for i, series in enumerate(curve.series)),
        *_end_labels(curve, x, y),
        *_hover(curve, x, y),
    ]
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(curve.title)}">'
    return "\n".join([head, *parts, "</svg>"])


def _colour_class(i: int) -> str:
    return f"s{i % len(LIGHT)}"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _segment(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _grid(curve: Curve, x: Axis, y: Axis) -> Iterable[str]:
    for tick in linear_ticks(y.low, y.high):
        at = y.place(tick)
        yield _segment(x.start, at, x.end, at, "base" if tick == 0 else "grid")
        yield _text(x.start - 12, at + 4, number(tick), 'text-anchor="end"')
    for tick in x_ticks(curve):
        at = x.place(tick)
        yield _segment(at, y.start, at, y.end, "grid")
        yield _text(at, y.start + 22, number(tick), 'text-anchor="middle"')
    middle = (x.start + x.end) / 2
    yield _text(middle, _HEIGHT - 10, curve.x_label, 'text-anchor="middle"')
    middle = (y.start + y.end) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle:.1f})"'
    yield _text(18, middle, curve.y_label, turned)


def _mark_line(mark: Mark, left: bool, x: Axis, y: Axis) -> str:
    at = x.place(mark.x)
    anchor = 'text-anchor="end"' if left else ""
    words = _text(at + (-7 if left else 7), y.start - 9, mark.text, anchor)
    return _segment(at, y.start, at, y.end, "mark") + words


def _line(i: int, series: Series, x: Axis, y: Axis) -> str:
    points = [(x.place(a), y.place(b)) for a, b in zip(series.x, series.y, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in points)
    again = " again" if i >= len(LIGHT) else ""
    return f'<g class="series {_colour_class(i)}{again}"><polyline points="{path}"/>{dots}</g>'


def _end_labels(curve: Curve, x: Axis, y: Axis) -> Iterable[str]:
    ends = [y.place(series.y[-1]) for series in curve.series]
    heights = spread(ends, 18, y.end, y.start)
    for i, (series, height) in enumerate(zip(curve.series, heights, strict=True)):
        name = f'class="name {_colour_class(i)}"'
        yield _text(x.end + 12, height + 4, series.name, name)


def _hover(curve: Curve, x: Axis, y: Axis) -> Iterable[str]:
    """One invisible band per x value; pointing at it shows the values there."""
    xs = curve.all_x()
    middles = [(x.place(a) + x.place(b)) / 2 for a, b in pairwise(xs)]
    bands = pairwise([x.start, *middles, x.end])
    for value, (left, right) in zip(xs, bands, strict=True):
        band = f'<rect class="band" x="{left:.1f}" y="{y.end}" width="{right - left:.1f}" '
        band += f'height="{y.start - y.end}"/>'
        yield f'<g class="at">{band}<g class="show">{_reading(curve, value, x, y)}</g></g>'


def _reading(curve: Curve, value: float, x: Axis, y: Axis) -> str:
    """A guide at one x value, a dot on each series that has it, and a box with the numbers."""
    at = x.place(value)
    rows = [
        (i, series.name, series.y[series.x.index(value)], series.readings()[value])
        for i, series in enumerate(curve.series)
        if value in series.x
    ]
    dots = "".join(
        f'<circle class="{_colour_class(i)}" cx="{at:.1f}" cy="{y.place(height):.1f}" r="5"/>'
        for i, _, height, _ in rows
    )
    shown = [(i, name, text) for i, name, _, text in rows]
    return _segment(at, y.start, at, y.end, "guide") + dots + _tip(value, shown, at, y.end + 6)


def _tip(value: float, rows: Sequence[tuple[int, str, str]], at: float, top: float) -> str:
    width = 44 + _GLYPH * max(len(name) + len(text) for _, name, text in rows)
    left = at + 12 if at + 12 + width <= _WIDTH else at - 12 - width
    box = f'<rect class="tip" x="{left:.1f}" y="{top}" width="{width:.1f}" '
    box += f'height="{32 + 20 * len(rows)}" rx="8"/>'
    lines = [_text(left + 14, top + 21, number(value))]
    for row, (i, name, text) in enumerate(rows):
        level = top + 42 + 20 * row
        lines.append(_text(left + 14, level, name, f'class="name {_colour_class(i)}"'))
        end = 'class="value" text-anchor="end"'
        lines.append(_text(left + width - 14, level, text, end))
    return box + "".join(lines)


# -- the page -------------------------------------------------------------------------------


def html_page(curve: Curve, parameters: Mapping[str, str], tables: Sequence[HtmlTable] = ()) -> str:
    """A whole document that loads nothing: the chart, its numbers, what else was found."""
    title = escape(curve.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<figure>
{svg(curve)}
</figure>
{_tables(tables)}
{_numbers(curve)}
{_parameters(parameters)}
</main>
</body>
</html>
"""


def _numbers(curve: Curve) -> str:
    """Every point again, one row per x value; a dash where a series has none."""
    columns = [series.readings() for series in curve.series]
    rows = [[number(x), *(column.get(x, "–") for column in columns)] for x in curve.all_x()]
    header = [curve.x_label, *(series.name for series in curve.series)]
    return f"<section><h2>{escape(curve.y_label)}</h2>{_table(header, rows)}</section>"


def _tables(tables: Sequence[HtmlTable]) -> str:
    return "\n".join(
        f"<section><h2>{escape(table.title)}</h2>{_table(table.header, table.rows)}</section>"
        for table in tables
    )


def _parameters(parameters: Mapping[str, str]) -> str:
    if not parameters:
        return ""
    table = _table(["parameter", "value"], [list(item) for item in parameters.items()], "words")
    return f"<section><h2>Parameters</h2>{table}</section>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], name: str = "numbers") -> str:
    listed = [list(row) for row in rows]
    right = [all(_numeric(row[i]) for row in listed) for i in range(len(header))]
    head = _row("th", header, right)
    body = "\n".join(_row("td", row, right) for row in listed)
    return (
        f'<div class="scroll"><table class="{name}"><thead>{head}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(tag: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    """One row; columns of numbers stand flush right."""
    marks = [' class="n"' if flush else "" for flush in right]
    inside = zip(cells, marks, strict=True)
    return "<tr>" + "".join(f"<{tag}{mark}>{escape(c)}</{tag}>" for c, mark in inside) + "</tr>"


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in ("-", "–")


def _palette(colours: Sequence[str]) -> str:
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours))


_STYLE = (
    f":root{{color-scheme:light dark;--page:#fafafa;--card:#ffffff;--ink:{INK};"
    f"--quiet:{QUIET};--grid:{GRID};{_palette(LIGHT)}}}\n"
    "@media (prefers-color-scheme:dark){:root{--page:#0f1013;--card:#18191d;--ink:#f4f4f5;"
    f"--quiet:#a1a1aa;--grid:#2c2d33;{_palette(_DARK)}}}}}\n"
    + "".join(f".s{i}{{--colour:var(--s{i})}}" for i in range(len(LIGHT)))
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:24px;line-height:1.3;font-weight:650;letter-spacing:-.01em;margin:0 0 20px}
h2{font-size:15px;font-weight:600;margin:0 0 8px}
figure,section{margin:0 0 24px;padding:20px;background:var(--card);
  border:1px solid var(--grid);border-radius:12px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{color:var(--quiet);font-weight:500}
th,td{padding:6px 12px;border-bottom:1px solid var(--grid);text-align:left}
th.n,td.n{text-align:right;white-space:nowrap}
tr:last-child td{border-bottom:0}
.words td:first-child{color:var(--quiet);width:40%}
svg{display:block;width:100%;height:auto}
svg text{font-size:13px;fill:var(--quiet);font-variant-numeric:tabular-nums}
svg text.name{fill:var(--colour);font-weight:600}
svg text.value{fill:var(--ink);font-weight:600}
.grid{stroke:var(--grid)}
.base{stroke:var(--quiet)}
.mark{stroke:var(--quiet);stroke-dasharray:4 4}
.guide{stroke:var(--quiet);opacity:.5}
.series polyline{fill:none;stroke:var(--colour);stroke-width:2.25;
  stroke-linejoin:round;stroke-linecap:round}
.again polyline{stroke-dasharray:6 5}
.series circle,.show circle{fill:var(--colour);stroke:var(--card);stroke-width:1.5}
.band{fill:transparent}
.tip{fill:var(--card);fill-opacity:.94;stroke:var(--grid)}
.show{opacity:0;pointer-events:none;transition:opacity .08s}
.at:hover .show{opacity:1}
"""
)
