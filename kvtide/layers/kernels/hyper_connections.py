"""Hyper-connections: mixing of residual streams around a sublayer, fused.

Torch reference: `layers/reference/hyper_connections.py`, `gather`, `spread` and `join`.

`_project`         grid (token tiles, splits): logits of all streams of a token, a GEMM with few
                   columns and a long inner dimension, which is split (split-K). The sum of squares
                   for the RMS norm is one more column.
`_gather_streams`  grid (tokens,): weights from logits (with Sinkhorn rounds for the mixing matrix),
                   the weighted sum of streams, and the sublayer's norm
`_spread_streams`  grid (tokens, column tiles): the streams after the sublayer

Streams are read twice before a sublayer and once after it, and written once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import Norm, StreamMixing
from kvtide.layers.elementwise import split_bf16
from kvtide.layers.kernels.elementwise import sigmoid
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.kv_write import bits, widened
from kvtide.layers.kernels.rope import ROUNDED, narrowed, rounded

CTAS_PER_SM = 4
"""CTAs that the grid of the projection has per SM, at most."""
MIN_SPLIT_INNER = 256
"""Inputs of a split, at least."""
_BLOCK_INNER = 128
_TILE_TOKENS = 64
"""Tokens of a tile: dots are asynchronous (WGMMA). Triton 3.6 then lets pipelined loads overwrite
operands that are still read, so the loop has one stage."""
_PARTIALS_AT_ONCE = 8
"""Partial matrices summed at a time: so few that the matrix stays in one warp, and Sinkhorn rounds
need no barrier."""
_MAX_STREAMS = 4


def packed_mixing(mixing: StreamMixing, dtype: torch.dtype) -> StreamMixing:
    """`mixing` as kernels take it, for streams in `dtype`.

    `project` becomes (halves, padded outputs, all streams), in the dtype of the streams.
    """
    outputs, inner = mixing.project.shape
    parts = split_bf16(mixing.project) if dtype is torch.bfloat16 else mixing.project
    rows = max(MIN_ROWS, power_of_two(outputs + 1))
    padded = parts.new_zeros((len(parts) // outputs, rows, inner))
    padded[:, :outputs] = parts.unflatten(0, (-1, outputs))
    return replace(mixing, project=padded, scales=mixing.scales.contiguous())


def gather_streams(mixing: StreamMixing, streams: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The sublayer's normed input, and the weights to spread its output."""
    tokens, count, width = streams.shape
    x = streams.new_empty((tokens, width))
    weights = streams.new_empty((tokens, count + count**2), dtype=torch.float32)
    _launch_gather(mixing, streams, x, weights, norm)
    return x, weights


def join_streams(mixing: StreamMixing, streams: Tensor) -> Tensor:
    """All streams joined into one."""
    x = streams.new_empty((len(streams), streams.shape[2]))
    _launch_gather(mixing, streams, x, None, None)
    return x


