"""Groups of bars (SVG): TTFT by the tier that holds the prefix, tokens by residency.

Colours are classes of a style sheet, so that a chart is readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_WIDTH, _BAR, _GAP, _LEFT, _TOP = 720, 22, 8, 190, 46
_CHARACTER = 7.5
"""Width of a character, at most on average; labels of values are as long as theirs."""
_HUES = {
    "gray": ("#8b949e", "#9198a1"),
    "blue": ("#0969da", "#4493f8"),
    "green": ("#1a7f37", "#3fb950"),
    "amber": ("#bf8700", "#d29922"),
    "purple": ("#8250df", "#ab7df8"),
}
"""Fills of bars, light and dark."""
_TIERS = {"recompute": "gray", "storage": "amber", "host": "blue", "device": "green"}
_GROUND = ("fill: #ffffff; stroke: #d0d7de", "fill: #0d1117; stroke: #3d444d")
_INK = ("#1f2328", "#f0f6fc")


def draw(title: str, groups: Sequence[tuple[str, Mapping[str, float]]], unit: str = "ms") -> str:
    """Groups of bars, milliseconds by tier; every group has a scale of its own."""
    lines, top, hues = [], _TOP, tuple(_HUES)
    labels = [f"{value:,.0f} {unit}" for _, bars in groups for value in bars.values()]
    right = max(90, 16 + _CHARACTER * max(map(len, labels), default=0))
    for name, bars in groups:
        lines.append(_text(16, top + 14, name, bold=True))
        top += 26
        longest = max(bars.values())
        for number, (tier, value) in enumerate(bars.items()):
            width = (_WIDTH - _LEFT - right) * value / longest
            lines.append(_text(_LEFT - 10, top + 15, tier, anchor="end"))
            lines.append(
                f'<rect class="{_TIERS.get(tier, hues[number % len(hues)])}" x="{_LEFT}" '
                f'y="{top}" width="{max(width, 1):.1f}" height="{_BAR}" rx="3"/>'
            )
            lines.append(_text(_LEFT + width + 8, top + 15, f"{value:,.0f} {unit}"))
            top += _BAR + _GAP
        top += 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        f'width="{_WIDTH}" height="{top}" font-family="system-ui, sans-serif" font-size="13">'
    )
    ground = (
        f'<rect class="ground" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{top - 1}" rx="8"/>'
    )
    title_line = _text(16, 26, title, bold=True)
    return "\n".join([head, *_style(), ground, title_line, *lines, "</svg>\n"])


def _style() -> list[str]:
    light, dark = (
        [
            f".ground {{ {_GROUND[scheme]} }}",
            f"text {{ fill: {_INK[scheme]} }}",
            *(f".{name} {{ fill: {fills[scheme]} }}" for name, fills in _HUES.items()),
        ]
        for scheme in (0, 1)
    )
    return [
        "<style>",
        *(f"  {rule}" for rule in light),
        "  .bold { font-weight: bold }",
        "  @media (prefers-color-scheme: dark) {",
        *(f"    {rule}" for rule in dark),
        "  }",
        "</style>",
    ]


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = 'class="bold" ' if bold else ""
    return f'<text {weight}x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
