"""The limits of a machine, measured with plain operations: GEMM, device copy, pinned copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvtide.bench.link import Link
from kvtide.transfer.strided import Way

TIMES = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`flops`: of a large bf16 GEMM. `bytes_s`: of a copy within device memory, bytes read plus
    bytes written. `link_bytes_s`: of a copy from pinned host memory."""

    flops: float
    bytes_s: float
    link_bytes_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(device: torch.device, size: int = 8192, block_bytes: int = 2 << 30) -> Ceilings:
    link = Link(device, block_bytes)
    try:
        link_bytes_s = statistics.median(link.limit_bytes_s(Way.LOAD) for _ in range(3))
    finally:
        link.close()
    return Ceilings(gemm_flops(device, size), memory_bytes_s(device, block_bytes), link_bytes_s)


def gemm_flops(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: torch.mm(a, b), device)


def memory_bytes_s(device: torch.device, block_bytes: int) -> float:
    """Of a copy within the device's memory: bytes read plus bytes written."""
    source = torch.randint(0, 255, (block_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * block_bytes / timed(lambda: target.copy_(source), device)


def timed(function: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    """Median seconds of a call: by CUDA events on a GPU, by the wall clock elsewhere."""
    for _ in range(3):
        function()
    if device.type != "cuda":
        return statistics.median(_wall_s(function) for _ in range(times))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for before, after in marks:
        before.record()
        function()
        after.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(a.elapsed_time(b)) / 1e3 for a, b in marks)


def _wall_s(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
