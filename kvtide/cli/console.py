"""What the commands share at the terminal: tables, progress, and the error for bad input."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

from kvtide.byte_sizes import parse_bytes

T = TypeVar("T")


class CommandError(Exception):
    """Bad input, in a sentence that names the remedy; printed without a traceback, exit code 2."""


def parse_size(text: str) -> int:
    """A size argument in bytes, such as 80GB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(str(error)) from None


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; columns of numbers are flush right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
        + "|"
    )
    return "\n".join([line(header), rule, *(line(row) for row in cells)])


def _numeric(cell: str) -> bool:
    return re.match(r"^[-–]?$|^[-+<≥~]?[0-9]", cell) is not None


def progress(
    items: Iterable[T], total: int, label: str, stream: TextIO | None = None
) -> Iterator[T]:
    """Yield the items; on a terminal keep one line with count, rate and time left."""
    out = sys.stderr if stream is None else stream
    live = out.isatty()
    start = shown = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown < (0.2 if live else 10.0) and done != total:
            continue
        shown = now
        rate = done / max(now - start, 1e-9)
        left = (total - done) / rate if rate else 0.0
        percent = 100 * done // max(total, 1)
        text = f"{label}: {done:,}/{total:,} ({percent}%), {rate:,.0f}/s, {left:.0f} s left"
        out.write(f"\r{text}\x1b[K" if live else f"{text}\n")
        out.flush()
    if live:
        out.write("\r\x1b[K")
        out.flush()
