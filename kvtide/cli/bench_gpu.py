"""`kvtide bench gpu`: how fast models are served on a GPU, with the cache and without."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvtide.bench.gpu import (
    ceilings,
    multi_turn,
    overheads,
    plot,
    throughput,
    transformers_peer,
    ttft,
)
from kvtide.bench.gpu.engine_bed import Bed
from kvtide.bench.gpu.shapes import Shape, deepseek_v4_flash, qwen3_8b
from kvtide.cli.console import CommandError, progress, table
from kvtide.server.rank_processes import freeze_gc

Rows = list[tuple[str, str, str, str, str]]
_TITLES = {
    "qwen3-8b": "Qwen3-8B",
    "deepseek-v4-flash": "DeepSeek-V4-Flash (12 layers, 32 experts)",
}
_HEADER = ("model", "what", "measured", "beside", "goal and whether it is reached")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default=",".join(_PARTS), metavar="WHAT", help=f"some of {', '.join(_PARTS)}"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times to first tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers there")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CommandError("bench gpu needs a CUDA device and a torch that is built for it")
    wanted = args.only.split(",")
    if unknown := set(wanted) - _PARTS.keys():
        raise CommandError(f"bench gpu: {sorted(unknown)} is not known; use {', '.join(_PARTS)}")
    device = torch.device("cuda", 0)
    best = ceilings.measure(device)
    print(_machine(device, best), flush=True)
    failed: list[str] = []
    numbers: dict[str, Any] = {"ceilings": best.as_json(), "failed": failed}
    shown: Rows = []
    for shape, kinds in _by_model(wanted):
        bed = Bed(shape.build(device, torch.bfloat16), device)
        freeze_gc()  # As a server does.
        for kind in progress(kinds, len(kinds), shape.name):
            try:
                for row, found in _PARTS[kind][1](bed, shape, best):
                    print(" | ".join(row), flush=True)
                    shown.append(row)
                    numbers.setdefault(kind, []).append(found)
                    _write(args, numbers)
            except Exception:  # The other parts are measured all the same.
                failed.append(kind)
                traceback.print_exc()
                _write(args, numbers)
            torch.cuda.empty_cache()
        del bed
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n{table(_HEADER, shown)}")
    if failed:
        print(f"failed, as told above: {', '.join(failed)}")
    return 1 if failed else 0


def _write(args: argparse.Namespace, numbers: dict[str, Any]) -> None:
    """What is known so far: whoever is interrupted keeps it."""
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))
    if args.plot:
        args.plot.write_text(_picture([*numbers.get("ttft", ()), *numbers.get("ttft-v4", ())]))


def _by_model(wanted: list[str]) -> Iterator[tuple[Shape, list[str]]]:
    for shape, versed in ((qwen3_8b(), False), (deepseek_v4_flash(), True)):
        kinds = [kind for kind in wanted if _PARTS[kind][0] is versed]
        if kinds:
            yield shape, kinds


def _machine(device: torch.device, best: ceilings.Ceilings) -> str:
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python "
        f"{platform.python_version()}: products {best.flops / 1e12:.0f} TFLOPS, memory "
        f"{best.bytes_s / 1e12:.2f} TB/s, link {best.link_bytes_s / 1e9:.1f} GB/s"
    )


# -- the parts --------------------------------------------------------------------------------

Found = Iterator[tuple[tuple[str, str, str, str, str], dict[str, Any]]]


def _ttft(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    tokens, least = (65_536, 15.0) if "v4" in shape.name else (16_384, 8.0)
    found = ttft.measure(bed, shape.name, tokens, best, 2)
    what = f"first token of {tokens:,}, prefix on the host"
    bound = (
        f"{found.moved_bytes / 1e6:,.0f} MB at link speed {found.link_s * 1e3:.1f} ms, "
        f"prefix on the device {found.device_s * 1e3:.1f} ms"
    )
    yield (
        (
            shape.name,
            what,
            _ms(found.host_s),
            bound,
            _goal(found.of_bound, "≤ {:.2f} × the larger", 1.15, most=True),
        ),
        found.as_json(),
    )
    told = f"recompute {_ms(found.recompute_s)}, storage {_ms(found.storage_s)}"
    yield (
        (
            shape.name,
            what,
            _ms(found.host_s),
            told,
            _goal(found.times_faster, "≥ {:.0f} × recompute", least),
        ),
        {},
    )


def _prefill(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = throughput.prefill(bed, shape.config, 8192, best)
    beside = f"{found.work / found.seconds / 1e12:.0f} of {best.flops / 1e12:.0f} TFLOPS"
    goal = _goal(found.share, "≥ {:.0%} of products", 0.5, share=True)
    yield (shape.name, found.what, _ms(found.seconds), beside, goal), found.as_json()


def _decode(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for batch, context in ((1, 2048), (64, 2048)):
        found = throughput.decode(bed, shape.config, batch, context, best, 128)
        goal = _goal(found.share, "≥ {:.0%} of memory", 0.65, share=True)
        yield (shape.name, found.what, _ms(found.seconds), _read(found), goal), found.as_json()


def _sparse(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for batch in (1, 16, 64):
        found = throughput.sparse_decode(bed, shape.config, batch, 131_072, best)
        goal = _goal(found.share, "≥ {:.0%} of memory", 0.5, share=True)
        yield (shape.name, found.what, _ms(found.seconds), _read(found), goal), found.as_json()


def _write_through(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.prefills(bed, 16_384, 2, 4)
    beside = f"without a host {_ms(found.off_s)}"
    goal = _goal(found.share, "≥ {:.0%} of that speed", 0.98, share=True)
    yield (shape.name, found.what, _ms(found.on_s), beside, goal), found.as_json()


def _generating(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.decodes(bed, 64, 1024, 192, 5)
    beside = f"without a host {_ms(found.off_s)}"
    goal = _goal(found.share, "≥ {:.0%} of that speed", 0.99, share=True)
    yield (shape.name, found.what, _ms(found.on_s), beside, goal), found.as_json()


def _drawing(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.drawings(bed, 64, 1024, 128, 3)
    beside = f"the likeliest {_ms(found.off_s)}, {found.share:.1%} of that speed"
    yield (shape.name, found.what, _ms(found.on_s), beside, "–"), found.as_json()


def _turns(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    talk = multi_turn.Talk()
    both, alone, unlimited = multi_turn.measure(bed, talk)
    what = (
        f"{both.requests} turns of {talk.users} users: {talk.system_tokens:,} tokens for all, then "
        f"{talk.question_tokens} in and {talk.answer_tokens} out"
    )
    measured = f"{both.requests_s:.1f} requests/s"
    yield (
        (
            shape.name,
            what,
            measured,
            f"device alone {alone.requests_s:.1f}",
            _goal(both.requests_s / alone.requests_s, "≥ {:.0f} ×", 3.0),
        ),
        both.as_json(),
    )
    yield (
        (
            shape.name,
            what,
            measured,
            f"unlimited device {unlimited.requests_s:.1f}",
            _goal(both.requests_s / unlimited.requests_s, "≥ {:.0%}", 0.9, share=True),
        ),
        {"alone": alone.as_json(), "unlimited": unlimited.as_json()},
    )


def _peer(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for found in transformers_peer.measure(bed, shape.config):
        beside = found.why[:120]
        if found.seconds is not None:
            times = f"{found.seconds / found.ours_s:.1f} ×"
            beside = f"transformers {_ms(found.seconds)}, {times} {beside}".strip()
        row = (shape.name, found.what, _ms(found.ours_s), beside, "–")
        yield row, found.as_json()


Part = Callable[[Bed, Shape, ceilings.Ceilings], Found]
_PARTS: dict[str, tuple[bool, Part]] = {
    "prefill": (False, _prefill),
    "decode": (False, _decode),
    "ttft": (False, _ttft),
    "write-through": (False, _write_through),
    "generating": (False, _generating),
    "drawing": (False, _drawing),
    "turns": (False, _turns),
    "peer": (False, _peer),
    "ttft-v4": (True, _ttft),
    "write-through-v4": (True, _write_through),
    "sparse": (True, _sparse),
}
"""By name: whether it is of DeepSeek-V4, and what measures it."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _read(found: throughput.Speed) -> str:
    return f"{found.work / 1e9:.1f} GB, {found.work / found.seconds / 1e12:.2f} TB/s"


def _goal(found: float, text: str, goal: float, *, most: bool = False, share: bool = False) -> str:
    reached = found <= goal if most else found >= goal
    value = f"{found:.1%}" if share else f"{found:.2f}"
    return f"{text.format(goal)}: {value}, {'yes' if reached else 'no'}"


def _picture(found: list[dict[str, Any]]) -> str:
    groups = [
        (
            f"{_TITLES[one['model']]}, {one['tokens']:,} tokens",
            {
                place: 1e3 * one[f"{place}_s"]
                for place in ("recompute", "storage", "host", "device")
            },
        )
        for one in found
        if one
    ]
    where = torch.cuda.get_device_name()
    return plot.draw(f"Time to the first token, by where the prefix lies ({where})", groups)
