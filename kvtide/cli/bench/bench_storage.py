"""`kvtide bench storage URL`: a store beside its disk or its own library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvtide.bench import store_speed
from kvtide.bench.storage_drivers import others
from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError, parse_size, progress, table
from kvtide.storage import Store, StoreError, open_store
from kvtide.storage.trial import new_space
from kvtide.storage.url import StoreURL


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a store alternately with its disk or its own library. Everything that it writes "
        "is in a space of its own and removed again."
    )
    parser.add_argument("url", metavar="URL", help="the store, such as file:///path?threads=8")
    parser.add_argument("--models", default="deepseek-v4-flash,qwen3-8b", help="whose pages")
    parser.add_argument("--bytes", default="256MB", help="how much is written and read in a turn")
    parser.add_argument("--turns", type=int, default=5, help="turns; medians are shown")
    parser.add_argument(
        "--opening",
        type=int,
        default=0,
        metavar="N",
        help="also write N small objects and open the store anew: time and memory for each",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    size = parse_size(args.bytes)
    if args.turns < 1 or size < 1:
        raise CommandError("bench storage: use --turns and --bytes above 0")
    space = new_space()
    with closing(open_store(args.url, space)) as store:
        try:
            result = _measure(args, store, space, size)
            if args.opening:
                store_speed.fill(store, args.opening, progress)
                opened = store_speed.opened_anew(args.url, space, args.opening)
                result["opening"] = opened.as_json()
        finally:
            store.clear()
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(_report(result))
    return 0


def _measure(args: argparse.Namespace, store: Store, space: bytes, size: int) -> dict[str, Any]:
    models = [name for name in args.models.split(",") if name]
    cases = store_speed.cases(models, size)
    max_bytes = max(case.bytes for case in cases)
    blocks = store_speed.MemoryBlocks(max_bytes)
    with ExitStack() as opened:
        beside, notes = others(StoreURL.parse(args.url), blocks, max_bytes)
        for driver in beside:
            opened.callback(driver.close)
        drivers = [store_speed.Ours(store, blocks), *beside]
        found = [store_speed.measure(case, drivers, blocks, args.turns, progress) for case in cases]
    result: dict[str, Any] = {
        "store": store.name,
        "turns": args.turns,
        "cases": [row.as_json() for rows in found for row in rows],
        "notes": [*notes, *store.status().notes],
    }
    if models:
        costs = store_speed.shape_costs(store, space, models[0], size, args.turns, progress)
        result["shapes"] = [cost.as_json() for cost in costs]
    try:
        result["existence_ms"] = store_speed.existence_ms(store, args.turns)
    except StoreError as error:
        result["notes"].append(f"asking for {store_speed.ASKED_KEYS:,} keys at once: {error}")
    return result


def _report(result: dict[str, Any]) -> str:
    rows = result["cases"]
    names = list(rows[0]["beside"])
    header = ["objects", "size", "way", "GB/s"]
    for name in names:
        header += [name, "ratio"]
    cells = []
    for row in rows:
        cell = [row["case"], format_bytes(row["object_bytes"]), row["way"], f"{row['gb_s']:.2f}"]
        for name in names:
            cell += [f"{row['beside'][name]:.2f}", f"{row['ratio'][name]:.2f}×"]
        cells.append(cell)
    turns = f"medians of {result['turns']} turns"
    parts = [f"\n{result['store']}: {turns}, taken in one run\n", table(header, cells), ""]
    if "shapes" in result:
        parts += [_shapes_report(result["shapes"]), ""]
    if "existence_ms" in result:
        asked = f"{store_speed.ASKED_KEYS:,} keys are looked for in"
        parts.append(f"{asked} {result['existence_ms']:.1f} ms")
    if opened := result.get("opening"):
        parts.append(
            f"with {opened['objects']:,} objects a new process opens it in "
            f"{opened['seconds']:.2f} s, {opened['bytes_per_object']:.0f} B of memory for each"
        )
    return "\n".join([*parts, *(f"note: {note}" for note in result["notes"])])


def _shapes_report(costs: Sequence[dict[str, Any]]) -> str:
    header = [
        "pages of one shape",
        "sought",
        "stored",
        "its own alone",
        "of any",
        "ratio",
        "look-ups: own",
        "any",
        "with marks",
    ]
    cells = [
        [
            cost["model"],
            str(cost["prompt_pages"]),
            str(cost["stored_pages"]),
            f"{cost['own_ms']:.1f} ms",
            f"{cost['ms']:.1f} ms",
            f"{cost['ratio']:.3f}×",
            *(f"{ms:.2f} ms" for ms in cost["lookup_ms"]),
        ]
        for cost in costs
    ]
    return table(header, cells)
