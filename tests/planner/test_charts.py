"""Charts: files appear whole, pages stand alone, and what is shown are the numbers given."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.planner.chart_data import (
    Curve,
    Mark,
    Series,
    linear_ticks,
    log_ticks,
    number,
    spread,
    x_ticks,
    y_range,
)
from kvtide.planner.charts import ChartError, html, png, write
from kvtide.planner.html_page import html_page, svg

DEVICE = Series("device", (1.0, 10.0, 100.0), (5.0, 42.5, 71.25))
HOST = Series("host", (1.0, 100.0), (60.0, 72.0))
CURVE = Curve(
    "Hit rate", "memory (GB)", "hit rate (%)", (DEVICE, HOST), True, (Mark(10, "knee: 10 GB"),)
)

FINITE = st.floats(-1e9, 1e9)


def write_png(curve: Curve, path: Path) -> None:
    write({path: png(curve)})


def write_html(curve: Curve, path: Path, parameters: Mapping[str, str] | None = None) -> None:
    write({path: html(curve, parameters)})


class Cells(HTMLParser):
    """Collects table cells row by row, and every address the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loads: list[str] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


# -- files ----------------------------------------------------------------------------------


def test_png_is_written_and_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    write_png(CURVE, tmp_path / "a.png")
    write_png(CURVE, tmp_path / "b.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert data == (tmp_path / "b.png").read_bytes()


def test_png_takes_dollar_signs_literally(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    odd = r"$\frac{$"
    curve = Curve(odd, odd, odd, (Series(odd, (1.0,), (2.0,)),), False, (Mark(1.0, odd),))
    write_png(curve, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_png_without_matplotlib_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ChartError, match=r"pip install 'kvtide\[plot\]'"):
        write_png(CURVE, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_html_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_html(CURVE, tmp_path / "a.html", {"model": "m"})
    assert (tmp_path / "a.html").read_text() == html_page(CURVE, {"model": "m"})


def test_written_file_replaces_the_old_one_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "a.html"
    target.write_text("old")
    write_html(CURVE, target)
    assert "Hit rate" in target.read_text()
    assert list(tmp_path.iterdir()) == [target]


def test_failed_write_keeps_the_old_file_and_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.html"
    target.write_text("old")

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ChartError, match="No space left on device; name a file in a folder"):
        write_html(CURVE, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["absent/a.html", "folder", "", "file/a.html"])
def test_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ChartError, match=r"cannot write .*; name a file in a folder"):
        write_html(CURVE, tmp_path / name)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


# -- the page -------------------------------------------------------------------------------


def test_page_loads_nothing_and_runs_nothing() -> None:
    page = html_page(CURVE, {})
    assert Cells(page).loads == []
    assert not re.search(r"<script|<link|@import|url\(|https?:", page)


def test_page_repeats_every_number_in_a_table() -> None:
    assert Cells(html_page(CURVE, {})).rows == [
        ["memory (GB)", "device", "host"],
        ["1", "5.00", "60"],
        ["10", "42.50", "–"],
        ["100", "71.25", "72"],
    ]


def test_page_lists_the_parameters() -> None:
    rows = Cells(html_page(CURVE, {"link": "55 GB/s", "model": "a<b>"})).rows
    assert rows[-2:] == [["link", "55 GB/s"], ["model", "a<b>"]]


def test_page_escapes_names() -> None:
    evil = '<script>"&'
    curve = Curve(evil, evil, evil, (Series(evil, (1.0,), (1.0,)),), marks=(Mark(1.0, evil),))
    page = html_page(curve, {evil: evil})
    assert "<script>" not in page
    assert ElementTree.fromstring(svg(curve)).get("aria-label") == evil


def test_page_follows_the_readers_dark_setting() -> None:
    assert "prefers-color-scheme:dark" in html_page(CURVE, {})


def test_names_that_are_not_text_still_give_a_page(tmp_path: Path) -> None:
    write_html(CURVE, tmp_path / "a.html", {"trace": "bad\udcff.jsonl"})
    assert "bad?.jsonl" in (tmp_path / "a.html").read_text()


# -- the drawing ----------------------------------------------------------------------------


def test_svg_draws_each_series_through_its_points() -> None:
    root = ElementTree.fromstring(svg(CURVE))
    lines = [line.get("points", "").split() for line in root.iter("polyline")]
    assert [len(points) for points in lines] == [3, 2]
    x, y = zip(*(map(float, point.split(",")) for point in lines[0]), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # decades are equally wide
    assert list(y) == sorted(y, reverse=True)  # larger values stand higher
    assert lines[0][0].split(",")[0] == lines[1][0].split(",")[0]


def test_svg_shows_marks_labels_and_hover_values() -> None:
    texts = [text.text for text in ElementTree.fromstring(svg(CURVE)).iter("text")]
    for expected in ("knee: 10 GB", "memory (GB)", "hit rate (%)", "device", "host", "42.50"):
        assert expected in texts


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=6, unique_by=lambda p: p[0]))
def test_any_numbers_are_drawn_inside_the_picture(points: list[tuple[float, float]]) -> None:
    x, y = zip(*sorted(points), strict=True)
    root = ElementTree.fromstring(svg(Curve("t", "x", "y", (Series("s", x, y),))))
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx", "-1")) <= 960
        assert 0 <= float(circle.get("cy", "-1")) <= 460


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Series("s", (), ()),
        lambda: Series("s", (1.0,), (1.0, 2.0)),
        lambda: Series("s", (2.0, 1.0), (1.0, 2.0)),
        lambda: Series("s", (1.0,), (float("nan"),)),
        lambda: Curve("t", "x", "y", ()),
        lambda: Curve("t", "x", "y", (Series("s", (0.0,), (1.0,)),), x_log=True),
    ],
)
def test_curves_that_cannot_be_drawn_assert(broken: object) -> None:
    assert callable(broken)
    with pytest.raises(AssertionError):
        broken()


