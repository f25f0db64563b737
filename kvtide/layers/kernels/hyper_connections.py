"""Mixing of residual streams as device programs: what `streams` does around a sublayer.

Logits are a product of all streams of a token with few columns. Its inner dimension is long, so it
is divided over programs, each of which leaves a part of the sum and of the norm, which is but one
factor for a token. One more program a token makes weights of them, sums the streams, and norms
that for the sublayer. Giving back is one program too. Streams are read twice and once, and
written once; nothing else of that size is there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.elementwise import split_bf16
from kvtide.layers.kernel_args import Norm, StreamMixing
from kvtide.layers.kernels.elementwise import sigmoid
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.kv_write import bits, widened
from kvtide.layers.kernels.rope import ROUNDED, narrowed, rounded

PROGRAMS = 528
"""As many keep a large device busy."""
MANY_TOKENS = 1024
"""From so many on, programs take larger tiles of tokens."""
MIN_INNER = 256
"""Fewer inputs than this are not worth a program."""
_INNER = 128
_BESIDE = 64
"""Products of so many rows run beside the rest of a program. Triton 3.6 lets what is loaded ahead
write over what they still read, so nothing is loaded ahead then."""
_FEW = 8
"""So few parts of a matrix are summed at a time that the matrix ends up with one warp, which needs
no barrier in any of the rounds."""
_MAX_STREAMS = 4


Handed = tuple[Tensor, Tensor, Tensor]
"""Streams before a sublayer, what it gives, and the weights with which that is given back."""


def packed_mixing(mixing: StreamMixing, dtype: torch.dtype) -> StreamMixing:
    """As programs take it, for streams in `dtype`.

    `project` becomes (halves, outputs and some more, all streams), in the dtype of the streams.
    """
    outputs, inner = mixing.project.shape
    parts = split_bf16(mixing.project) if dtype is torch.bfloat16 else mixing.project
    rows = max(MIN_ROWS, power_of_two(outputs + 1))
    padded = parts.new_zeros((len(parts) // outputs, rows, inner))
    padded[:, :outputs] = parts.unflatten(0, (-1, outputs))
    return replace(mixing, project=padded, scales=mixing.scales.contiguous())


def gather_streams(
    mixing: StreamMixing, streams: Tensor, norm: Norm, logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sublayer's input after its norm, and the weights with which its output is given back.

    `logits` where they are known already.
    """
    tokens, count, width = streams.shape
    x = streams.new_empty((tokens, width))
    weights = streams.new_empty((tokens, count + count**2), dtype=torch.float32)
    _gather(mixing, streams, logits, x, weights, norm)
    return x, weights


def pass_streams(
    given: Tensor, streams: Tensor, weights: Tensor, following: StreamMixing, norm: Norm
) -> tuple[Tensor, Tensor, Tensor]:
    """`spread_streams`, and then `gather_streams` for the sublayer that follows.

    Of few tokens the program that projects streams makes them itself, each a part of one of them.
    """
    tokens, count, width = streams.shape
    _, _, span = _divided(tokens, count * width)
    if tokens >= MANY_TOKENS or width % span:
        after = spread_streams(given, streams, weights)
        return after, *gather_streams(following, after, norm)
    after = torch.empty_like(streams)
    handed = (streams.contiguous(), given.contiguous(), weights.contiguous())
    logits = _logits(following, after, handed)
    return after, *gather_streams(following, after, norm, logits)


def join_streams(mixing: StreamMixing, streams: Tensor) -> Tensor:
    """One stream of all of them."""
    x = streams.new_empty((len(streams), streams.shape[2]))
    _gather(mixing, streams, None, x, None, None)
    return x


