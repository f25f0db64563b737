"""MXFP4, as gpt-oss is published: 32 values of four bits share a scale of eight.

A byte holds two values, the first in its low nibble; a scale is a power of two. Experts lie by
output (experts, outputs, blocks, 16), with a scale for each block, and come back as
`transformers` keeps them: (experts, inputs, outputs). Every value is exact in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 16
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
_BYTES = torch.arange(256)
_PAIRS = torch.stack([VALUES[_BYTES & 15], VALUES[_BYTES >> 4]], dim=1)
"""What every byte stands for."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Experts one by one: what lies between bytes and values is eight times as large."""
    experts = zip(blocks, scales, strict=True)
    return torch.stack([_expert(*expert) for expert in experts]).transpose(1, 2)


def _expert(blocks: Tensor, scales: Tensor) -> Tensor:
    values = _PAIRS[blocks.int()].flatten(-2)
    exponents = scales.int()[..., None] - _EXPONENT_BIAS
    return torch.ldexp(values, exponents).to(torch.bfloat16).flatten(-2)
