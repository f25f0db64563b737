"""A snapshot of a server (`GET /admin/live`) as a screen of text, as wide as the terminal.

The parts and their words are those of the live page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvtide.byte_sizes import format_bytes

Json = dict[str, Any]

COLOURS = {
    "device": "green",
    "host": "blue",
    "storage": "yellow",
    "computed": "bright_black",
    "absent": "white",
}
TIERS = ("device", "host", "storage")
ORIGINS = (*TIERS, "computed")
BARS = " ▁▂▃▄▅▆▇█"
MAX_LEVELS = 8
MAX_ROWS = 8
BETWEEN = "   "
WIDE = 100
"""Columns from which parts stand side by side."""


def screen(s: Json, history: Sequence[Json], width: int, status: str = "live") -> RenderableType:
    """All parts; `history` has the token rates of the last snapshots."""
    inner = width // 2 - 4 if width >= WIDE else width - 4
    pairs = (
        (_panel("occupancy", _occupancy(s, inner)), _panel("flows between tiers", _flows(s))),
        (_panel("prompt tokens by origin", _sources(s, history, inner)), _panel("TTFT", _ttft(s))),
        (_panel("requests", _requests(s)), _panel("why no longer prefix", _misses(s))),
    )
    parts: list[RenderableType] = [_header(s, status), _tiles(s, width)]
    for left, right in pairs[:2]:
        parts.append(_beside(left, right, width))
    parts.append(_panel("prefix tree: width = tokens, colour = tier", _tree(s, width - 4)))
    parts.append(_beside(*pairs[2], width))
    parts.append(_panel("storage", _storage(s)))
    return Group(*parts)


def _panel(title: str, body: RenderableType) -> Panel:
    return Panel(body, title=title, title_align="left", border_style="bright_black")


def _beside(left: RenderableType, right: RenderableType, width: int) -> RenderableType:
    if width < WIDE:
        return Group(left, right)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


# -- numbers ----------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    if size < 1:
        return f"{1000 * value:.1f} ms" if size < 0.01 else f"{1000 * value:.0f} ms"
    if size < 120:
        return f"{value:.2f} s" if size < 10 else f"{value:.1f} s"
    return f"{value / 60:.1f} min" if size < 7200 else f"{value / 3600:.1f} h"


def count(value: float) -> str:
    for unit in ("", "k", "M"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "–"


def bar(parts: Iterable[tuple[str, float]], whole: float, width: int) -> Text:
    """Blocks of colours; what is left of the whole is a thin line."""
    text, used, ended = Text(), 0.0, 0
    for colour, part in parts:
        used += part
        end = round(width * used / whole) if whole else 0
        text.append("█" * max(0, end - ended), colour)
        ended = max(ended, end)
    text.append("─" * max(0, width - ended), "bright_black")
    return text


def _rows(*headers: str) -> Table:
    made = Table(box=None, padding=(0, 1), show_edge=False, header_style="bright_black")
    for header in headers:
        right = header.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        made.add_column(header.lstrip(">"), justify=justify, no_wrap=True)
    return made


# -- parts ------------------------------------------------------------------------------------


def _header(s: Json, status: str) -> Text:
    server = s["server"]
    text = Text.assemble(("kvtide", "bold"), "  ", server["model"], "  ")
    text.append(f"● {status}", "green" if status == "live" else "red")
    text.append(
        f"  {server['device']}, pages of {server['page_tokens']} tokens, up for "
        f"{seconds(s['time'] - s['started'])}, {server['viewers']} watching",
        "bright_black",
    )
    return text


def _tiles(s: Json, width: int) -> Text:
    """Side by side, and on a further line those that do not fit."""
    saved, tokens, requests = s["saved"], s["tokens"], s["requests"]
    cached = sum(tokens[tier] for tier in TIERS)
    drafts, checks = s["speculation"], s["checks"]
    unit = "GPU-s" if s["server"]["device"].startswith("cuda") else "rank-s"
    tiles = (
        ("saved", f"{seconds(saved['seconds'])}, {saved['rank_seconds']:.1f} {unit}"),
        ("prompt cached", percent(cached, cached + tokens["computed"])),
        ("requests", f"{requests['running']} running, {requests['waiting']} waiting"),
        ("accept length", f"{drafts['mean']:.2f}" if drafts and drafts["mean"] else "–"),
        ("restores checked", _checked(checks) if checks else "off"),
    )
    lines: list[Text] = []
    for name, text in tiles:
        tile = Text.assemble((f"{name} ", "bright_black"), text)
        if lines and len(lines[-1]) + len(BETWEEN) + len(tile) <= width:
            lines[-1].append(BETWEEN).append_text(tile)
        else:
            lines.append(tile)
    return Text("\n").join(lines)


def _checked(checks: Json) -> Text:
    whole = checks["alike"] + checks["diverged"]
    return Text(f"{whole}, {checks['diverged']} diverged", "red" if checks["diverged"] else "")


def _occupancy(s: Json, width: int) -> Table:
    table = _rows("tier", "pool", "used", ">pages", ">bytes")
    for pool in s["occupancy"]:
        colour, capacity = COLOURS[pool["tier"]], pool["capacity"]
        used = capacity - pool["free"]
        table.add_row(
            Text(pool["tier"], colour),
            pool["pool"],
            bar([(colour, used)], capacity, max(8, width - 46)),
            f"{percent(used, capacity)} of {count(capacity)}",
            format_bytes(capacity * pool["page_bytes"]),
        )
    if (hot := s["hot"]) is not None:
        pools, rows = ", ".join(hot["pools"]), hot["rows"]
        used = bar([(COLOURS["device"], hot["in_use"])], rows, max(8, width - 46))
        table.add_row(
            Text("hot", COLOURS["device"]), pools, used, f"{hot['in_use']} of {rows} requests", ""
        )
    return table


def _flows(s: Json) -> Table:
    table = _rows("flow", ">bytes/s", "waiting", ">in all")
    ways = {"backup": "host", "load": "device", "store": "storage", "fetch": "host"}
    for way, target in ways.items():
        flow = s["flows"].get(way)
        if flow is None:
            table.add_row(f"{way} to {target}", "–", "no store", "–")
            continue
        table.add_row(
            f"{way} to {target}",
            f"{format_bytes(flow['bytes_s'])}/s",
            _waiting(flow),
            format_bytes(flow["bytes"]),
        )
    return table


def _waiting(flow: Json) -> str:
    reserved = flow.get("reserved")
    return f"{flow['queue']:,} {flow['unit']}" + (f", {reserved:,} reserved" if reserved else "")


def _sources(s: Json, history: Sequence[Json], width: int) -> Table:
    table = _rows("origin", ">tokens/s", ">in all", "")
    columns = max(8, width - 36)
    last = history[-columns:]
    peak = max([1.0, *(rates[origin] for rates in last for origin in ORIGINS)])
    for origin in ORIGINS:
        line = "".join(BARS[math.ceil(8 * rates[origin] / peak)] for rates in last)
        table.add_row(
            Text(origin, COLOURS[origin]),
            count(s["token_rates"][origin]),
            count(s["tokens"][origin]),
            Text(line, COLOURS[origin]),
        )
    return table


def _ttft(s: Json) -> Table:
    table = _rows("slowest tier", ">samples", ">median", ">95%")
    for origin in ORIGINS:
        one = s["ttft"]["origins"][origin]
        table.add_row(
            Text(origin, COLOURS[origin]),
            str(one["samples"]),
            seconds(one["p50_s"]),
            seconds(one["p95_s"]),
        )
    return table


def _tree(s: Json, width: int) -> Text:
    """A line per level; a branch has the columns of its tokens, under its parent's."""
    tree = s["tree"]
    whole, branches = tree["width"], tree["branches"]
    levels: list[list[tuple[float, float, str]]] = []
    left: list[float] = []
    level: list[int] = []
    taken, top = [0.0] * len(branches), 0.0
    for number, branch in enumerate(branches):
        up = branch["parent"]
        left.append(top if up < 0 else left[up] + taken[up])
        level.append(0 if up < 0 else level[up] + 1)
        top += branch["width"] if up < 0 else 0
        if up >= 0:
            taken[up] += branch["width"]
        if level[number] == len(levels):
            levels.append([])
        tier = branch["tiers"][0] if branch["tiers"] else "absent"
        levels[level[number]].append((left[number], branch["width"], tier))
    text = Text(f"{count(whole)} tokens in {tree['nodes']:,} nodes", "bright_black")
    for cells in levels[:MAX_LEVELS]:
        text.append("\n").append_text(_level(sorted(cells), whole, width))
    return text


