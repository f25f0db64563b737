"""Resident memory of prefix indexes per cached token, each in a process of its own.

`total` is the growth from before the index is built, slots included; `tree` from after it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.bench.index_cost import contestant
from kvtide.cli.console import table
from kvtide.planner import traces, workloads

CONTESTANTS = (
    "full,window,recurrent,deepseek-v4,deepseek-v4-learned,"
    "sglang_index:SglangRadix,sglang_index:SglangFull,sglang_index:SglangWindow,"
    "sglang_index:SglangRecurrent"
)
WARM_UP_REQUESTS, WARM_UP_TOKENS = 20, 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", metavar="FILE", help="a trace file; without one, the chat load")
    parser.add_argument("--requests", type=int, default=600, help="the first so many of the trace")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--contestants", default=CONTESTANTS)
    parser.add_argument("--measure", metavar="CONTESTANT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_measured(args.measure, _prompts(args), args.page_tokens)))
        return 0
    rows = []
    for name in args.contestants.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append((name, "failed: " + done.stderr.strip().splitlines()[-1], "", ""))
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        cached, total, tree = found["cached"], found["total_bytes"], found["tree_bytes"]
        rows.append((name, f"{cached:,}", f"{total / cached:.2f}", f"{tree / cached:.2f}"))
    print(table(("contestant", "cached tokens", "total B/token", "tree B/token"), rows))
    return 0


def _prompts(args: argparse.Namespace) -> list[Any]:
    trace = traces.load(args.trace) if args.trace else workloads.parse("chat")
    return [request.prompt.astype(np.int64) for request in islice(trace, args.requests)]


def _measured(name: str, prompts: list[Any], page: int) -> dict[str, int]:
    build = contestant(name)
    warm = build(1 << 18, page)
    _replay(warm, [prompt[:WARM_UP_TOKENS] for prompt in prompts[:WARM_UP_REQUESTS]])
    warm.close()
    keys = [traces.prefix_keys(prompt, page) for prompt in prompts]
    footprint = len(np.unique(np.concatenate(keys))) * page
    before = _resident_bytes()
    made = build((int(footprint * 1.03) + (1 << 18)) // 4096 * 4096, page)
    built = _resident_bytes()
    _replay(made, prompts)
    filled = _resident_bytes()
    cached = int(made.cached_tokens())
    return {"cached": cached, "total_bytes": filled - before, "tree_bytes": filled - built}


def _replay(made: Any, prompts: list[Any]) -> None:
    for number, prompt in enumerate(prompts):
        timings: dict[str, list[int]] = defaultdict(list)
        made.finish(made.start(made.prepare(number, prompt), timings), timings)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
