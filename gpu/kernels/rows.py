"""Norms, gates and the likeliest token, at published sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtide.engine.sampler import SamplingInput, SamplingParams, sample_all
from kvtide.layers.elementwise import swish
from kvtide.layers.kernels.rows import added, gated, likeliest, normed

Made = tuple[Callable[[], object], int, int]
"""What is timed, the bytes it moves, and its operations."""


def _some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _norm(*shape: int) -> Made:
    x, weight = _some(*shape), _some(shape[-1], dtype=torch.float32)
    return lambda: normed(x, weight, 1e-6), 4 * x.numel(), 4 * x.numel()


def _added(*shape: int) -> Made:
    x, y, weight = _some(*shape), _some(*shape), _some(shape[-1], dtype=torch.float32)
    return lambda: added(x, y, weight, 1e-6), 8 * x.numel(), 5 * x.numel()


def _gated(tokens: int, width: int) -> Made:
    gate, up = _some(tokens, 2 * width).chunk(2, dim=-1)
    return lambda: gated(gate, up, swish), 6 * up.numel(), 5 * up.numel()


def _likeliest(rows: int, columns: int) -> Made:
    logits = _some(rows, columns, dtype=torch.float32) * 3
    return lambda: likeliest(logits), 4 * logits.numel(), 3 * logits.numel()


def _chosen(rows: int, columns: int, sampling: SamplingParams) -> Made:
    """All of a step's choices, with what comes back to the host, so it cannot be recorded.

    As models say it: few tokens have nearly all of the chances.
    """
    logits = _some(rows, columns, dtype=torch.float32) * 2
    logits[:, :50] += 12
    drawings = [SamplingInput(sampling, [1], [1, 2, 3]) for _ in range(rows)]
    return lambda: sample_all(logits, drawings), 4 * logits.numel(), 3 * logits.numel()


_SETTINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "temperature, top-p": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature, top-k": SamplingParams(temperature=0.7, top_k=50),
}

ROWS: list[tuple[str, Callable[[], Made]]] = [
    *((f"norm {n} x 4096", partial(_norm, n, 4096)) for n in (1, 64, 8192)),
    *((f"added norm {n} x 4096", partial(_added, n, 4096)) for n in (1, 64, 8192)),
    ("norm 8192 x 32 x 128", partial(_norm, 8192, 32, 128)),
    *((f"gated {n} x 12288", partial(_gated, n, 12288)) for n in (1, 64, 8192)),
    *((f"likeliest {n} x 151936", partial(_likeliest, n, 151_936)) for n in (1, 64)),
]

EAGER: list[tuple[str, Callable[[], Made]]] = [
    (f"choose_all 64 x 151936, {name}", partial(_chosen, 64, 151_936, one))
    for name, one in _SETTINGS.items()
]
