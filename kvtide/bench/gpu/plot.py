"""Groups of bars (SVG): TTFT by the tier that holds the prefix, tokens by residency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_WIDTH, _BAR, _GAP, _LEFT, _RIGHT, _TOP = 720, 22, 8, 190, 90, 46
_COLOURS = {"recompute": "#8b949e", "storage": "#bf8700", "host": "#0969da", "device": "#1a7f37"}
_OTHERS = ("#8b949e", "#0969da", "#1a7f37", "#bf8700", "#8250df")


def draw(title: str, groups: Sequence[tuple[str, Mapping[str, float]]], unit: str = "ms") -> str:
    """Groups of bars, milliseconds by tier; every group has a scale of its own."""
    lines, top = [], _TOP
    for name, bars in groups:
        lines.append(_text(16, top + 14, name, "bold"))
        top += 26
        longest = max(bars.values())
        for number, (tier, value) in enumerate(bars.items()):
            width = (_WIDTH - _LEFT - _RIGHT) * value / longest
            lines.append(_text(_LEFT - 10, top + 15, tier, anchor="end"))
            lines.append(
                f'<rect x="{_LEFT}" y="{top}" width="{max(width, 1):.1f}" height="{_BAR}" '
                f'rx="3" fill="{_COLOURS.get(tier, _OTHERS[number % len(_OTHERS)])}"/>'
            )
            lines.append(_text(_LEFT + width + 8, top + 15, f"{value:,.0f} {unit}"))
            top += _BAR + _GAP
        top += 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        f'width="{_WIDTH}" height="{top}" font-family="system-ui, sans-serif" font-size="13">'
        f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>'
    )
    return "\n".join([head, _text(16, 26, title, "bold"), *lines, "</svg>\n"])


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="#1f2328">{text}</text>'
    )
