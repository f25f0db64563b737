"""Attention by head over pages as device programs, for all sequences of a step.

The same sums as `attending.attend`, tile by tile with a running maximum, so nothing but a tile
of scores is ever written down. Earlier tokens are read through the page table, the step's own from
the step, as `attend_over_pages` does.

Of several tokens of a sequence a program takes a block, over all keys that it sees; or a share of
the tiles of several (`attention_blocks`), and `_join` adds up what programs have of a block. Single
tokens are taken by `attention_single`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import Attending
from kvtide.layers.kernels.attention_decode import attend_singly
from kvtide.layers.kernels.attention_tiles import compiled_for, earlier, own, scaling
from kvtide.layers.kernels.grid import MIN_ROWS, SEQUENCES_AT_ONCE, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.prefill_schedule import (
    RECORD,
    laid_blocks,
    row_of,
    shares,
    taken_by,
    tiles_of,
)
from kvtide.layers.packing import Fields

ROWS = 128
"""Queries times heads that a program takes."""
WIDE_ROWS = 32
"""As many where numbers have four bytes."""
LARGE = 128 * 128
"""Numbers of a block's result, with which a program is not small: one runs at a time."""
MAX_REGISTERS = 128
"""Of small ones of eight warps, so that two do."""
STAGES = 3
"""Tiles of the step's own keys that are on their way."""
JOINED = 1 << 13
"""Numbers of parts that are joined at a time."""


def paged_attention(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending
) -> Tensor:
    """Of the step's queries (tokens, heads, dim), over what was kept and what the step brings."""
    mixed, bounds = torch.empty_like(queries), run.batch.bounds
    if bounds.longest > 1:
        _attend_blocks(run, place, queries, kept, how, mixed)
    if bounds.longest == 1 or bounds.singles:
        attend_singly(run, place, queries, kept, how, mixed)
    return mixed


