"""Weights in e4m3 whose blocks of rows and columns share a scale, as DeepSeek publishes them."""

from __future__ import annotations

from torch import Tensor

BLOCK = (128, 128)


def blocks(weight: Tensor, block: tuple[int, int]) -> tuple[int, ...]:
    """How many scales there are along each axis; the last block of an axis may be smaller."""
    rows, columns = weight.shape[-2:]
    return (*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def dequantise(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """In float32, each value rounded once; with powers of two as scales, not at all."""
    rows, columns = weight.shape[-2:]
    by_row = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return weight.float().mul_(by_row.repeat_interleave(block[1], dim=-1)[..., :columns])
