"""Times every program with real shapes: `PYTHONPATH=. python3 gpu/kernels [NAME …]`.

A row is a name and what sets it up: a call, the bytes it must move, and the operations it must do.
Calls are recorded and played, so that what Python does in between does not count.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
TIMES = 20


def seconds(call) -> float:
    """Of one call, from the median of played recordings of several."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        play = graph.replay
    except Exception as error:
        torch.cuda.synchronize()
        print(f"  (not recorded: {type(error).__name__}: {str(error)[:100]})")
        play = call
    times = []
    for _ in range(TIMES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        play()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return sorted(times)[TIMES // 2]


def main() -> int:
    sys.path.insert(0, str(FOLDER))
    wanted = sys.argv[1:] or sorted(
        path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| program | µs | TB/s | TFLOPS |\n|---|---:|---:|---:|")
    failed = 0
    for name in wanted:
        for row, setup in importlib.import_module(name).ROWS:
            try:
                call, moved, flops = setup()
                took = seconds(call)
            except Exception:
                failed += 1
                print(f"| {name}: {row} | failed | | |")
                traceback.print_exc(limit=-3)
                continue
            print(
                f"| {name}: {row} | {took * 1e6:,.1f} | {moved / took / 1e12:.2f} "
                f"| {flops / took / 1e12:.0f} |",
                flush=True,
            )
            del call
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
