"""`kvtide bench serve --beside-engine`: a load over HTTP beside the same on the engine alone."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from kvtide.bench.conversations import Load
from kvtide.bench.http.both_ways import ClientError, LoadWay, ServedBed, measure
from kvtide.bench.http.stand_in import CHUNK_TOKENS, StepTime, stand_in_server
from kvtide.bench.http.turn_times import way_figures
from kvtide.cli.bench.bench_report import figure
from kvtide.cli.console import CommandError, table
from kvtide.engine import RequestError
from kvtide.server import setting_sources
from kvtide.server.ranks.rank_processes import freeze_gc
from kvtide.server.settings import Settings
from kvtide.server.setup import engine_setup

GOAL = 0.97
"""Of the engine's requests per second."""

REFUSALS = (*engine_setup.REFUSALS, RequestError, ClientError)
"""What `run` raises where settings, model and load do not fit."""

Json = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beside-engine",
        action="store_true",
        help="instead the same load over HTTP and on the engine alone, in turns",
    )
    parser.add_argument(
        "--stand-in-ms",
        type=float,
        metavar="MS",
        help="the same with a model that computes nothing, on a device whose step takes so long",
    )
    parser.add_argument(
        "--stand-in-token-us", type=float, default=25.0, metavar="US", help="and each token (25)"
    )


def is_wanted(args: argparse.Namespace) -> bool:
    return bool(args.beside_engine or args.stand_in_ms is not None)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured both ways."""
    if args.stand_in_ms is not None and not (args.stand_in_ms > 0 <= args.stand_in_token_us):
        raise CommandError("--stand-in-ms must be above 0, and --stand-in-token-us at least 0")
    if args.think_seconds or args.at_once is not None:
        raise CommandError(
            "users beside the engine ask again at once; drop --at-once and --think-seconds"
        )
    if args.output is not None:
        raise CommandError("--output has no chart of both ways; drop it, and use --json")
    if args.url is not None:
        raise CommandError("the engine of another process cannot be stepped here; drop --url")


def run(load: Load, args: argparse.Namespace, tick: Callable[[], object]) -> Json:
    """The figures of both ways; `tick` is called after every round."""
    words = _arguments(load, args)
    settings = _settings(words, args)
    threads = torch.get_num_threads()
    if args.stand_in_ms is None:
        serving = engine_setup.open_engine(settings)
        device = settings.device
    else:
        times = StepTime(args.stand_in_ms / 1e3, args.stand_in_token_us / 1e6)
        serving = stand_in_server(load, times, settings)
        device = f"a stand-in: {args.stand_in_ms:g} ms and {args.stand_in_token_us:g} µs per token"
        torch.set_num_threads(1)  # The tensors are tiny; more threads would wait for each other.
    try:
        freeze_gc()
        found = measure(ServedBed(settings, serving), load, args.rounds, tick)
    finally:
        torch.set_num_threads(threads)
        serving.engine.cache.close()
    figures = {way: way_figures(rounds).as_json() for way, rounds in found.items()}
    pairs = zip(found[LoadWay.HTTP], found[LoadWay.ENGINE], strict=True)
    ratios = [http.requests_s / engine.requests_s for http, engine in pairs]
    return {
        "command": shlex.join(["kvtide", "serve", *words]),
        "model": serving.name,
        "device": device,
        "batch": serving.batch,
        "load": {**asdict(load), "rounds": args.rounds},
        "engine": figures[LoadWay.ENGINE],
        "http": figures[LoadWay.HTTP],
        "http_to_engine": statistics.median(ratios),
        "rounds": ratios,
    }


def _arguments(load: Load, args: argparse.Namespace) -> list[str]:
    """Those after `--`, with a device tier for all conversations, and a queue for all users."""
    sized = [word for word in args.arguments if word.startswith("--device-")]
    tokens = load.system_tokens + load.users * (load.longest_tokens - load.system_tokens + 256)
    return [
        *("--storage", "none", "--max-waiting", str(load.users)),
        *(() if sized else ("--device-tokens", str(-(-tokens // 256) * 256))),
        *(("--chunk-tokens", str(CHUNK_TOKENS)) if args.stand_in_ms is not None else ()),
        *args.arguments,
    ]


def _settings(words: Sequence[str], args: argparse.Namespace) -> Settings:
    parser = argparse.ArgumentParser(prog="kvtide serve", allow_abbrev=False)
    setting_sources.add_flags(parser)
    settings = setting_sources.read(vars(parser.parse_args([*words])), os.environ)
    if settings.ranks > 1:
        raise CommandError("beside the engine there is one rank; drop --tp and --pp")
    if args.stand_in_ms is not None and settings.model is not None:
        raise CommandError("a stand-in computes nothing; drop the model, or --stand-in-ms")
    return settings


# -- report -----------------------------------------------------------------------------------

ROWS: dict[str, Sequence[str]] = {
    "requests/s": ("requests_s",),
    "generated tokens/s": ("generated_tokens_s",),
    "TTFT p50 ms": ("ttft_ms", "p50"),
    "TTFT p99 ms": ("ttft_ms", "p99"),
    "TTFT max ms": ("ttft_max_ms",),
    "TPOT p50 ms": ("tpot_ms", "p50"),
    "TPOT p99 ms": ("tpot_ms", "p99"),
    "ms per step": ("step_ms",),
    "fairness (Jain)": ("fairness",),
    "slowest user / mean": ("slowest",),
    "CPU ms of the server per request": ("server_cpu_ms",),
    "busiest client process": ("client_busy",),
}


def report(result: Json) -> str:
    load, engine, http = result["load"], result["engine"], result["http"]
    rows = []
    for row, names in ROWS.items():
        left, right = (figure(each, names) for each in (engine, http))
        ratio = "–" if not left or right is None else f"{right / left:.3f}×"
        rows.append((row, _number(left), _number(right), ratio))
    ratio, rounds = result["http_to_engine"], ", ".join(f"{r:.1%}" for r in result["rounds"])
    goal = f"≥ {GOAL:.0%} of the engine's requests/s: {ratio:.1%}, median of {rounds}: "
    return "\n".join(
        [
            "",
            f"{result['command']}; {result['model']} on {result['device']}",
            result["batch"],
            f"{load['users']} users, {load['turns']} turns; {load['system_tokens']} system tokens, "
            f"{load['question_tokens']} per question, {load['answer_tokens']} per answer; "
            f"{load['rounds']} rounds each way in turns, {http['requests']} requests",
            "",
            table(("", "engine alone", "over HTTP", "HTTP/engine"), rows),
            "",
            goal + ("yes" if ratio >= GOAL else "no"),
        ]
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
