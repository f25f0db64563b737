"""`kvtide bench transfer`: the link, and the fraction of it that page copies reach."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from kvtide.bench import transfer_speed
from kvtide.bench.link import Link
from kvtide.byte_sizes import format_bytes
from kvtide.cli.console import CommandError, progress, table
from kvtide.tiers import TierError
from kvtide.transfer import backends
from kvtide.transfer.strided import Way


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--tokens", type=int, default=16384, help="how long a prefix to move")
    parser.add_argument("--repetitions", type=int, default=9, help="turns; medians are shown")
    parser.add_argument("--cells", action="store_true", help="also every layout with every backend")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.repetitions < 1 or args.tokens < 256:
        raise CommandError("bench transfer: use --repetitions of 1 and --tokens of 256 or more")
    try:
        result = _measure(args)
    except TierError as refusal:
        raise CommandError(str(refusal)) from None
    print(json.dumps(result, indent=2) if args.json else _report(result))
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    device = _device(args.device)
    goals = transfer_speed.goal_cases(device, args.tokens)
    cells = transfer_speed.cell_cases(device, args.tokens) if args.cells else []
    link = Link(device, transfer_speed.block_bytes(goals))
    try:
        return {
            "device": _name(device),
            "torch": torch.__version__,
            "tokens": args.tokens,
            "limit_gb_s": {way.name.lower(): link.limit_bytes_s(way) / 1e9 for way in Way},
            "both_ways_gb_s": link.both_ways_bytes_s() / 1e9,
            "goals": _as_json(transfer_speed.measure(goals, link, args.repetitions, progress)),
            "beside": [asdict(one) for one in _beside(goals, link, args.repetitions)],
            "cells": _as_json(transfer_speed.measure(cells, link, args.repetitions, progress)),
        }
    finally:
        link.close()


def _beside(
    cases: list[transfer_speed.TransferCase], link: Link, repetitions: int
) -> list[transfer_speed.Beside]:
    v4, qwen, *_ = cases
    found = [
        one for case in (v4, qwen) for one in transfer_speed.both_ways(case, link, repetitions)
    ]
    if link.device.type == "cuda":
        found += [transfer_speed.matmul_beside(qwen, link, 4 * repetitions, way) for way in Way]
    return found + transfer_speed.submission(v4, link, repetitions)


def _as_json(found: list[transfer_speed.TransferMeasurement]) -> list[dict[str, Any]]:
    return [one.as_json() for one in found]


def _device(name: str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    kind = (name or ("cuda" if has_gpu else "cpu")).partition(":")[0]
    if kind not in backends.DEFAULTS:
        raise CommandError(f"--device {name} is not known; use {' or '.join(backends.DEFAULTS)}")
    if kind == "cuda" and not has_gpu:
        raise CommandError(f"--device {name}: torch {torch.__version__} sees no GPU; use cpu")
    return torch.device(name or kind)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _report(result: dict[str, Any]) -> str:
    limit = ", ".join(f"{way} {speed:.1f}" for way, speed in result["limit_gb_s"].items())
    parts = [
        f"\n{result['device']}, torch {result['torch']}; plain copies in GB/s: {limit}, "
        f"both ways at once {result['both_ways_gb_s']:.1f}\n",
        _copy_table(result["goals"], f"{result['tokens']:,} tokens"),
        _beside_table(result["beside"]),
    ]
    if result["cells"]:
        parts.append(_copy_table(result["cells"], "every cell"))
    return "\n\n".join(parts)


def _copy_table(rows: list[dict[str, Any]], title: str) -> str:
    header = (title, "way", "host layout", "backend", "bytes", "legs", "GB/s", "alone",
              "back to back", "goal")  # fmt: skip
    cells = [
        (
            row["case"],
            row["way"],
            row["layout"],
            row["backend"],
            format_bytes(row["bytes"]),
            row["legs"],
            f"{row['gb_s']:.1f}",
            f"{row['alone']:.1%}",
            f"{row['back_to_back']:.1%}",
            f"≥ {row['goal']:.0%}" if row["goal"] else "–",
        )
        for row in rows
    ]
    return table(header, cells)


def _beside_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["what"],
            f"{row['value']:.1%}"
            if row["unit"] == "share"
            else f"{row['value']:.0f} {row['unit']}",
            row["goal"],
            {None: "–", True: "yes", False: "no"}[row["reached"]],
        )
        for row in rows
    ]
    return table(("what", "measured", "goal", "reached"), cells)
