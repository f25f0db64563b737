"""Norms and gates at published sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtide.layers.elementwise import swish
from kvtide.layers.kernels.norms import add_rms_norm, gated, rms_norm

Made = tuple[Callable[[], object], int, int]
"""The call to time, the bytes it moves, and its FLOPs."""


def _some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _norm(*shape: int) -> Made:
    x, weight = _some(*shape), _some(shape[-1], dtype=torch.float32)
    return lambda: rms_norm(x, weight, 1e-6), 4 * x.numel(), 4 * x.numel()


def _added(*shape: int) -> Made:
    x, y, weight = _some(*shape), _some(*shape), _some(shape[-1], dtype=torch.float32)
    return lambda: add_rms_norm(x, y, weight, 1e-6), 8 * x.numel(), 5 * x.numel()


def _gated(tokens: int, width: int) -> Made:
    gate, up = _some(tokens, 2 * width).chunk(2, dim=-1)
    return lambda: gated(gate, up, swish), 6 * up.numel(), 5 * up.numel()


ROWS: list[tuple[str, Callable[[], Made]]] = [
    *((f"RMS norm {n} x 4096", partial(_norm, n, 4096)) for n in (1, 64, 8192)),
    *((f"residual add and RMS norm {n} x 4096", partial(_added, n, 4096)) for n in (1, 64, 8192)),
    ("RMS norm 8192 x 32 x 128", partial(_norm, 8192, 32, 128)),
    *((f"SwiGLU {n} x 12288", partial(_gated, n, 12288)) for n in (1, 64, 8192)),
]
