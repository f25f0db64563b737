"""Token hit rate of eviction policies on one trace: ours, SGLang's, a simulated LRU, the optimum.

The simulated LRU works on single pages and touches the whole path of a prompt, deepest page first.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict

from kvtide.bench import hitrate, index_cost
from kvtide.cli.console import progress, table
from kvtide.planner import traces, workloads

PEERS = "sglang_index:SglangRadix,sglang_index:SglangRadixSlru,sglang_index:SglangRadixLfu"
OURS = ("lru",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", metavar="FILE", help="a trace file; without one, --workload")
    parser.add_argument("--workload", default="chat", metavar="NAME[:OPTION=N,…]")
    parser.add_argument("--capacities", default="0.01,0.05,0.2", help="fractions of the footprint")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--contestants", default=PEERS, help="package.module:Class, by commas")
    args = parser.parse_args()
    trace = traces.load(args.trace) if args.trace else workloads.parse(args.workload)
    page, peers = args.page_tokens, args.contestants.split(",")
    fractions = [float(part) for part in args.capacities.split(",")]
    found = hitrate.compare(trace, OURS, fractions, page, progress)
    rows = []
    for row in found.rows:
        measured = index_cost.compare(trace, peers, row.capacity_tokens, page, 1, progress)
        rates = [row.hit_rates[name] for name in OURS] + [one.hit_rate for one in measured]
        rates += [simulated_lru(trace, row.capacity_tokens // page, page), row.optimum]
        rows.append((f"{row.fraction:.1%}", *(f"{rate:.4f}" for rate in rates)))
    header = ("capacity", *OURS, *(name.rpartition(":")[2] for name in peers))
    print(f"\n{trace.name}: token hit rate, page {page}, unlimited {found.unlimited:.4f}\n")
    print(table((*header, "simulated LRU", "offline optimum"), rows))
    return 0


def simulated_lru(trace: traces.Trace, capacity_pages: int, page: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        path = [int(key) for key in traces.prefix_keys(request.prompt, page)]
        known = next((n for n, key in enumerate(path) if key not in held), len(path))
        hits += min(known, (len(request.prompt) - 1) // page)
        for key in reversed(path):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity_pages:
            held.popitem(last=False)
    return hits * page / trace.prompt_tokens


if __name__ == "__main__":
    sys.exit(main())
