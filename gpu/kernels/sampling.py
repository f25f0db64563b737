"""Greedy and random sampling at published sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtide.engine.sampling.sampler import SamplingInput, sample_all, sampling_columns
from kvtide.engine.sampling.sampling_params import SamplingParams
from kvtide.layers.kernels.sampling import greedy, sample_rows

Made = tuple[Callable[[], object], int, int]
"""The call to time, the bytes it moves, and its FLOPs."""


def _some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _greedy(rows: int, columns: int) -> Made:
    logits = _some(rows, columns, dtype=torch.float32) * 3
    return lambda: greedy(logits), 4 * logits.numel(), 3 * logits.numel()


def _sample_rows(rows: int, columns: int) -> Made:
    logits = _some(rows, columns, dtype=torch.float32) * 3
    inputs = [SamplingInput(SamplingParams(temperature=0.7), [1], [1, 2, 3])] * rows
    settings = torch.from_numpy(sampling_columns(inputs, columns)).cuda()
    return lambda: sample_rows(logits, settings), 4 * logits.numel(), 3 * logits.numel()


def _sampled(rows: int, columns: int, sampling: SamplingParams) -> Made:
    """Sampling of a whole step, with the copy to the host, which no CUDA graph can capture.

    As with real models, few tokens have nearly all of the probability.
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
    *((f"greedy {n} x 151936", partial(_greedy, n, 151_936)) for n in (1, 64)),
    *((f"sample_rows {n} x 151936", partial(_sample_rows, n, 151_936)) for n in (1, 64)),
]

EAGER: list[tuple[str, Callable[[], Made]]] = [
    (f"sample_all 64 x 151936, {name}", partial(_sampled, 64, 151_936, one))
    for name, one in _SETTINGS.items()
]
