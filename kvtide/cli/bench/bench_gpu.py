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
    constrained,
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
from kvtide.models.tokenizer import Tokenizer, read_tokenizer
from kvtide.server.ranks.rank_processes import freeze_gc

TableRows = list[tuple[str, str, str, str, str]]
_TITLES = {
    "qwen3-8b": "Qwen3-8B",
    "deepseek-v4-flash": "DeepSeek-V4-Flash (12 layers, 32 experts)",
}
_HEADER = ("model", "benchmark", "measured", "reference", "goal: value, reached")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default=",".join(_BENCHMARKS),
        metavar="NAME,…",
        help=f"some of {', '.join(_BENCHMARKS)}",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a bar chart of the TTFT (SVG)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="constrained: the vocabulary of this tokenizer.json instead of SmolLM2's",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CommandError("bench gpu needs a CUDA device and a torch that is built for it")
    wanted = args.only.split(",")
    if unknown := set(wanted) - _BENCHMARKS.keys():
        raise CommandError(
            f"bench gpu: {sorted(unknown)} is not known; use {', '.join(_BENCHMARKS)}"
        )
    tokenizer = _tokenizer(args.tokenizer)
    device = torch.device("cuda", 0)
    best = ceilings.measure(device)
    print(_machine(device, best), flush=True)
    failed: list[str] = []
    numbers: dict[str, Any] = {"ceilings": best.as_json(), "failed": failed}
    shown: TableRows = []
    for shape, kinds in _by_model(wanted):
        bed = Bed(shape.build(device, torch.bfloat16), device, tokenizer)
        freeze_gc()  # As a server does.
        for kind in progress(kinds, len(kinds), shape.name):
            try:
                for row, found in _BENCHMARKS[kind][1](bed, shape, best):
                    print(" | ".join(row), flush=True)
                    shown.append(row)
                    numbers.setdefault(kind, []).append(found)
                    _write(args, numbers)
            except Exception:  # The other benchmarks still run.
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
        print(f"failed (tracebacks above): {', '.join(failed)}")
    return 1 if failed else 0


def _tokenizer(file: Path | None) -> Tokenizer | None:
    return None if file is None else read_tokenizer({"tokenizer.json": file}, {})


def _write(args: argparse.Namespace, numbers: dict[str, Any]) -> None:
    """Write the results so far, so that an interrupted run keeps them."""
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))
    if args.plot:
        args.plot.write_text(_chart([*numbers.get("ttft", ()), *numbers.get("ttft-v4", ())]))


def _by_model(wanted: list[str]) -> Iterator[tuple[Shape, list[str]]]:
    for shape, is_v4 in ((qwen3_8b(), False), (deepseek_v4_flash(), True)):
        kinds = [kind for kind in wanted if _BENCHMARKS[kind][0] is is_v4]
        if kinds:
            yield shape, kinds


def _machine(device: torch.device, best: ceilings.Ceilings) -> str:
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python "
        f"{platform.python_version()}: GEMM {best.flops / 1e12:.0f} TFLOPS, memory "
        f"{best.bytes_s / 1e12:.2f} TB/s, link {best.link_bytes_s / 1e9:.1f} GB/s"
    )


# -- benchmarks -------------------------------------------------------------------------------

Found = Iterator[tuple[tuple[str, str, str, str, str], dict[str, Any]]]


def _ttft(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    tokens, min_speedup = (65_536, 15.0) if "v4" in shape.name else (16_384, 8.0)
    found = ttft.measure(bed, shape.name, tokens, best, 2)
    what = f"TTFT of {tokens:,} tokens, prefix on the host"
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
            _goal(found.of_bound, "≤ {:.2f} × the larger", 1.15, at_most=True),
        ),
        found.as_json(),
    )
    reference = f"recompute {_ms(found.recompute_s)}, storage {_ms(found.storage_s)}"
    yield (
        (
            shape.name,
            what,
            _ms(found.host_s),
            reference,
            _goal(found.times_faster, "≥ {:.0f} × recompute", min_speedup),
        ),
        {},
    )


