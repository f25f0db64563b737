"""Tiles of keys, for programs that attend by head over pages: loading them, and adding them up.

A query's state is the highest score so far (`peak`), the sum of shares relative to it (`total`),
and the values in these shares (`sums`). Scores are logarithms to the base of two.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernel_args import Attending
from kvtide.layers.kernels.elementwise import tanh
from kvtide.layers.kernels.grid import MIN_ROWS, power_of_two

KEYS = 64
"""Keys of a tile, at most."""
TILE_BYTES = 16 << 10
"""Of the keys of a tile."""
_LOG2_E = math.log2(math.e)


def keys_of_tile(queries: Tensor, keys: Tensor) -> int:
    """How many keys a tile has."""
    width: int = power_of_two(queries.shape[-1])
    return max(MIN_ROWS, min(KEYS, TILE_BYTES // (width * max(queries.itemsize, keys.itemsize))))


def scaling(how: Attending) -> tuple[float, float]:
    """What products are multiplied by before their cap and after it; powers are those of two."""
    if how.cap is None:
        return 1.0, how.scale * _LOG2_E
    return how.scale / how.cap, how.cap * _LOG2_E


def compiled_for(queries: Tensor, keys: Tensor, how: Attending, page_tokens: int) -> dict[str, int]:
    """What the programs' constants are."""
    return {
        "PAGE": page_tokens,
        "WINDOW": how.window or 0,
        "CAPPED": how.cap is not None,
        "N": keys_of_tile(queries, keys),
        "DIM": queries.shape[-1],
        "D": max(MIN_ROWS, power_of_two(queries.shape[-1])),
    }


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    query, key, value, seen, peak, total, sums, inner, factor,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,  # noqa: N803
):
    """One more tile of keys: the highest score, the sum of shares, and the shares of values."""
    scores = tl.dot(query, key, input_precision="ieee")
    if CAPPED:
        scores = tanh(scores * inner)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    # Where nothing was seen yet, anything but an infinity will do.
    safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    shares = tl.exp2(scores * factor - safe[:, None])
    before = tl.exp2(peak - safe)
    sums = sums * before[:, None]
    sums = tl.dot(shares.to(value.dtype), value, sums, input_precision="ieee")
    return higher, total * before + tl.sum(shares, 1), sums


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(  # type: ignore[no-untyped-def]
    pointers, there, inside, like, MASKED: tl.constexpr, PADDED: tl.constexpr,  # noqa: N803
):
    if MASKED:
        loaded = tl.load(pointers, mask=there & inside, other=0.0)
    elif PADDED:
        loaded = tl.load(pointers, mask=inside, other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded.to(like.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def earlier(  # type: ignore[no-untyped-def]
    query, position, peak, total, sums, keys, values, table, low, high, least,
    key_slot, key_entry, value_slot, value_entry, inner, factor,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Over what was kept of tokens [low, high), from a multiple of N on; none before `least` is
    read, and without a mask the last tile is whole."""
    dim, column = tl.arange(0, D), tl.arange(0, N)
    inside = dim < DIM
    # A slot is there before its keys are asked for, and these two tiles ahead.
    for at in tl.range(low, high, N, num_stages=5):
        number = at + column
        there = (number >= least) & (number < high)
        if PAGE % N == 0:
            slot = tl.load(table + at // PAGE).to(tl.int64)
            entry = at % PAGE + column
            key_at = slot * key_slot + entry * key_entry
            value_at = slot * value_slot + entry * value_entry
        else:
            slots = tl.load(table + number // PAGE, mask=there, other=0).to(tl.int64)
            key_at = slots * key_slot + number % PAGE * key_entry
            value_at = slots * value_slot + number % PAGE * value_entry
        key = _loaded(
            keys + key_at[None, :] + dim[:, None], there[None, :], inside[:, None], query,
            MASKED, DIM < D,
        )
        value = _loaded(
            values + value_at[:, None] + dim[None, :], there[:, None], inside[None, :], query,
            MASKED, DIM < D,
        )
        seen = there[None, :]
        if WINDOW > 0:
            seen = seen & (number[None, :] > position[:, None] - WINDOW)
        peak, total, sums = _tile(
            query, key, value, seen, peak, total, sums, inner, factor, CAPPED, MASKED
        )
    return peak, total, sums


@triton.jit  # type: ignore[untyped-decorator]
def own(  # type: ignore[no-untyped-def]
    query, token, peak, total, sums, keys, values, low, high, end, key_token, value_token,
    inner, factor,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,  # noqa: N803
    N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Over the step's own rows [low, high), of those that the sequence has before `end`."""
    dim, column = tl.arange(0, D), tl.arange(0, N)
    inside = dim < DIM
    for at in range(low, high, N):
        number = at + column
        there = number < end
        key_at = keys + tl.cast(at, tl.int64) * key_token + dim[:, None]
        key = _loaded(
            key_at + column[None, :] * key_token, there[None, :], inside[:, None], query,
            MASKED, DIM < D,
        )
        value_at = values + tl.cast(at, tl.int64) * value_token + dim[None, :]
        value = _loaded(
            value_at + column[:, None] * value_token, there[:, None], inside[None, :], query,
            MASKED, DIM < D,
        )
        seen = number[None, :] <= token[:, None]
        if WINDOW > 0:
            seen = seen & (number[None, :] > token[:, None] - WINDOW)
        peak, total, sums = _tile(
            query, key, value, seen, peak, total, sums, inner, factor, CAPPED, MASKED
        )
    return peak, total, sums
# fmt: on
