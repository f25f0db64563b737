"""Hyper-connections: residual streams mixed by weights that depend on the token.

Streams are (tokens, streams, width). Sums over the few streams are written out, so their order is
the same for every token.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import StreamMixing
from kvtide.layers.elementwise import rms_norm, sigmoid

Matrix = NDArray[np.float32]
"""(tokens, rows, columns)"""


def gather(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> tuple[Tensor, Tensor]:
    """The sublayer's input before its norm, and the weights with which its output goes back."""
    count, logits = streams.shape[1], _logits(arithmetic, mixing, streams)
    weights = arithmetic.rowwise(lambda rows: _weights(mixing, rows, count), logits)
    return _weighed(weights[:, :count], streams), weights[:, count:]


def spread(given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
    """The streams after the sublayer."""
    count = streams.shape[1]
    back, mixing = weights[:, :count], weights[:, count:].unflatten(1, (count, count))
    wide = given.float()[:, None] * back[..., None]
    for number in range(count):
        wide = wide + mixing[:, number, :, None] * streams[:, number, None].float()
    return wide.to(streams.dtype)


def join(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> Tensor:
    """One stream of all of them."""
    logits = _logits(arithmetic, mixing, streams) * mixing.scales + mixing.base
    return _weighed(arithmetic.rowwise(sigmoid, logits) + mixing.eps, streams)


def _logits(arithmetic: Arithmetic, mixing: StreamMixing, streams: Tensor) -> Tensor:
    flat, one = streams.flatten(1).float(), torch.ones((), device=streams.device)
    normed = arithmetic.rowwise(lambda rows: rms_norm(rows, one, mixing.norm_eps), flat)
    return arithmetic.linear(normed, mixing.project)


def _weights(mixing: StreamMixing, logits: Tensor, n: int) -> Tensor:
    """Weights of the input, of the output, and the mixing matrix: (rows, n + n + n²)."""
    logits, eps = logits * mixing.scales + mixing.base, mixing.eps
    take = sigmoid(logits[:, :n]) + eps
    back = 2 * sigmoid(logits[:, n : 2 * n])
    matrix = _balanced(logits[:, 2 * n :].unflatten(1, (n, n)).softmax(-1) + eps, mixing)
    return torch.cat([take, back, matrix.flatten(1)], dim=1)


def _balanced(matrix: Tensor, mixing: StreamMixing) -> Tensor:
    """Columns and rows divided by their sums in turn. By numpy, whose small steps cost less."""
    found: Matrix = matrix.cpu().numpy()
    found = found / (_column_sums(found) + mixing.eps)
    for _ in range(mixing.rounds - 1):
        found = found / (_row_sums(found) + mixing.eps)
        found = found / (_column_sums(found) + mixing.eps)
    return torch.from_numpy(found).to(matrix.device)


def _weighed(weights: Tensor, streams: Tensor) -> Tensor:
    parts = (weights[:, n, None] * streams[:, n].float() for n in range(streams.shape[1]))
    return reduce(torch.add, parts).to(streams.dtype)


def _column_sums(matrix: Matrix) -> Matrix:
    sums: Matrix = reduce(np.add, [*matrix.transpose(1, 0, 2)])
    return sums[:, None]


def _row_sums(matrix: Matrix) -> Matrix:
    sums: Matrix = reduce(np.add, [*matrix.transpose(2, 0, 1)])
    return sums[:, :, None]
