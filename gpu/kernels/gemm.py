"""A layer's GEMMs by number of rows, as torch runs them.

torch selects a cuBLAS kernel for each shape; the table shows row counts that it serves badly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

Row = tuple[Callable[[], object], float, float]

QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""(N, K): outputs and inputs."""
COUNTS = [1, 16, 64, 256, 384, 512, 528, 576, 640, 704, 768, 896, 1024, 1040, 1152, 1280, 1536]
COUNTS += [1792, 2048, 2064, 2304, 4096, 8192]


def gemms(count: int, *names: str) -> Row:
    """GEMMs of so many rows, one after another."""
    shapes = [QWEN3_8B[name] for name in names]
    pairs = [(random(count, inputs), random(outputs, inputs)) for outputs, inputs in shapes]

    def call() -> None:
        for rows, weight in pairs:
            linear(rows, weight)

    size = sum(outputs * inputs for outputs, inputs in shapes)
    around = sum(count * (outputs + inputs) for outputs, inputs in shapes)
    return call, 2.0 * (size + around), 2.0 * count * size


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


ROWS = [
    (f"Qwen3-8B GEMM {' and '.join(names)}, {count} rows", partial(gemms, count, *names))
    for names in (tuple(QWEN3_8B), ("gate_up",))
    for count in COUNTS
]