def spread_streams(given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
    """The streams after the sublayer."""
    tokens, count, width = streams.shape
    streams, given = streams.contiguous(), given.contiguous()
    after, columns = torch.empty_like(streams), min(1024, power_of_two(width))
    assert count <= _MAX_STREAMS
    _spread[(tokens, divided_up(width, columns))](
        *(bits(given), bits(streams), weights.contiguous(), bits(after)),
        COUNT=count,
        WIDTH=width,
        COLUMNS=columns,
    )
    return after


def _gather(
    mixing: StreamMixing,
    streams: Tensor,
    logits: Tensor | None,
    x: Tensor,
    weights: Tensor | None,
    norm: Norm | None,
) -> None:
    tokens, count, width = streams.shape
    streams = streams.contiguous()
    logits = _logits(mixing, streams) if logits is None else logits
    _weigh[(tokens,)](
        *(logits, bits(streams), mixing.scales, mixing.base, bits(x)),
        logits if weights is None else weights,
        streams if norm is None else bits(norm.weight),
        *(tokens, mixing.norm_eps, mixing.eps, 0.0 if norm is None else norm.eps),
        PARTS=len(logits),
        P=logits.shape[2],
        COUNT=count,
        ROUNDS=mixing.rounds,
        NORMS=norm is not None,
        ROUNDED=ROUNDED[streams.dtype],
        WIDTH=width,
        COLUMNS=power_of_two(width),
        FEW=min(len(logits), _FEW),
        num_warps=8 if width > 1024 else 4,
    )


def _logits(mixing: StreamMixing, streams: Tensor, handed: Handed | None = None) -> Tensor:
    """Parts of the logits (parts, tokens, outputs and some more).

    Behind the logits of a token stands the sum of its squares. With what is `handed`, streams are
    first written as they are after a sublayer.
    """
    (tokens, count, width), (parts, each, inner) = streams.shape, mixing.project.shape
    assert inner == count * width
    tile, splits, span = _divided(tokens, inner)
    logits = streams.new_empty((splits, tokens, each), dtype=torch.float32)
    before, given, weights = handed or (streams, streams, logits)
    _project[(divided_up(tokens, tile), splits)](
        *(streams, mixing.project, logits, tokens, before, given, weights),
        INNER=inner,
        SPAN=span,
        OUTPUTS=len(mixing.base),
        P=each,
        HALVES=parts,
        SPREADS=handed is not None,
        COUNT=count,
        M=tile,
        K=_INNER,
        num_stages=1 if tile >= _BESIDE else 4 if handed is None else 2,
    )
    return logits


def _divided(tokens: int, inner: int) -> tuple[int, int, int]:
    """Tokens of a tile, how many programs share its inputs, and how many inputs each has."""
    tile = 4 * MIN_ROWS if tokens >= MANY_TOKENS else MIN_ROWS
    splits = max(1, min(PROGRAMS // divided_up(tokens, tile), inner // MIN_INNER, 64))
    splits = 1 << splits.bit_length() - 1
    return tile, splits, divided_up(divided_up(inner, _INNER), splits) * _INNER


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _after(  # type: ignore[no-untyped-def]
    before, given, weights, row, live, at, there, WIDTH: tl.constexpr, COUNT: tl.constexpr,  # noqa: N803
):
    """Columns `at` of all streams, which are of one, after a sublayer."""
    token, column = row.to(tl.int64), (at % WIDTH)[None, :]
    ours = tl.minimum(tl.min(at // WIDTH, 0), COUNT - 1)
    weights += token * (COUNT + COUNT * COUNT) + ours
    value = tl.load(given + token[:, None] * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    value = value * tl.load(weights, mask=live, other=0.0)[:, None]
    for number in tl.static_range(COUNT):
        where = (token * COUNT + number)[:, None] * WIDTH + column
        stream = tl.load(before + where, mask=there, other=0.0).to(tl.float32)
        share = tl.load(weights + COUNT + number * COUNT, mask=live, other=0.0)
        value += share[:, None] * stream
    return value


@program("tokens")  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    streams, project, logits, tokens, before, given, weights,
    INNER: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, P: tl.constexpr,  # noqa: N803
    HALVES: tl.constexpr, SPREADS: tl.constexpr, COUNT: tl.constexpr,  # noqa: N803
    M: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    output, inner, live = tl.arange(0, P), tl.arange(0, K), row < tokens
    begin = tl.program_id(1) * SPAN
    squares, sums = tl.zeros([M, K], tl.float32), tl.zeros([M, P], tl.float32)
    for first in range(begin, begin + SPAN, K):
        at = first + inner
        there = live[:, None] & (at < INNER)[None, :]
        where = row.to(tl.int64)[:, None] * INNER + at[None, :]
        if SPREADS:
            value = _after(before, given, weights, row, live, at, there, INNER // COUNT, COUNT)
            value = value.to(streams.dtype.element_ty)
            tl.store(streams + where, value, mask=there)
        else:
            value = tl.load(streams + where, mask=there, other=0.0)
        wide = value.to(tl.float32)
        squares += wide * wide
        value = value.to(project.dtype.element_ty)
        for half in tl.static_range(HALVES):
            where = (half * P + output)[:, None] * INNER + at[None, :]
            weight = tl.load(project + where, mask=(at < INNER)[None, :], other=0.0)
            sums = tl.dot(value, tl.trans(weight), sums, input_precision="ieee")
    sums = tl.where((output == OUTPUTS)[None, :], tl.sum(squares, 1)[:, None], sums)
    where = (tl.program_id(1).to(tl.int64) * tokens + row) * P
    tl.store(logits + where[:, None] + output[None, :], sums, mask=live[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _matrix(  # type: ignore[no-untyped-def]
    mixing, eps, ROUNDS: tl.constexpr,  # noqa: N803
):
    """Of logits (count, count): rows and columns that add up to one."""
    mixing = tl.exp(mixing - tl.max(mixing, 1)[:, None])
    mixing = mixing / tl.sum(mixing, 1)[:, None] + eps
    mixing = mixing / (tl.sum(mixing, 0) + eps)[None, :]
    for _ in range(ROUNDS - 1):
        mixing = mixing / (tl.sum(mixing, 1) + eps)[:, None]
        mixing = mixing / (tl.sum(mixing, 0) + eps)[None, :]
    return mixing


@program("tokens")  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    logits, streams, scales, base, x, weights, gains, tokens, norm_eps, eps, sublayer_eps,
    PARTS: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr, ROUNDS: tl.constexpr,  # noqa: N803
    NORMS: tl.constexpr, ROUNDED: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr, FEW: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    part, one = tl.arange(0, PARTS), tl.arange(0, COUNT)
    rows = logits + (part.to(tl.int64) * tokens + token) * P
    outputs: tl.constexpr = COUNT * (2 + COUNT) if ROUNDS > 0 else COUNT
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    # Before all else: it takes a while, and nothing hangs on it yet.
    where = (token * COUNT + one)[:, None] * WIDTH + column[None, :]
    value = tl.load(streams + where, mask=inside[None, :], other=0)
    factor = tl.rsqrt(tl.sum(tl.load(rows + outputs), 0) / (COUNT * WIDTH) + norm_eps)
    take = tl.sum(tl.load(rows[:, None] + one[None, :]), 0) * factor
    take = sigmoid(take * tl.load(scales + one) + tl.load(base + one)) + eps
    if ROUNDS > 0:
        back = tl.sum(tl.load(rows[:, None] + COUNT + one[None, :]), 0) * factor
        back = back * tl.load(scales + COUNT + one) + tl.load(base + COUNT + one)
        weights += token * (COUNT + COUNT * COUNT)
        tl.store(weights + one, 2.0 * sigmoid(back))
        cell = one[:, None] * COUNT + one[None, :]
        at, several = 2 * COUNT + cell, tl.zeros([FEW, COUNT, COUNT], tl.float32)
        for few in tl.static_range(0, PARTS, FEW):
            rows = logits + ((few + tl.arange(0, FEW)).to(tl.int64) * tokens + token) * P
            several += tl.load(rows[:, None, None] + at[None, :, :])
        mixing = tl.sum(several, 0) * factor * tl.load(scales + at) + tl.load(base + at)
        tl.store(weights + COUNT + cell, _matrix(mixing, eps, ROUNDS))
    sums = tl.sum(take[:, None] * widened(value), 0)
    sums = rounded(sums, ROUNDED)
    if NORMS:
        gain = widened(tl.load(gains + column, mask=inside, other=0))
        sums = sums * tl.rsqrt(tl.sum(sums * sums, 0) / WIDTH + sublayer_eps) * gain
    tl.store(x + token * WIDTH + column, narrowed(sums, x), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _spread(  # type: ignore[no-untyped-def]
    given, streams, weights, after,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    value = widened(tl.load(given + token * WIDTH + column, mask=inside, other=0))
    weights += token * (COUNT + COUNT * COUNT)
    at = token * COUNT * WIDTH + column
    first, second = value * tl.load(weights), value
    third, fourth = value, value
    if COUNT > 1:
        second = value * tl.load(weights + 1)
    if COUNT > 2:
        third = value * tl.load(weights + 2)
    if COUNT > 3:
        fourth = value * tl.load(weights + 3)
    for number in tl.static_range(COUNT):
        row = weights + COUNT + number * COUNT
        stream = widened(tl.load(streams + at + number * WIDTH, mask=inside, other=0))
        first += tl.load(row) * stream
        if COUNT > 1:
            second += tl.load(row + 1) * stream
        if COUNT > 2:
            third += tl.load(row + 2) * stream
        if COUNT > 3:
            fourth += tl.load(row + 3) * stream
    tl.store(after + at, narrowed(first, after), mask=inside)
    if COUNT > 1:
        tl.store(after + at + WIDTH, narrowed(second, after), mask=inside)
    if COUNT > 2:
        tl.store(after + at + 2 * WIDTH, narrowed(third, after), mask=inside)
    if COUNT > 3:
        tl.store(after + at + 3 * WIDTH, narrowed(fourth, after), mask=inside)
# fmt: on
