"""Times every kernel at published shapes: `PYTHONPATH=. python3 gpu/kernels [NAME …]`.

A row is a name and its setup, which gives a call, the bytes it must move, and its FLOPs. Calls are
captured in a CUDA graph and replayed, so that Python does not count. A module's `EAGER` rows wait
for the device themselves, and are timed with their Python.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
TIMES = 20


def seconds(call: Callable[[], object], captured: bool) -> float:
    """The median time of one call, after a warm-up."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    side.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    times: list[float] = []
    for _ in range(TIMES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
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
    print("| kernel | µs | TB/s | TFLOPS |\n|---|---:|---:|---:|")
    failed = 0
    for name in wanted:
        module = importlib.import_module(name)
        eager = getattr(module, "EAGER", [])
        for row, setup in module.ROWS + eager:
            try:
                call, moved, flops = setup()
                took = seconds(call, (row, setup) not in eager)
            except Exception:
                failed += 1
                print(f"| {name}: {row} | failed | | |", flush=True)
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