def _level(cells: Sequence[tuple[float, float, str]], whole: float, width: int) -> Text:
    text, at = Text(), 0
    for left, own, tier in cells:
        begin, end = round(width * left / whole), round(width * (left + own) / whole)
        if end > max(at, begin):
            text.append(" " * (begin - at))
            text.append("▏" + " " * (end - max(at, begin) - 1), f"black on {COLOURS[tier]}")
            at = end
    return text


def _requests(s: Json) -> RenderableType:
    requests = s["requests"]
    states = ", ".join(f"{n} {state}" for state, n in requests["states"].items())
    table = _rows(">no.", "state", ">prompt", "from", ">output", *(("text",) if _texts(s) else ()))
    for row in requests["rows"][:MAX_ROWS]:
        cached = [(COLOURS[tier], row["cached"][tier]) for tier in TIERS]
        done = max(0, row["computed"] - sum(part for _, part in cached))
        text = (Text(row.get("text", "")[-24:].replace("\n", " ")),) if _texts(s) else ()
        table.add_row(
            str(row["number"]),
            f"check: {row['state']}" if row["check"] else row["state"],
            f"{row['prompt']:,}",
            bar([*cached, (COLOURS["computed"], done)], max(1, row["prompt"]), 10),
            f"{row['output']:,}/{row['max_tokens']:,}",
            *text,
        )
    return Group(Text(states or "none", "bright_black"), table)


def _texts(s: Json) -> bool:
    return bool(s["server"]["shows_text"])


def _misses(s: Json) -> Table:
    table = _rows(">no.", ">cached", "pool", "why not more")
    stops = ((miss, stop) for miss in s["misses"]["last"] for stop in miss["pools"])
    for miss, stop in list(stops)[:MAX_ROWS]:
        table.add_row(
            str(miss["number"]),
            f"{miss['cached']:,} of {miss['prompt']:,}",
            stop["pool"],
            Text(stop["reason"]),
        )
    return table


def _storage(s: Json) -> Text:
    one, held = s["storage"], s["store"]
    if one is None:
        return Text("no store is attached", "bright_black")
    parts = [
        f"{one['name']} {'is ' + one['state'] if one['answers'] else 'does not answer'}",
        f"{count(one['fetched_pages'])} pages fetched, {count(one['stored_pages'])} stored, "
        f"{count(one['waiting_pages'])} queued, {count(one['failed_pages'])} failed",
    ]
    if held.get("bytes") is not None:
        parts.append(f"holds {format_bytes(held['bytes'])}")
    if one["read_bytes_s"]:
        parts.append(f"reads {format_bytes(one['read_bytes_s'])}/s")
    if one["last_error"]:
        parts.append(f"last error: {one['last_error']}")
    return Text("; ".join(parts), "" if one["answers"] else "red")
