"""From the start of `kvtide chat --serve` to the first token of its answer, with the default model.

Checkouts are measured in turns, so that what other processes do falls on all alike:

    python bench/first_token.py
    git worktree add /tmp/before 09ccab6 && python bench/first_token.py . /tmp/before

The first start in a checkout is not counted: it may compile CPU kernels. CPU seconds are those of
both processes, all threads, until the chat has ended. `--imports` lists what Python imports most
slowly in the server.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

READY = "[pages are"
"""Begins the line that the chat prints when its server answers."""
QUESTION = b"Hello\n"
ECHO = b"> "
SERVER = ("--port", "0", "--storage", "none")


class Start(NamedTuple):
    """In seconds, from the start of the process."""

    ready: float
    first_token: float
    cpu: float


def start(checkout: Path) -> Start:
    command = [*_kvtide(), "chat", "--serve", "--max-tokens", "2", "--", *SERVER]
    before, began = _cpu_seconds(), time.monotonic()
    chat = subprocess.Popen(
        command,
        env=_environment(checkout),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write(QUESTION)
    chat.stdin.close()
    seen, ready, answered = b"", 0.0, 0.0
    while piece := os.read(chat.stdout.fileno(), 4096):
        seen += piece
        if not ready and READY.encode() in seen:
            ready = time.monotonic() - began
        if not answered and seen.partition(ECHO + QUESTION)[2].strip():
            answered = time.monotonic() - began
    if chat.wait() or not answered:
        raise SystemExit(f"kvtide chat does not answer in {checkout}:\n{seen.decode()}")
    return Start(ready, answered, _cpu_seconds() - before)


def _kvtide() -> list[str]:
    return [sys.executable, "-m", "kvtide.cli.main"]


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout.resolve()), "PYTHONUNBUFFERED": "1"}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imports(checkout: Path, count: int) -> None:
    """The modules on which the server spends the most time of its own."""
    code = "import kvtide.cli.serve_command"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env=_environment(checkout),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines()]
    times = [(int(own), name.strip()) for own, _, name in lines if own.strip().isdigit()]
    print(
        f"| package | import, ms |\n|---|---:|\n| all | {sum(own for own, _ in times) / 1e3:.0f} |"
    )
    packages: dict[str, int] = {}
    for own, name in times:
        package = name.partition(".")[0]
        packages[package] = packages.get(package, 0) + own
    for package in sorted(packages, key=lambda each: -packages[each])[:count]:
        print(f"| {package} | {packages[package] / 1e3:.0f} |")


def table(found: Mapping[Path, Sequence[Start]]) -> None:
    print("| checkout | server ready, s | first token, s | CPU, s | first token, of the last |")
    print("|---|---:|---:|---:|---:|")
    medians = {
        checkout: Start(*(statistics.median(column) for column in zip(*starts, strict=True)))
        for checkout, starts in found.items()
    }
    last = list(medians.values())[-1].first_token
    for checkout, each in medians.items():
        cells = f"{each.ready:.2f} | {each.first_token:.2f} | {each.cpu:.2f}"
        print(f"| {checkout} | {cells} | {each.first_token / last:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--turns", type=int, default=5, help="counted starts of each (5)")
    parser.add_argument("--imports", action="store_true", help="what the server imports, instead")
    given = parser.parse_args()
    if given.imports:
        for checkout in given.checkouts:
            imports(checkout, 12)
        return
    found: dict[Path, list[Start]] = {checkout: [] for checkout in given.checkouts}
    for turn in range(1 + given.turns):
        for checkout in given.checkouts:
            measured = start(checkout)
            if turn:
                found[checkout].append(measured)
    table(found)


if __name__ == "__main__":
    main()
