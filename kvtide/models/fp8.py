"""Weights in e4m3 whose blocks of rows and columns share a scale, as DeepSeek publishes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = (128, 128)
FORM, RUN, SCALE_BYTES = "F8_E4M3", 32, 4
"""Of a weight that stays packed: the form's name, and the numbers of a row that lie behind a scale
of their own."""
LARGEST = 448.0
"""Of e4m3's numbers."""
_SMALLEST_EXPONENT, _EXPONENT_BIAS, _MANTISSA_BITS = -126, 127, 23
"""Of fp32's normal numbers."""


def blocks(weight: Tensor, block: tuple[int, int]) -> tuple[int, ...]:
    """How many scales there are along each axis; the last block of an axis may be smaller."""
    rows, columns = weight.shape[-2:]
    return (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def dequantise(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """In float32, each value rounded once; with powers of two as scales, not at all."""
    return weight.float().mul_(_of_each(weight, scales, block))


def packed_row_bytes(columns: int, block: tuple[int, int]) -> int | None:
    """Of a row as `packed` gives it; None where runs do not fit rows or blocks."""
    fits = columns % RUN == 0 and block[1] % RUN == 0
    return columns // RUN * (RUN + SCALE_BYTES) if fits else None


def packed(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix as bytes: every run of a row is its scale in fp32 and its codes."""
    rows, columns = weight.shape
    by_row = scales.float().repeat_interleave(block[0], dim=0)[:rows]
    by_run = by_row.repeat_interleave(block[1] // RUN, dim=1)[:, : columns // RUN]
    heads = by_run.contiguous().view(torch.uint8).unflatten(1, (-1, SCALE_BYTES))
    codes = weight.contiguous().view(torch.uint8).unflatten(1, (-1, RUN))
    return torch.cat([heads, codes], 2).flatten(1)


def quantise(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and the fp32 scales of its blocks.

    A scale is the smallest power of two with which the block's largest value fits. So bf16 holds
    the dequantised values exactly, and quantising those gives the same values again.
    """
    rows, columns = weight.shape
    sizes = functional.pad(weight.float().abs(), (0, -columns % block[1], 0, -rows % block[0]))
    largest = sizes.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))
    mantissa, exponent = torch.frexp(largest / LARGEST)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=_SMALLEST_EXPONENT)
    scales = ((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)
    return (weight.float() / _of_each(weight, scales, block)).to(torch.float8_e4m3fn), scales


def rounded(weight: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """A matrix as `quantise` and `dequantise` give it, in float32."""
    return dequantise(*quantise(weight, block), block)


def _of_each(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The scale of every value, in float32."""
    rows, columns = weight.shape[-2:]
    by_row = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return by_row.repeat_interleave(block[1], dim=-1)[..., :columns]