def spread_streams(given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
    """The streams after the sublayer."""
    tokens, count, width = streams.shape
    streams, given = streams.contiguous(), given.contiguous()
    after, columns = torch.empty_like(streams), min(1024, power_of_two(width))
    assert count <= _MAX_STREAMS
    _spread_streams[(tokens, divided_up(width, columns))](
        *(bits(given), bits(streams), weights.contiguous(), bits(after)),
        STREAMS=count,
        WIDTH=width,
        COLUMNS=columns,
    )
    return after


def _launch_gather(
    mixing: StreamMixing, streams: Tensor, x: Tensor, weights: Tensor | None, norm: Norm | None
) -> None:
    tokens, count, width = streams.shape
    streams = streams.contiguous()
    logits = _project_logits(mixing, streams)
    _gather_streams[(tokens,)](
        *(logits, bits(streams), mixing.scales, mixing.base, bits(x)),
        logits if weights is None else weights,
        streams if norm is None else bits(norm.weight),
        *(tokens, mixing.norm_eps, mixing.eps, 0.0 if norm is None else norm.eps),
        SPLITS=len(logits),
        BLOCK_OUT=logits.shape[2],
        STREAMS=count,
        ROUNDS=mixing.rounds,
        NORMS=norm is not None,
        ROUNDED=ROUNDED[streams.dtype],
        WIDTH=width,
        COLUMNS=power_of_two(width),
        BLOCK_PARTIALS=min(len(logits), _PARTIALS_AT_ONCE),
        num_warps=8 if width > 1024 else 4,
    )


def _project_logits(mixing: StreamMixing, streams: Tensor) -> Tensor:
    """Partial logits (splits, tokens, padded outputs); the sum of squares is one more column."""
    (tokens, count, width), (parts, each, inner) = streams.shape, mixing.project.shape
    assert inner == count * width
    token_tiles = divided_up(tokens, _TILE_TOKENS)
    splits, span = _split_inner(token_tiles, inner, streams.device)
    logits = streams.new_empty((splits, tokens, each), dtype=torch.float32)
    _project[(token_tiles, splits)](
        *(streams, mixing.project, logits, tokens),
        INNER=inner,
        SPAN=span,
        OUTPUTS=len(mixing.base),
        BLOCK_OUT=each,
        HALVES=parts,
        BLOCK_M=_TILE_TOKENS,
        BLOCK_K=_BLOCK_INNER,
        num_stages=1,
    )
    return logits


def _split_inner(token_tiles: int, inner: int, device: torch.device) -> tuple[int, int]:
    """Splits of the inner dimension, and inputs of a split."""
    ctas = CTAS_PER_SM * sm_count(device)
    splits = max(1, min(ctas // token_tiles, inner // MIN_SPLIT_INNER, 64))
    splits = 1 << splits.bit_length() - 1
    return splits, divided_up(divided_up(inner, _BLOCK_INNER), splits) * _BLOCK_INNER


# fmt: off
@kernel("tokens")  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    streams, project, logits, tokens,
    INNER: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output, offs_k, valid = tl.arange(0, BLOCK_OUT), tl.arange(0, BLOCK_K), offs_m < tokens
    split_start = tl.program_id(1) * SPAN
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_OUT], tl.float32)
    for first in range(split_start, split_start + SPAN, BLOCK_K):
        column = first + offs_k
        mask = valid[:, None] & (column < INNER)[None, :]
        offsets = offs_m.to(tl.int64)[:, None] * INNER + column[None, :]
        value = tl.load(streams + offsets, mask=mask, other=0.0)
        value32 = value.to(tl.float32)
        squares += value32 * value32
        value = value.to(project.dtype.element_ty)
        for half in tl.static_range(HALVES):
            offsets = (half * BLOCK_OUT + output)[:, None] * INNER + column[None, :]
            weight = tl.load(project + offsets, mask=(column < INNER)[None, :], other=0.0)
            acc = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
    acc = tl.where((output == OUTPUTS)[None, :], tl.sum(squares, 1)[:, None], acc)
    offsets = (tl.program_id(1).to(tl.int64) * tokens + offs_m) * BLOCK_OUT
    tl.store(logits + offsets[:, None] + output[None, :], acc, mask=valid[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _sinkhorn(  # type: ignore[no-untyped-def]
    matrix, eps,
    ROUNDS: tl.constexpr,
):
    """Sinkhorn normalization of logits (streams, streams): rows and columns sum to one."""
    matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
    matrix = matrix / tl.sum(matrix, 1)[:, None] + eps
    matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :]
    for _ in range(ROUNDS - 1):
        matrix = matrix / (tl.sum(matrix, 1) + eps)[:, None]
        matrix = matrix / (tl.sum(matrix, 0) + eps)[None, :]
    return matrix


@kernel("tokens")  # type: ignore[untyped-decorator]
def _gather_streams(  # type: ignore[no-untyped-def]
    logits, streams, scales, base, x, weights, gains, tokens, norm_eps, eps, sublayer_eps,
    SPLITS: tl.constexpr, BLOCK_OUT: tl.constexpr, STREAMS: tl.constexpr, ROUNDS: tl.constexpr,
    NORMS: tl.constexpr, ROUNDED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split, stream = tl.arange(0, SPLITS), tl.arange(0, STREAMS)
    rows = logits + (split.to(tl.int64) * tokens + token) * BLOCK_OUT
    outputs: tl.constexpr = STREAMS * (2 + STREAMS) if ROUNDS > 0 else STREAMS
    offs_d = tl.arange(0, COLUMNS)
    inside = offs_d < WIDTH
    # Prefetch: the streams are loaded first, and used last.
    offsets = (token * STREAMS + stream)[:, None] * WIDTH + offs_d[None, :]
    value = tl.load(streams + offsets, mask=inside[None, :], other=0)
    factor = tl.rsqrt(tl.sum(tl.load(rows + outputs), 0) / (STREAMS * WIDTH) + norm_eps)
    pre_weights = tl.sum(tl.load(rows[:, None] + stream[None, :]), 0) * factor
    pre_weights = sigmoid(pre_weights * tl.load(scales + stream) + tl.load(base + stream)) + eps
    if ROUNDS > 0:
        post_weights = tl.sum(tl.load(rows[:, None] + STREAMS + stream[None, :]), 0) * factor
        post_weights = post_weights * tl.load(scales + STREAMS + stream)
        post_weights = post_weights + tl.load(base + STREAMS + stream)
        weights += token * (STREAMS + STREAMS * STREAMS)
        tl.store(weights + stream, 2.0 * sigmoid(post_weights))
        matrix_index = stream[:, None] * STREAMS + stream[None, :]
        logit_index = 2 * STREAMS + matrix_index
        partial = tl.zeros([BLOCK_PARTIALS, STREAMS, STREAMS], tl.float32)
        for first in tl.static_range(0, SPLITS, BLOCK_PARTIALS):
            split = first + tl.arange(0, BLOCK_PARTIALS)
            rows = logits + (split.to(tl.int64) * tokens + token) * BLOCK_OUT
            partial += tl.load(rows[:, None, None] + logit_index[None, :, :])
        mixing = tl.sum(partial, 0) * factor * tl.load(scales + logit_index)
        mixing = mixing + tl.load(base + logit_index)
        tl.store(weights + STREAMS + matrix_index, _sinkhorn(mixing, eps, ROUNDS))
    mixed = tl.sum(pre_weights[:, None] * widened(value), 0)
    mixed = rounded(mixed, ROUNDED)
    if NORMS:
        gain = widened(tl.load(gains + offs_d, mask=inside, other=0))
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / WIDTH + sublayer_eps) * gain
    tl.store(x + token * WIDTH + offs_d, narrowed(mixed, x), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _spread_streams(  # type: ignore[no-untyped-def]
    given, streams, weights, after,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    value = widened(tl.load(given + token * WIDTH + column, mask=inside, other=0))
    weights += token * (STREAMS + STREAMS * STREAMS)
    at = token * STREAMS * WIDTH + column
    first, second = value * tl.load(weights), value
    third, fourth = value, value
    if STREAMS > 1:
        second = value * tl.load(weights + 1)
    if STREAMS > 2:
        third = value * tl.load(weights + 2)
    if STREAMS > 3:
        fourth = value * tl.load(weights + 3)
    for number in tl.static_range(STREAMS):
        row = weights + STREAMS + number * STREAMS
        stream = widened(tl.load(streams + at + number * WIDTH, mask=inside, other=0))
        first += tl.load(row) * stream
        if STREAMS > 1:
            second += tl.load(row + 1) * stream
        if STREAMS > 2:
            third += tl.load(row + 2) * stream
        if STREAMS > 3:
            fourth += tl.load(row + 3) * stream
    tl.store(after + at, narrowed(first, after), mask=inside)
    if STREAMS > 1:
        tl.store(after + at + WIDTH, narrowed(second, after), mask=inside)
    if STREAMS > 2:
        tl.store(after + at + 2 * WIDTH, narrowed(third, after), mask=inside)
    if STREAMS > 3:
        tl.store(after + at + 3 * WIDTH, narrowed(fourth, after), mask=inside)
# fmt: on
