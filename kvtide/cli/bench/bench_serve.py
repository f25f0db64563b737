"""`kvtide bench serve`: conversations or an agent over HTTP, with the cache and without it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from kvtide.bench import conversations
from kvtide.bench.conversations import DraftCounts, Held, Load, Phase, Reply, StreamEvent, Turn
from kvtide.bench.tool_loop import AgentLoad
from kvtide.cli.bench import bench_agent, bench_http
from kvtide.cli.bench.bench_report import figure
from kvtide.cli.client import (
    DETAILS,
    KEY_VARIABLE,
    CutError,
    Json,
    ServerClient,
    ServerError,
    Usage,
    serving,
)
from kvtide.cli.console import CommandError, progress, table
from kvtide.planner import charts
from kvtide.planner.chart_data import Curve, Series

SIZE_STEP_TOKENS = 256
"""The tiers' sizes are multiples of this, whatever the pages are."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Multi-turn conversations with a server, alternately with its cache and without. Without "
        "--url the server is started for this, with a device tier too small for all conversations; "
        "arguments after -- go to `kvtide serve`."
    )
    parser.add_argument("--users", type=int, default=6, help="conversations (6)")
    parser.add_argument(
        "--at-once", type=int, help="users who wait for an answer at the same time (2)"
    )
    parser.add_argument(
        "--agent",
        action="store_true",
        help="one session of tool calls instead, each turn with the cache and without",
    )
    parser.add_argument(
        "--turns", type=int, help="questions of each user (4), or tool calls of the agent (50)"
    )
    parser.add_argument("--result-words", type=int, default=64, help="of a tool, for an agent (64)")
    parser.add_argument("--system-tokens", type=int, default=256, help="what all share (256)")
    parser.add_argument("--question-tokens", type=int, default=96, help="(96)")
    parser.add_argument("--answer-tokens", type=int, default=16, help="(16)")
    parser.add_argument(
        "--think-seconds", type=float, default=0.0, help="between an answer and a question (0)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="each with and without cache (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key", metavar="KEY", help=f"its key; else {KEY_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", metavar="DIR", help="write serve.png and serve.json there")
    bench_http.add(parser)
    parser.add_argument(
        "arguments", nargs="*", metavar="-- …", help="arguments of `kvtide serve`, without --url"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.agent:
        return _run_agent(args)
    load = _load(args)
    if bench_http.is_wanted(args):
        return _run_beside_engine(load, args)
    folder = _folder(args.output)
    try:
        result = _measure(load, args)
    except KeyboardInterrupt:
        return 130
    if folder is not None:
        charts.write(
            {
                folder / "serve.png": charts.png(_curve(result)),
                folder / "serve.json": json.dumps(result, indent=2).encode(),
            }
        )
    print(json.dumps(result, indent=2) if args.json else _report(result))
    return 0


def _run_agent(args: argparse.Namespace) -> int:
    turns = 50 if args.turns is None else args.turns
    for name, value in (("turns", turns), ("result-words", args.result_words)):
        if value < 1:
            raise CommandError(f"--{name} must be at least 1")
    if args.output is not None:
        raise CommandError("--output has no chart of an agent; drop it, and use --json")
    _only_one_server(args)
    load = AgentLoad(turns=turns, result_words=args.result_words, seed=args.seed)
    ticks = progress(range(turns), turns, "turns")
    next(ticks)
    tokens = bench_agent.longest_tokens(load)
    try:
        with _server(args, tokens, tokens) as (client, described, command):
            found = bench_agent.measure(client, load, lambda: next(ticks, None))
    except KeyboardInterrupt:
        return 130
    result = {"command": command, "served": described, **found}
    print(json.dumps(result, indent=2) if args.json else bench_agent.report(result))
    return 0


def _run_beside_engine(load: Load, args: argparse.Namespace) -> int:
    ticks = progress(range(2 * args.rounds), 2 * args.rounds, "rounds")
    next(ticks)
    try:
        result = bench_http.run(load, args, lambda: next(ticks, None))
    except bench_http.REFUSALS as refusal:
        raise CommandError(str(refusal)) from None
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if args.json else bench_http.report(result))
    return 0


def _load(args: argparse.Namespace) -> Load:
    args.turns = 4 if args.turns is None else args.turns
    if bench_http.is_wanted(args):
        bench_http.check(args)
        args.at_once = args.users
    args.at_once = 2 if args.at_once is None else args.at_once
    counts = ("users", "turns", "system_tokens", "question_tokens", "answer_tokens", "rounds")
    for name in (*counts, "at_once"):
        if getattr(args, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.think_seconds < float("inf"):
        raise CommandError("--think-seconds must be at least 0")
    _only_one_server(args)
    return Load(
        args.users,
        args.turns,
        args.system_tokens,
        args.question_tokens,
        args.answer_tokens,
        min(args.at_once, args.users),
        args.think_seconds,
        args.seed,
    )


def _only_one_server(args: argparse.Namespace) -> None:
    if args.url is not None and args.arguments:
        raise CommandError(
            f"'{args.arguments[0]}' is for a server started here, and --url names one that runs; "
            "drop one of them"
        )


def _folder(named: str | None) -> Path | None:
    """Where files are to go, made before anything is measured."""
    if named is None:
        return None
    charts.check_png()
    folder = Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"--output {named}: {error.strerror}; name a folder that can be written to"
        ) from None
    return folder


# -- measuring --------------------------------------------------------------------------------


def _measure(load: Load, args: argparse.Namespace) -> Json:
    """The device holds all concurrent requests even if they share nothing, so that none waits for
    memory without the cache. The host holds all conversations."""
    each = -(-load.longest_tokens // SIZE_STEP_TOKENS) * SIZE_STEP_TOKENS
    with _server(args, load.at_once * each, load.users * each) as (client, described, command):
        return _result(load, args, client, described, command)


@contextmanager
def _server(
    args: argparse.Namespace, device_tokens: int, host_tokens: int
) -> Iterator[tuple[ServerClient, str, str]]:
    """A client of the server under test; with what it says of itself and its command, if it is
    started here."""
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    if args.url is not None:
        yield ServerClient(args.url, key), "", ""
        return
    sizes = {"--device": device_tokens, "--host": host_tokens}
    arguments = [*_sizes(sizes, args.arguments), *args.arguments]
    with serving(arguments, key) as server:
        command = shlex.join(["kvtide", "serve", *arguments])
        yield ServerClient(server.url, key), server.described, command


def _sizes(wanted: Mapping[str, int], given: Sequence[str]) -> list[str]:
    """Tiers for a fair comparison, unless they are given. Nothing is stored: a second run would
    find the pages of the first."""
    sized = [tier for tier in wanted if any(word.startswith(f"{tier}-") for word in given)]
    stored = any(word.split("=")[0] == "--storage" for word in given)
    return [
        *([] if stored else ["--storage", "none"]),
        *(
            word
            for tier, tokens in wanted.items()
            if tier not in sized
            for word in (f"{tier}-tokens", str(tokens))
        ),
    ]


def _result(
    load: Load, args: argparse.Namespace, client: ServerClient, described: str, command: str
) -> Json:
    total = 2 * args.rounds * load.users * load.turns
    name, held = asyncio.run(_converse(client, load, args.rounds, _ticker(total)))
    on, off = (conversations.figures(phase, held).as_json() for phase in Phase)
    return {
        "model": name,
        "served": described or f"{name} at {client.url}",
        "command": command,
        "load": {**asdict(load), "rounds": args.rounds},
        "on": on,
        "off": off,
        "on_to_off": {
            **{row: _ratio(figure(on, ROWS[row]), figure(off, ROWS[row])) for row in ROWS},
            "TTFT p50 by turn": [
                _ratio(*(turn["p50"] for turn in turns))
                for turns in zip(on["ttft_ms_by_turn"], off["ttft_ms_by_turn"], strict=True)
            ],
        },
        "events": [event.as_json() for one in held for event in one.events],
    }


def _ticker(total: int) -> Callable[[StreamEvent], None]:
    """Progress that goes on with every turn that was answered."""
    ticks = progress(range(total), total, "turns")
    next(ticks)

    def tick(event: StreamEvent) -> None:
        next(ticks, None)

    return tick


async def _converse(
    client: ServerClient, load: Load, rounds: int, on_event: Callable[[StreamEvent], None]
) -> tuple[str, list[Held]]:
    """The model's name, and the measured phases."""
    salt = secrets.token_hex(8)

    async def ask(turn: Turn) -> Reply:
        return await _ask(client, turn, salt)

    try:
        async with client:
            return await client.model(), await conversations.measure(load, rounds, ask, on_event)
    except ServerError as error:
        raise CommandError(str(error)) from None


async def _ask(client: ServerClient, turn: Turn, salt: str) -> Reply:
    """A turn over HTTP. The salt keeps runs apart that meet on one server."""
    body = {
        "prompt": turn.prompt,
        "max_tokens": turn.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
        "recompute": turn.phase is Phase.OFF,
        **DETAILS,
    }
    tokens: list[int] = []
    times: list[float] = []
    by_tier: Mapping[str, int] = {}
    drafts: DraftCounts | None = None
    began = time.perf_counter()
    async for chunk in client.stream("/v1/completions", body):
        new = [token for choice in chunk["choices"] for token in choice.get("token_ids", ())]
        if new:
            tokens += new
            times.append(time.perf_counter())
        if chunk.get("usage"):
            usage = Usage.read(chunk["usage"])
            by_tier = usage.by_tier
            if usage.verify_steps is not None:
                drafts = DraftCounts(
                    usage.verify_steps, usage.accepted_drafts, usage.rejected_drafts
                )
    if not tokens:
        raise CutError("it has no token ids; use a server that `kvtide serve` started")
    return Reply(tuple(tokens), began, times[0], times[-1], by_tier, drafts)


# -- report -----------------------------------------------------------------------------------

ROWS = {
    "TTFT p50 ms": ("ttft_ms", "p50"),
    "TTFT p90 ms": ("ttft_ms", "p90"),
    "TTFT p99 ms": ("ttft_ms", "p99"),
    "TPOT p50 ms": ("tpot_ms", "p50"),
    "TPOT p99 ms": ("tpot_ms", "p99"),
    "requests/s": ("requests_s",),
    "prompt tokens/s": ("prompt_tokens_s",),
    "generated tokens/s": ("generated_tokens_s",),
}
"""Rows of the table, and where a phase's figures have them."""


def _ratio(on: float | None, off: float | None) -> float | None:
    return on / off if on is not None and off else None


def _report(result: Json) -> str:
    load, on, off = result["load"], result["on"], result["off"]
    each = f"{load['users']} users, {load['at_once']} at once, {load['turns']} turns"
    tokens = (
        f"{load['system_tokens']} system tokens, {load['question_tokens']} per question, "
        f"{load['answer_tokens']} per answer"
    )
    return "\n".join(
        [
            "",
            *filter(None, [result["command"], result["served"]]),
            f"{each}; {tokens}; {load['rounds']} rounds with cache and without in turns, "
            f"{on['requests']} requests in {on['seconds']:.0f} s and {off['seconds']:.0f} s",
            "",
            _phase_table(result),
            "",
            _turn_table(result),
        ]
    )


def _phase_table(result: Json) -> str:
    on, off, ratios = result["on"], result["off"], result["on_to_off"]
    rows = [
        (row, *(_number(figure(phase, ROWS[row])) for phase in (on, off)), _times(ratios[row]))
        for row in ROWS
    ]
    hits = [
        (f"prompt from {tier}", f"{fraction:.1%}", f"{off['hits'].get(tier, 0.0):.1%}", "–")
        for tier, fraction in on["hits"].items()
    ]
    drafts = _draft_rows(on, off) if on["drafts"] is not None else []
    return table(("all turns", "cache on", "cache off", "on/off"), [*rows, *hits, *drafts])


def _draft_rows(on: Json, off: Json) -> list[tuple[str, ...]]:
    """Of a server that speculates."""
    lengths = [phase["accept_length"] for phase in (on, off)]
    rows: list[tuple[str, ...]] = [
        ("accept length", *map(_number, lengths), _times(_ratio(*lengths)))
    ]
    for verdict in ("accepted", "rejected"):
        counts = (f"{phase['drafts'][verdict]:,}" for phase in (on, off))
        rows.append((f"drafts {verdict}", *counts, "–"))
    return rows


def _turn_table(result: Json) -> str:
    ratios = result["on_to_off"]["TTFT p50 by turn"]
    turns = zip(result["on"]["ttft_ms_by_turn"], result["off"]["ttft_ms_by_turn"], strict=True)
    rows = [
        (
            number + 1,
            *(_number(phase[name]) for phase in both for name in ("p50", "p90", "p99")),
            _times(ratios[number]),
        )
        for number, both in enumerate(turns)
    ]
    names = [f"{phase} {name}" for phase in ("on", "off") for name in ("p50", "p90", "p99")]
    return table(("TTFT ms, turn", *names, "on/off p50"), rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def _curve(result: Json) -> Curve:
    """The median TTFT by turn, with the cache and without."""
    series = []
    for phase in ("on", "off"):
        medians = [turn["p50"] for turn in result[phase]["ttft_ms_by_turn"]]
        series.append(Series(f"cache {phase}", tuple(range(1, len(medians) + 1)), tuple(medians)))
    return Curve(
        title=f"{result['model']}: TTFT with cache and without",
        x_label="turn",
        y_label="ms, median",
        series=tuple(series),
    )