def _attend_blocks(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending, mixed: Tensor
) -> None:
    """Of all sequences with more than one token."""
    keys, values, table = kept["k"], kept["v"], run.batch.slots[place.anchor]
    (_, heads, dim), kv_heads = queries.shape, keys.shape[1]
    group, view = heads // kv_heads, run.step.view(place.pool.name, place.layer)
    usual = ROWS if queries.itemsize < 4 else WIDE_ROWS
    few = run.batch.bounds.longest * group <= MIN_ROWS
    rows = max(MIN_ROWS if few else usual, power_of_two(group))
    constants = compiled_for(queries, keys, how, run.step.page_tokens)
    small = rows * constants["D"] < LARGE
    shared = shares(kv_heads, small)
    laid = laid_blocks(run, rows // group, shared, constants["WINDOW"], constants["N"])
    most, sizes = len(laid) - 2, {"GROUP": group, "TOKENS": rows // group, "M": rows, **shared}
    # A program has parts of two blocks at the most: of its first and of its last.
    parts = queries.new_empty((2 * shared["SHARES"], rows, dim), dtype=torch.float32)
    given = mixed, parts, parts.new_empty((*parts.shape[:2], 2)), laid, *mixed.stride()[:2]
    _attend[(shared["SHARES"] + most * kv_heads,)](
        *(queries, keys, values, view["k"], view["v"]),
        *(queries if how.sinks is None else how.sinks, *given, most, table, table.stride(0)),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *scaling(how),
        SINKS=how.sinks is not None,
        B=SEQUENCES_AT_ONCE,
        **constants,
        **sizes,
        num_warps=8 if rows > 64 else 4,
        num_stages=STAGES,
        maxnreg=MAX_REGISTERS if small and rows > 64 else None,
    )
    # Of few tokens there are few blocks as a rule, each in many parts.
    each, wide = 4 if few else MIN_ROWS, constants["D"]
    blocks = min(most, 2 * shared["SHARES"] // kv_heads + 2)
    _join[(blocks * kv_heads, rows // each)](
        *given, R=each, P=max(1, JOINED // (each * wide)), DIM=dim, D=wide, **sizes
    )


# fmt: off
@program("laid", "most", "tables", "pages")  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, new_keys, new_values, old_keys, old_values, sinks,
    mixed, parts, weights, laid, mixed_token, mixed_head, most, tables, pages,
    query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head, inner, factor,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    SHARES: tl.constexpr, LEAST: tl.constexpr, KV_HEADS: tl.constexpr, B: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,  # noqa: N803
    N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    number, row, dim = tl.program_id(0), tl.arange(0, M), tl.arange(0, D)
    item, items, count, origin, begin, each, at, stop = taken_by(
        number, laid, most, SHARES, LEAST, KV_HEADS, B
    )
    for place in range(item, item + items):
        kv_head, block = place // count, origin + place % count
        record = laid + RECORD * (1 + block)
        first, end = tl.load(record + 2), tl.load(record + 5)
        token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
        live = (row < TOKENS * GROUP) & (token < end)
        here = live[:, None] & (dim < DIM)[None, :]
        where = token.to(tl.int64)[:, None] * query_token + head[:, None] * query_head
        query = tl.load(queries + where + dim[None, :], mask=here, other=0.0)
        until, start, past = tl.load(record + 3), tl.load(record + 4), tl.load(record + 6)
        old, new, rest, masked = tiles_of(start, past, first, until, WINDOW, N)
        tiles, ahead = old + new + rest + masked, kv_head * each + tl.load(record) - begin
        low, high = tl.maximum(at - ahead, 0), tl.minimum(stop - ahead, tiles)
        peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        if SINKS:
            # They are counted with the last tile.
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            peak = tl.where(high == tiles, sink, peak)
            total = tl.where(high == tiles, total + 1.0, total)
        peak, total, sums = _over(
            query, token, peak, total,
            new_keys + kv_head * new_key_head, new_values + kv_head * new_value_head,
            old_keys + kv_head * key_head, old_values + kv_head * value_head,
            tables + tl.load(record + 1).to(tl.int64) * pages,
            low, high, first, until, start, end, past,
            new_key_token, new_value_token, key_slot, key_entry, value_slot, value_entry,
            inner, factor, PAGE, WINDOW, CAPPED, M, N, DIM, D,
        )
        if high - low == tiles:
            where = token.to(tl.int64)[:, None] * mixed_token + head[:, None] * mixed_head
            result = sums / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(mixed + where + dim[None, :], result.to(mixed.dtype.element_ty), mask=here)
        else:
            line = (2 * number + (at < ahead).to(tl.int32)) * M + row
            tl.store(parts + line[:, None] * DIM + dim[None, :], sums, mask=(dim < DIM)[None, :])
            tl.store(weights + 2 * line, peak)
            tl.store(weights + 2 * line + 1, total)


@triton.jit  # type: ignore[untyped-decorator]
def _over(  # type: ignore[no-untyped-def]
    query, token, peak, total, new_keys, new_values, old_keys, old_values, table,
    low, high, first, until, start, end, past,
    new_key_token, new_value_token, key_slot, key_entry, value_slot, value_entry, inner, factor,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Over tiles [low, high) of what a block sees, in the order of `tiles_of`."""
    sums, position = tl.zeros([M, D], tl.float32), past + token - start
    old, new, rest, _ = tiles_of(start, past, first, until, WINDOW, N)
    if WINDOW > 0:
        least = tl.maximum(past + first - start + 1 - WINDOW, 0)
        bottom, ground = least // N * N, tl.maximum(start, first + 1 - WINDOW)
    else:
        least, bottom, ground = 0, old * N, start + new * N
        peak, total, sums = earlier(
            query, position, peak, total, sums, old_keys, old_values, table,
            low * N, tl.minimum(high, old) * N, least,
            key_slot, key_entry, value_slot, value_entry, inner, factor,
            PAGE, WINDOW, CAPPED, False, N, DIM, D,
        )
        peak, total, sums = own(
            query, token, peak, total, sums, new_keys, new_values,
            start + tl.maximum(low - old, 0) * N, start + tl.minimum(high - old, new) * N, end,
            new_key_token, new_value_token, inner, factor, WINDOW, CAPPED, False, N, DIM, D,
        )
    low, high = low - old - new, high - old - new
    peak, total, sums = earlier(
        query, position, peak, total, sums, old_keys, old_values, table,
        bottom + tl.maximum(low, 0) * N, tl.minimum(bottom + tl.minimum(high, rest) * N, past),
        least, key_slot, key_entry, value_slot, value_entry, inner, factor,
        PAGE, WINDOW, CAPPED, True, N, DIM, D,
    )
    low, high = low - rest, high - rest
    return own(
        query, token, peak, total, sums, new_keys, new_values,
        ground + tl.maximum(low, 0) * N, tl.minimum(ground + high * N, until), end,
        new_key_token, new_value_token, inner, factor, WINDOW, CAPPED, True, N, DIM, D,
    )


@program("laid")  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    mixed, parts, weights, laid, mixed_token, mixed_head,
    SHARES: tl.constexpr, LEAST: tl.constexpr, KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,  # noqa: N803
    R: tl.constexpr, P: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Some rows of one block and KV head, of what several programs have of them."""
    lower, upper = tl.load(laid), tl.load(laid + 1)
    kv_head, block = tl.program_id(0) % KV_HEADS, lower + tl.program_id(0) // KV_HEADS
    if block >= upper:
        return
    begin, each, share = row_of(laid, lower, upper, SHARES, LEAST, KV_HEADS)
    record = laid + RECORD * (1 + block)
    ahead = kv_head * each + tl.load(record) - begin
    behind = kv_head * each + tl.load(record + RECORD) - begin
    low, high = ahead // share, tl.cdiv(behind, share)
    if high - low == 1:
        return
    first, end = tl.load(record + 2), tl.load(record + 5)
    row, dim = tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, D)
    peak, total = tl.full([R], float("-inf"), tl.float32), tl.zeros([R], tl.float32)
    sums = tl.zeros([R, D], tl.float32)
    for at in range(low, high, P):
        number = at + tl.arange(0, P)
        line = 2 * number + (number * share < ahead).to(tl.int32)
        line, there = line[None, :] * M + row[:, None], (number < high)[None, :]
        peaks = tl.load(weights + 2 * line, mask=there, other=float("-inf"))
        totals = tl.load(weights + 2 * line + 1, mask=there, other=0.0)
        some = parts + line[:, :, None] * DIM + dim[None, None, :]
        some = tl.load(some, mask=there[:, :, None] & (dim < DIM)[None, None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 1))
        # Where nothing was seen yet, anything but an infinity will do.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        before, scales = tl.exp2(peak - safe), tl.exp2(peaks - safe[:, None])
        peak, total = higher, total * before + tl.sum(totals * scales, 1)
        sums = sums * before[:, None] + tl.sum(some * scales[:, :, None], 1)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < end)
    where = token.to(tl.int64)[:, None] * mixed_token + head[:, None] * mixed_head + dim[None, :]
    result = (sums / tl.where(total > 0, total, 1.0)[:, None]).to(mixed.dtype.element_ty)
    tl.store(mixed + where, result, mask=live[:, None] & (dim < DIM)[None, :])
# fmt: on
