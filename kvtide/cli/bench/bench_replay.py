"""`kvtide bench replay`: predicted hit rates beside those of an engine."""

from __future__ import annotations

import argparse
import json
from itertools import product

from kvtide.bench import planned_and_served
from kvtide.bench.planned_and_served import GOAL_POINTS, Replayed, Sizes
from kvtide.bench.step_cost import MEMORIES, PAGE, VOCABULARY
from kvtide.cli.console import CommandError, progress, table
from kvtide.planner import traces, workloads
from kvtide.planner.study import BRANCH, COST, LAST, Checkpoints, every

_WORKLOAD = "agent:sessions=8,requests=8,system=4000,start=8000,extension=300,context=20000"
_WAYS = (COST, LAST, BRANCH, every(32, PAGE))


def add(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_mutually_exclusive_group()
    traffic.add_argument("--trace", metavar="FILE", help="a recorded trace")
    traffic.add_argument("--workload", default=_WORKLOAD, metavar="W", help=f"({_WORKLOAD})")
    parser.add_argument("--requests", type=int, default=200, help="how many of its first ones")
    parser.add_argument(
        "--device", type=float, default=0.25, help="its pages, as a fraction of all prompt tokens"
    )
    parser.add_argument("--host", type=float, default=0.5, help="the host's; 0 for none")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="maximum tokens of a step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.requests < 1 or args.chunk_tokens < 1 or args.device <= 0 or args.host < 0:
        raise CommandError("bench replay: --requests, --chunk-tokens and --device must be above 0")
    trace = traces.load(args.trace) if args.trace else workloads.parse(args.workload)
    requests = planned_and_served.thinned(trace, args.requests, 1, VOCABULARY)
    total = sum(len(request.prompt) for request in requests)
    longest = max(len(request.prompt) for request in requests)
    min_tokens = longest + 4 * PAGE
    sizes = Sizes(
        max(int(args.device * total), min_tokens),
        max(int(args.host * total), min_tokens) if args.host else 0,
        args.chunk_tokens,
    )
    cases = list(_cases())
    results = [
        planned_and_served.compare(planned_and_served.idle(name), requests, sizes, way)
        for name, way in progress(cases, len(cases), "memories and checkpoints")
    ]
    print(json.dumps([r.as_json() for r in results], indent=2) if args.json else _table(results))
    return 0


def _cases() -> list[tuple[str, Checkpoints]]:
    """Where every page can be resumed at there are no checkpoints to place."""
    return [(name, way) for name, way in product(MEMORIES, _WAYS) if name != "full" or way is COST]


def _table(results: list[Replayed]) -> str:
    first = results[0]
    header = ("memory", "checkpoints", "planned", "served", "points", "goal", "reached")
    rows = [
        (
            result.memory,
            result.checkpoints if result.memory != "full" else "–",
            f"{result.planned_rate:.2%}",
            f"{result.served_rate:.2%}",
            f"{result.points:+.2f}",
            f"± {GOAL_POINTS:g}",
            ("no", "yes")[abs(result.points) <= GOAL_POINTS],
        )
        for result in results
    ]
    title = f"{first.requests:,} requests with {first.prompt_tokens:,} prompt tokens"
    return f"{title}: token hit rates\n\n{table(header, rows)}"
