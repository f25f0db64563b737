"""MXFP4: 32 values of four bits share a scale of eight, a power of two.

A byte holds two values, the first in its low nibble. gpt-oss's experts lie by output (experts,
outputs, blocks, 16), with a scale for each block, and come back as `transformers` keeps them:
(experts, inputs, outputs). DeepSeek-V4's are matrices (outputs, inputs / 2) and stay as they lie.
Every value is exact in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES, BYTE_VALUES = 16, 2
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
_BYTES = torch.arange(256)
_PAIRS = torch.stack([VALUES[_BYTES & 15], VALUES[_BYTES >> 4]], dim=1)
"""What every byte stands for."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Experts one by one: what lies between bytes and values is eight times as large."""
    experts = zip(blocks, scales, strict=True)
    return torch.stack([_values(*expert) for expert in experts]).transpose(1, 2)


def dequantise_rows(weight: Tensor, scales: Tensor) -> Tensor:
    """A matrix whose rows are blocks one after another."""
    blocks = weight.view(torch.uint8).unflatten(-1, (-1, BLOCK_BYTES))
    return _values(blocks, scales.view(torch.uint8))


def _values(blocks: Tensor, scales: Tensor) -> Tensor:
    values = _PAIRS[blocks.int()].flatten(-2)
    exponents = scales.int()[..., None] - _EXPONENT_BIAS
    return torch.ldexp(values, exponents).to(torch.bfloat16).flatten(-2)
