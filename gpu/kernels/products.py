"""A layer's products by number of rows, with weights as they lie: torch chooses how each is done,
and this shows whether some numbers of rows come off badly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

Row = tuple[Callable[[], object], float, float]

QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Outputs and inputs."""
COUNTS = (1, 16, 64, 256, 384, 512, 528, 576, 640, 704, 768, 896, 1024, 1040, 1152, 1280, 1536)
COUNTS += (1792, 2048, 2064, 2304, 4096, 8192)


def products(count: int, *names: str) -> Row:
    """Of so many rows, one product after another."""
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
    (f"Qwen3-8B's {' and '.join(names)}, {count} rows", partial(products, count, *names))
    for names in (tuple(QWEN3_8B), ("gate_up",))
    for count in COUNTS
]