def _prefill(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = throughput.prefill(bed, shape.config, 8192, best)
    reference = f"{found.work / found.seconds / 1e12:.0f} of {best.flops / 1e12:.0f} TFLOPS"
    goal = _goal(found.utilization, "≥ {:.0%} of GEMM", 0.5, percent=True)
    yield (shape.name, found.what, _ms(found.seconds), reference, goal), found.as_json()


def _decode(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for batch, context in ((1, 2048), (64, 2048)):
        found = throughput.decode(bed, shape.config, batch, context, best, 128)
        goal = _goal(found.utilization, "≥ {:.0%} of memory", 0.65, percent=True)
        yield (shape.name, found.what, _ms(found.seconds), _bandwidth(found), goal), found.as_json()


def _decode_v4(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for batch in (1, 16, 64):
        found = throughput.decode_v4(bed, shape.config, batch, 131_072, best)
        goal = _goal(found.utilization, "≥ {:.0%} of memory", 0.5, percent=True)
        yield (shape.name, found.what, _ms(found.seconds), _bandwidth(found), goal), found.as_json()


def _write_through(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.write_through_prefill(bed, 16_384, 2, 4)
    reference = f"no host tier {_ms(found.off_s)}"
    goal = _goal(found.relative_speed, "≥ {:.0%} of the speed without", 0.98, percent=True)
    yield (shape.name, found.what, _ms(found.on_s), reference, goal), found.as_json()


def _decode_with_backup(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.decode_with_backup(bed, 64, 1024, 192, 5)
    reference = f"no host tier {_ms(found.off_s)}"
    goal = _goal(found.relative_speed, "≥ {:.0%} of the speed without", 0.99, percent=True)
    yield (shape.name, found.what, _ms(found.on_s), reference, goal), found.as_json()


def _sampling(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = overheads.sampling(bed, 64, 1024, 128, 3)
    reference = f"greedy {_ms(found.off_s)}, {found.relative_speed:.1%} of its speed"
    yield (shape.name, found.what, _ms(found.on_s), reference, "–"), found.as_json()


def _constrained(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    found = constrained.measure(bed, 64, 1024, 128, 3)
    reference = f"free {_ms(found.off_s)}; masks {_ms(found.masks_s)} of the host's time"
    goal = _goal(found.relative_speed, "≥ {:.0%} of the speed without", 0.95, percent=True)
    yield (shape.name, found.what, _ms(found.on_s), reference, goal), found.as_json()


def _multi_turn(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    load = multi_turn.MultiTurnLoad()
    both, alone, unlimited = multi_turn.measure(bed, load)
    what = (
        f"multi-turn, {load.users} users × {load.turns} turns of {load.question_tokens} in and "
        f"{load.answer_tokens} out, system prompt {load.system_tokens:,}"
    )
    measured = f"{both.requests_s:.1f} requests/s"
    yield (
        (
            shape.name,
            what,
            measured,
            f"no host tier {alone.requests_s:.1f}",
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
            _goal(both.requests_s / unlimited.requests_s, "≥ {:.0%}", 0.9, percent=True),
        ),
        {"no_host_tier": alone.as_json(), "unlimited_device": unlimited.as_json()},
    )


def _transformers(bed: Bed, shape: Shape, best: ceilings.Ceilings) -> Found:
    for found in transformers_peer.measure(bed, shape.config):
        reference = found.why[:120]
        if found.transformers_s is not None:
            times = f"{found.transformers_s / found.kvtide_s:.1f} ×"
            reference = f"transformers {_ms(found.transformers_s)}, {times} {reference}".strip()
        row = (shape.name, found.what, _ms(found.kvtide_s), reference, "–")
        yield row, found.as_json()


Benchmark = Callable[[Bed, Shape, ceilings.Ceilings], Found]
_BENCHMARKS: dict[str, tuple[bool, Benchmark]] = {
    "prefill": (False, _prefill),
    "decode": (False, _decode),
    "ttft": (False, _ttft),
    "write-through": (False, _write_through),
    "decode-with-backup": (False, _decode_with_backup),
    "sampling": (False, _sampling),
    "constrained": (False, _constrained),
    "multi-turn": (False, _multi_turn),
    "transformers": (False, _transformers),
    "ttft-v4": (True, _ttft),
    "write-through-v4": (True, _write_through),
    "decode-v4": (True, _decode_v4),
}
"""By `--only` name: whether the model is DeepSeek-V4, and the benchmark."""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _bandwidth(found: throughput.ThroughputResult) -> str:
    return f"{found.work / 1e9:.1f} GB, {found.work / found.seconds / 1e12:.2f} TB/s"


def _goal(
    found: float, text: str, goal: float, *, at_most: bool = False, percent: bool = False
) -> str:
    reached = found <= goal if at_most else found >= goal
    value = f"{found:.1%}" if percent else f"{found:.2f}"
    return f"{text.format(goal)}: {value}, {'yes' if reached else 'no'}"


def _chart(found: list[dict[str, Any]]) -> str:
    groups = [
        (
            f"{_TITLES[one['model']]}, {one['tokens']:,} tokens",
            {tier: 1e3 * one[f"{tier}_s"] for tier in ("recompute", "storage", "host", "device")},
        )
        for one in found
        if one
    ]
    where = torch.cuda.get_device_name()
    return plot.draw(f"TTFT by the tier that holds the prefix ({where})", groups)