# -- axes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0, 6, [0, 1, 2, 3, 4, 5, 6]),
        (-3, 2, [-3, -2, -1, 0, 1, 2]),
        (0, 0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_linear_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks_thin_out_over_many_decades() -> None:
    assert log_ticks(1, 100) == pytest.approx([1, 2, 5, 10, 20, 50, 100])
    assert log_ticks(1, 1e6) == pytest.approx([10.0**d for d in range(7)])


def test_narrow_log_axis_still_has_ticks() -> None:
    curve = Curve("t", "x", "y", (Series("s", (45.0, 62.0), (1.0, 2.0)),), x_log=True)
    assert x_ticks(curve) == pytest.approx([45, 50, 55, 60])


def test_things_that_are_counted_have_no_ticks_between_their_numbers() -> None:
    turns = Curve("t", "turn", "ms", (Series("a", (1, 2, 3, 4), (5.0, 6.0, 7.0, 8.0)),))
    assert x_ticks(turns) == [1, 2, 3, 4]
    once = Curve("t", "turn", "ms", (Series("a", (1,), (5.0,)),))
    assert x_ticks(once) == [0, 1, 2]
    measured = Curve("t", "x", "ms", (Series("a", (1, 2.5, 4), (5.0, 6.0, 7.0)),))
    assert x_ticks(measured) == pytest.approx([1, 1.5, 2, 2.5, 3, 3.5, 4])


def test_y_axis_begins_at_zero_and_holds_all_values() -> None:
    assert y_range(CURVE) == pytest.approx((0, 80))
    below = Curve("t", "x", "y", (Series("s", (1.0, 2.0), (-7.0, 30.0)),))
    assert y_range(below)[0] <= -7
    flat = Curve("t", "x", "y", (Series("s", (1.0,), (0.0,)),))
    assert y_range(flat) == (0, 1)


@pytest.mark.parametrize("x_log", [False, True])
def test_values_too_close_for_ticks_are_drawn_as_one(x_log: bool) -> None:
    nearly = Series("s", (1.0, 1.0 + 1e-15), (0.0, 5e-324))
    root = ElementTree.fromstring(svg(Curve("t", "x", "y", (nearly,), x_log)))
    assert len(list(root.iter("polyline"))) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.12345, "0.1235"), (12.5, "12.5"), (1024, "1,024"), (16384.4, "16,384"),
     (-2.0, "-2"), (3.2e15, "3.2e+15"), (1e-7, "1e-07"), (0.99999, "1")],
)  # fmt: skip
def test_numbers_are_short_and_readable(value: float, text: str) -> None:
    assert number(value) == text


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_spread_labels_keep_their_distance_order_and_bounds(wanted: list[float]) -> None:
    placed = spread(wanted, 10, 0, 100)
    assert all(-1e-6 <= position <= 100 + 1e-6 for position in placed)
    ordered = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for a, b in pairwise(ordered):
        assert placed[b] - placed[a] >= 10 - 1e-6


def test_spread_leaves_labels_that_do_not_overlap() -> None:
    assert spread([50, 5, 90], 10, 0, 100) == [50, 5, 90]
