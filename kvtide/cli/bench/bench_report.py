"""Rows of a long benchmark as they come, on the terminal and in a file."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtide.cli.console import table


@dataclass(slots=True)
class BenchReport:
    """`numbers`: what the JSON file has, by the first column of the rows."""

    json_file: Path | None
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    numbers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)

    def row(self, row: Sequence[str], found: dict[str, Any]) -> None:
        self.rows.append(tuple(row))
        self.numbers.setdefault(row[0], []).append(found)
        self.note(" | ".join(row))
        self.write()

    def write(self) -> None:
        """The results so far, so that an interrupted run keeps them."""
        if self.json_file:
            found = {**self.numbers, "failed": self.failed}
            self.json_file.write_text(json.dumps(found, indent=2))

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails here is reported, and what follows still runs."""
        self.note(f"{what} begins")
        try:
            yield
        except Exception:
            self.failed.append(what)
            print(traceback.format_exc(), flush=True)
            self.write()

    def end(self, header: Sequence[str]) -> int:
        """Print the table; the exit code."""
        print(f"\n{table(header, self.rows)}")
        if self.failed:
            print(f"failed (tracebacks above): {', '.join(self.failed)}")
        return 1 if self.failed else 0


def against_goal(value: float, wanted: float, unit: str = "×", *, at_most: bool = False) -> str:
    reached = value <= wanted if at_most else value >= wanted
    sign = "≤" if at_most else "≥"
    shown = f"{sign} {wanted:g} ×: {value:.2f}"
    if unit == "%":
        shown = f"{sign} {wanted:.0%}: {value:.1%}"
    return f"{shown}, {'yes' if reached else 'no'}"


def figure(figures: Any, names: Sequence[str]) -> float | None:
    """A number within nested figures; None where a part of them is None."""
    for name in names:
        figures = None if figures is None else figures[name]
    return figures  # type: ignore[no-any-return]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
