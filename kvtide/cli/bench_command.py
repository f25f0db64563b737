"""`kvtide bench …`: the benchmarks behind docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any

from kvtide.bench import hitrate, index_cost, step_cost
from kvtide.bench.drafts import draft_cost
from kvtide.cli.bench import (
    bench_codec,
    bench_gpu,
    bench_handoff,
    bench_replay,
    bench_serve,
    bench_sparse,
    bench_speculate,
    bench_storage,
    bench_transfer,
)
from kvtide.cli.console import CommandError, progress, table
from kvtide.engine import EngineError
from kvtide.models.model_errors import CheckpointError
from kvtide.planner import traces, workloads
from kvtide.planner.charts import ChartError
from kvtide.planner.traces import TraceError
from kvtide.spec import SpecError
from kvtide.storage import StoreError
from kvtide.tiers import TierError

LONG_PROMPTS = "rag:requests=96,documents=24,retrieved=1,document=131072,system=0,question=256"


REFUSALS = (
    CheckpointError, CommandError, ChartError, EngineError, SpecError, StoreError, TierError,
    TraceError,
)  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    _add_index(kinds.add_parser("index", help="time per request, memory, growth of the index"))
    bench_transfer.add(
        kinds.add_parser("transfer", help="how fast pages move between device and host")
    )
    bench_gpu.add(kinds.add_parser("gpu", help="how fast models are served on a GPU"))
    bench_serve.add(
        kinds.add_parser(
            "serve", help="TTFT and throughput of a server, with its cache and without"
        )
    )
    bench_storage.add(
        kinds.add_parser("storage", help="how fast a store is, beside its disk or its own library")
    )
    bench_codec.add(
        kinds.add_parser("codec", help="what codecs make of a real model's pages and answers")
    )
    bench_replay.add(
        kinds.add_parser("replay", help="predicted hit rates beside those of an engine")
    )
    _add_step(kinds.add_parser("step", help="the cost of an engine step besides the model"))
    bench_speculate.add(
        kinds.add_parser("speculate", help="decoding with drafts beside decoding without")
    )
    bench_sparse.add(
        kinds.add_parser("sparse", help="pools on the host with hot buffers, beside all on a GPU")
    )
    bench_handoff.add(
        kinds.add_parser("handoff", help="a prefill and a decode server beside one server")
    )
    _add_hitrate(kinds.add_parser("hitrate", help="eviction policies beside the offline optimum"))


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="a trace file")
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME[:OPTION=N,…]",
        help=f"a built-in workload: {', '.join(workloads.WORKLOADS)}; or long: 128k-token prompts",
    )
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _add_index(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "--contestants",
        default="full,window,recurrent,deepseek-v4",
        help="comma-separated; also package.module:Class of another project; ratios to the first",
    )
    parser.add_argument(
        "--capacity", type=float, default=0.2, help="slots as a fraction of the footprint"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--growth",
        default="10000,100000,1000000",
        metavar="PAGES,…",
        help="cached pages at which the cost of a request is measured; empty for none",
    )
    parser.add_argument("--growth-requests", type=int, default=2000)
    parser.add_argument(
        "--draft",
        action="store_true",
        help="measure instead what a draft's pages cost in index and cache",
    )
    parser.set_defaults(run=_run_index)


def _add_hitrate(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--policies", default="lru,lhd,slru,lfu", help="comma-separated policies")
    parser.add_argument(
        "--capacities", default="0.01,0.05,0.2", help="fractions of the footprint, comma-separated"
    )
    parser.set_defaults(run=_run_hitrate)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=32, help="requests that decode together")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_step)


def _sources(args: argparse.Namespace, default: str) -> list[traces.Trace]:
    names = args.workload or ([] if args.trace else [default])
    made = [workloads.parse(LONG_PROMPTS if name == "long" else name) for name in names]
    return [*(traces.load(path) for path in args.trace), *made]


def _numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise CommandError(f"{option} takes numbers separated by commas, not '{text}'") from None


# -- index ----------------------------------------------------------------------------------


def _run_draft(args: argparse.Namespace) -> int:
    found = draft_cost.measure(16, 64, 4 * args.repetitions + 1, progress)
    if args.json:
        print(json.dumps({"draft": found.as_json()}, indent=2))
        return 0
    row = (f"{found.plain_us:.1f}", f"{found.drafted_us:.1f}", f"{found.ratio:.2f}×")
    goal = f"≤ {draft_cost.GOAL:.2f}×" + ("" if found.reached else ", missed")
    print(table(("µs/page without", "µs/page with a draft", "ratio", "goal"), [(*row, goal)]))
    return 0


def _run_index(args: argparse.Namespace) -> int:
    if args.draft:
        return _run_draft(args)
    names = args.contestants.split(",")
    sizes = _numbers(args.growth, "--growth", int)
    for name in names:
        try:
            index_cost.contestant(name)
        except (ValueError, ImportError, AttributeError) as error:
            raise CommandError(str(error)) from None
    results = [_index_of(trace, names, args) for trace in _sources(args, "chat")]
    grown = [
        index_cost.growth(size, args.page_tokens, args.growth_requests, progress) for size in sizes
    ]
    if args.json:
        print(json.dumps({"workloads": results, "growth": [g.as_json() for g in grown]}, indent=2))
        return 0
    for result in results:
        print(_index_table(result))
    if grown:
        print("\ncost of a request as the cache grows (64-page prompts, half known)\n")
        ops = list(grown[0].p50_us)
        rows = [(f"{g.cached_pages:,}", *_costs(g.as_json(), ops)) for g in grown]
        print(table(("cached pages", "µs/request", *_op_names(ops)), rows))
    return 0


def _index_of(trace: traces.Trace, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    footprint = traces.footprint_tokens(trace, args.page_tokens)
    longest = max(len(request.prompt) for request in trace)
    capacity = max(int(args.capacity * footprint), longest + 1024) // 256 * 256
    measured = index_cost.compare(
        trace, names, capacity, args.page_tokens, args.repetitions, progress
    )
    return {
        "workload": trace.name,
        "requests": trace.requests,
        "prompt_tokens": trace.prompt_tokens,
        "footprint_tokens": footprint,
        "capacity_tokens": capacity,
        "page_tokens": args.page_tokens,
        "bytes_per_token": index_cost.bytes_per_token(trace, "full", args.page_tokens, 600),
        "contestants": [m.as_json() for m in measured],
    }


def _index_table(result: dict[str, Any]) -> str:
    measured = result["contestants"]
    ops = list(dict.fromkeys(op for m in measured for op in m["p50_us"]))
    rows = [
        (m["contestant"], f"{m['hit_rate']:.4f}", f"{m['speed']:.2f}×", *_costs(m, ops))
        for m in measured
    ]
    header = ("contestant", "hit rate", "speed", "µs/request", *_op_names(ops))
    return (
        f"\n{result['workload']}: {result['requests']:,} requests, "
        f"{result['prompt_tokens']:,} tokens, footprint {result['footprint_tokens']:,}, capacity "
        f"{result['capacity_tokens']:,}, page {result['page_tokens']}; "
        f"{result['bytes_per_token']:.2f} bytes of index per cached token\n\n" + table(header, rows)
    )


def _op_names(ops: Iterable[str]) -> list[str]:
    return [f"{op} p50/p99 µs" for op in ops]


def _costs(measured: dict[str, Any], ops: Iterable[str]) -> list[str]:
    """Time per request and per operation; contestants may not have all of these operations."""
    p50, p99 = measured["p50_us"], measured["p99_us"]
    shown = [f"{p50[op]:.1f}/{p99[op]:.0f}" if op in p50 else "–" for op in ops]
    return [f"{measured['us_per_request']:.1f}", *shown]


# -- hit rate -------------------------------------------------------------------------------


def _run_hitrate(args: argparse.Namespace) -> int:
    policies = args.policies.split(",")
    fractions = _numbers(args.capacities, "--capacities", float)
    try:
        results = [
            hitrate.compare(trace, policies, fractions, args.page_tokens, progress)
            for trace in _sources(args, "chat")
        ]
    except ValueError as error:
        raise CommandError(str(error)) from None
    if args.json:
        print(json.dumps([result.as_json() for result in results], indent=2))
        return 0
    for result in results:
        print(_hitrate_table(result, policies))
    return 0


def _hitrate_table(result: hitrate.Comparison, policies: list[str]) -> str:
    rows = [
        (
            f"{row.fraction:.1%}",
            *(f"{row.hit_rates[name]:.4f}" for name in policies),
            f"{row.optimum:.4f}",
            *(f"{row.gap_closed(name):+.1%}" for name in policies[1:]),
        )
        for row in result.rows
    ]
    closed = [f"{name}: gap closed" for name in policies[1:]]
    header = ("capacity", *policies, "offline optimum", *closed)
    return f"\n{result.workload}: token hit rate, unlimited {result.unlimited:.4f}\n\n" + table(
        header, rows
    )


# -- step -----------------------------------------------------------------------------------


def _run_step(args: argparse.Namespace) -> int:
    if min(args.batch, args.prompt_tokens, args.steps) < 1:
        raise CommandError("bench step: --batch, --prompt-tokens and --steps must be at least 1")
    names = progress(step_cost.MEMORIES, len(step_cost.MEMORIES), "memories")
    costs = [step_cost.measure(name, args.batch, args.prompt_tokens, args.steps) for name in names]
    if args.json:
        print(json.dumps([cost.as_json() for cost in costs], indent=2))
        return 0
    header = ("memory", "batch", "p50 ms", "p99 ms", "goal", "reached")
    goal, reached = f"< {step_cost.GOAL_MS:g} ms", ("no", "yes")
    rows = [
        (c.memory, c.batch, f"{c.p50_ms:.2f}", f"{c.p99_ms:.2f}", goal, reached[c.reached])
        for c in costs
    ]
    print(table(header, rows))
    return 0
