"""What attention over one vector a token is made of: tiles of vectors, running sums, and parts.

A tile is so many vectors, one a row. Programs take tile after tile with a running maximum, so
nothing but a tile of scores is ever written down. Where there are few programs, each takes a part
of the keys, and one more joins the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernels.grid import MIN_ROWS, power_of_two, sm_count
from kvtide.layers.kernels.jit import program

ROWS = 64
"""Heads, of one token or of several, that a program takes."""
KEYS = 32
"""Keys of a tile, or half as many."""
MAX_PARTS = 128
MIN_KEYS = 32
"""Fewer keys than this are not worth a program."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitParts:
    """What programs give of one query: each one's result, highest score and sum of shares.

    With one part `mixed` is the result itself.
    """

    count: int
    mixed: Tensor
    weights: Tensor

    @classmethod
    def of(cls, queries: Tensor, width: int, programs: int, rows: int, keys: int) -> SplitParts:
        """For so many programs, of so many rows each, and queries that see at most so many keys."""
        ctas = (1 if rows >= ROWS else 2) * sm_count(queries.device)
        most = max(1, min(ctas // programs, -(-keys // MIN_KEYS), MAX_PARTS))
        count = 1 << (most.bit_length() - 1)  # Others were not tried.
        kind = queries.dtype if count == 1 else torch.float32
        shape = (count, *queries.shape[:2])
        mixed = queries.new_empty((*shape, width), dtype=kind)
        return cls(count, mixed, queries.new_empty((*shape, 2), dtype=torch.float32))

    def joined(self, kind: torch.dtype) -> Tensor:
        if self.count == 1:
            return self.mixed[0]
        _, tokens, heads, width = self.mixed.shape
        result = self.mixed.new_empty((tokens, heads, width), dtype=kind)
        _join[(tokens * heads,)](
            *(self.mixed, self.weights, result, tokens * heads, self.count),
            PARTS=MAX_PARTS,
            DIM=width,
            D=power_of_two(width),
        )
        return result


def rows_of(heads: int) -> int:
    return min(ROWS, max(MIN_ROWS, power_of_two(heads)))


def tiles(queries: Tensor, rows: int, dim: int, keys: int) -> dict[str, int]:
    """Keys of a tile, and how many tiles are on their way: what a device has room for."""
    wide = max(MIN_ROWS, power_of_two(dim))
    if queries.element_size() > 2:
        return {"N": MIN_ROWS, "D": wide, "num_warps": 4, "num_stages": 1}
    stages = 2 if keys > KEYS else 3
    return {"N": keys, "D": wide, "num_warps": 8 if rows >= ROWS else 4, "num_stages": stages}


# -- programs ----------------------------------------------------------------------------------


@triton.jit
def taken(scores, value, peak, total, sums):  # type: ignore[no-untyped-def]
    """One more tile: the highest score, the sum of shares, and the shares of values."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    # Where nothing was seen yet, anything but an infinity will do.
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - safe[:, None])
    before = tl.exp2(peak - safe)
    total = total * before + tl.sum(shares, 1)
    sums = tl.dot(shares.to(value.dtype), value, sums * before[:, None], input_precision="ieee")
    return higher, total, sums


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def stored(  # type: ignore[no-untyped-def]
    mixed, weights, line, live, peak, total, sums,
    DIM: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
):
    """What a program gives, by line: a part, a token and a head."""
    dim = tl.arange(0, D)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    at, mask = line[:, None] * DIM + dim[None, :], live[:, None] & (dim < DIM)[None, :]
    tl.store(mixed + at, result.to(mixed.dtype.element_ty), mask=mask)
    if SPLIT:
        tl.store(weights + 2 * line, peak, mask=live)
        tl.store(weights + 2 * line + 1, total, mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def joined_vectors(  # type: ignore[no-untyped-def]
    first, second, third, at, there, like,
    DIM: tl.constexpr, D: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    N: tl.constexpr,
):
    """A tile of vectors, one a row: as they are, or of eight bits with powers of two, and a rest
    of sixteen."""
    if NOPE == 0:
        dim = tl.arange(0, D)
        mask = there[:, None] & (dim < DIM)[None, :]
        tile = tl.load(first + at[:, None] + dim[None, :], mask=mask, other=0.0).to(like.dtype)
    else:
        WITHIN: tl.constexpr = GROUP if D > GROUP else D
        group, within = tl.arange(0, D // WITHIN), tl.arange(0, WITHIN)
        dim = (group[:, None] * WITHIN + within[None, :])[None, :, :]
        row = there[:, None, None]
        small = tl.load(first + at[:, None, None] + dim, mask=row & (dim < NOPE), other=0.0)
        mask = there[:, None] & (group * WITHIN < NOPE)[None, :]
        power = tl.load(third + at[:, None] + group[None, :], mask=mask, other=0).to(tl.int32)
        scale = (power << 23).to(tl.float32, bitcast=True).to(like.dtype)
        # The rest lies in the last group, of two bytes where the first part has one.
        LAST: tl.constexpr = NOPE // WITHIN
        mask = (within >= NOPE % WITHIN) & (within < DIM - LAST * WITHIN)
        mask = there[:, None] & mask[None, :]
        rest = second + (at // 2)[:, None] + (LAST * WITHIN - NOPE) + within[None, :]
        rest = tl.load(rest, mask=mask, other=0.0).to(like.dtype)
        rest = tl.where((group == LAST)[None, :, None], rest[:, None, :], 0.0)
        # Exact in any precision, being powers of two.
        whole = small.to(like.dtype) * scale[:, :, None] + rest
        tile = tl.reshape(whole, [N, D])
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def scaled_vectors(  # type: ignore[no-untyped-def]
    latents, scales, at, scale_at, there, like,
    DIM: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):
    """A tile of latents, one a row: as they are, or of eight bits with a scale for every group."""
    if GROUP == 0:
        dim = tl.arange(0, D)
        mask = there[:, None] & (dim < DIM)[None, :]
        tile = tl.load(latents + at[:, None] + dim[None, :], mask=mask, other=0.0).to(like.dtype)
    else:
        WITHIN: tl.constexpr = GROUP if D > GROUP else D
        group, within = tl.arange(0, D // WITHIN), tl.arange(0, WITHIN)
        dim = (group[:, None] * WITHIN + within[None, :])[None, :, :]
        mask = there[:, None, None] & (dim < DIM)
        small = tl.load(latents + at[:, None, None] + dim, mask=mask, other=0.0)
        mask = there[:, None] & (group * WITHIN < DIM)[None, :]
        scale = tl.load(scales + scale_at[:, None] + group[None, :], mask=mask, other=0.0)
        tile = tl.reshape((small.to(tl.float32) * scale[:, :, None]).to(like.dtype), [N, D])
    return tile


@program("lines", "parts")  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    mixed, weights, result, lines, parts, PARTS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):
    """One result of those of several parts, each with its share of the whole."""
    line, dim, part = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.arange(0, PARTS)
    pair = weights + 2 * (part.to(tl.int64) * lines + line)
    peaks = tl.load(pair, mask=part < parts, other=float("-inf"))
    totals = tl.load(pair + 1, mask=part < parts, other=0.0)
    highest = tl.max(peaks, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.sum(totals * tl.exp2(peaks - highest), 0)
    whole = tl.where(whole > 0, whole, 1.0)
    some, sums = tl.arange(0, 16), tl.zeros([16, D], tl.float32)
    for first in range(0, parts, 16):
        at, there = (first + some).to(tl.int64) * lines + line, first + some < parts
        share = tl.exp2(tl.load(weights + 2 * at, mask=there, other=float("-inf")) - highest)
        share = share * tl.load(weights + 2 * at + 1, mask=there, other=0.0) / whole
        mask = there[:, None] & (dim < DIM)[None, :]
        values = tl.load(mixed + at[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        sums += share[:, None] * values
    sums = tl.sum(sums, 0)
    tl.store(result + line * DIM + dim, sums.to(result.dtype.element_ty), mask=dim < DIM)
# fmt: on
