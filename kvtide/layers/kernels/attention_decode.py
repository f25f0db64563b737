"""Attention by head of single tokens, each over its sequence's pages.

Every sequence and KV head is an item of so many tiles of keys, at least one. All items' tiles lie
in one row, and the programs, as many as the device runs at a time, cut it into equal shares. Where
a share ends within an item, another program goes on with it; `_join` adds up what the programs have
of an item. What program p has of item i lies in place p + i, since going along the row either
the one or the other grows.

How many programs there are depends on shapes and bounds alone, and who takes what on the lengths in
`Batch.rows`, so a step can be recorded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import Attending
from kvtide.layers.kernels.attention_cascade import Prefixes, attend_together
from kvtide.layers.kernels.attention_tiles import (
    compiled_for,
    earlier,
    keys_of_tile,
    scaling,
)
from kvtide.layers.kernels.elementwise import tanh
from kvtide.layers.kernels.grid import MIN_ROWS, SEQUENCES_AT_ONCE, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.packing import Fields

PROGRAMS = 3 * 132
"""As many run at a time."""
MAX_REGISTERS = 168
"""So that they do."""
MIN_TILES = 2
"""Fewer are not worth a program."""


def attend_singly(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending, mixed: Tensor
) -> None:
    """Of all sequences with one token."""
    batch, keys, values = run.batch, kept["k"], kept["v"]
    (_, heads, dim), kv_heads, count = queries.shape, keys.shape[1], len(batch.rows)
    group, each = heads // kv_heads, keys_of_tile(queries, keys)
    prefixes = attend_together(run, place, queries, keys, how)
    blocks = None if prefixes is None else (place.anchor, prefixes.each)
    ends = run.shared(
        ("tiles", each, how.window, blocks),
        lambda: _laid(batch.rows, each, how.window, prefixes),
    )
    span = (
        batch.bounds.max_past
        if how.window is None
        else min(batch.bounds.max_past, how.window + each)
    )
    most = count * kv_heads * max(1, -(-span // each))
    programs = max(1, min(PROGRAMS, -(-most // MIN_TILES)))
    parts = queries.new_empty((count * kv_heads + programs, group, dim), dtype=torch.float32)
    # Of each part, the highest score and the sum of shares relative to it.
    weights = parts.new_empty((*parts.shape[:2], 2))
    view, table = run.step.view(place.pool.name, place.layer), batch.slots[place.anchor]
    constants = compiled_for(queries, keys, how, run.step.page_tokens)
    rows = max(MIN_ROWS, power_of_two(group))
    _attend_single[(programs,)](
        *(queries, keys, values, view["k"], view["v"], parts, weights),
        *(batch.rows, table, ends, ends if prefixes is None else prefixes.known),
        *(count, table.stride(0)),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *scaling(how),
        KV_HEADS=kv_heads,
        GROUP=group,
        M=rows,
        SEQUENCES=SEQUENCES_AT_ONCE,
        EACH=0 if prefixes is None else prefixes.each,
        **constants,
        num_warps=4 if rows < 64 else 8,
        maxnreg=MAX_REGISTERS if rows < 64 else None,
    )
    _join[(count, heads)](
        *(parts, weights, queries if how.sinks is None else how.sinks, mixed, batch.rows, ends),
        *((ends, parts, weights) if prefixes is None else prefixes.given),
        *(0 if prefixes is None else len(prefixes.parts), count, programs, *mixed.stride()[:2]),
        SINKS=how.sinks is not None,
        EACH=0 if prefixes is None else prefixes.each,
        KV_HEADS=kv_heads,
        GROUP=group,
        PARTS=16,
        DIM=dim,
        D=constants["D"],
        num_warps=2,
    )


def _laid(rows: Tensor, keys: int, window: int | None, prefixes: Prefixes | None) -> Tensor:
    """Where every sequence's tiles begin among those of one KV head, and at last how many there
    are. Sequences of several tokens have none."""
    ends = rows.new_empty(len(rows) + 1)
    _lay[(1,)](
        *(rows, ends, ends if prefixes is None else prefixes.known, len(rows)),
        WINDOW=window or 0,
        EACH=0 if prefixes is None else prefixes.each,
        N=keys,
        SEQUENCES=SEQUENCES_AT_ONCE,
    )
    return ends


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _prefix(known, sequence, past, there, EACH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """How many tokens a sequence has in common with its block: those are taken together."""
    if EACH > 0:
        tokens = tl.load(known + 2 * (sequence // EACH), mask=there, other=0)
        return tl.where(past >= tokens, tokens, 0)
    else:
        return past * 0


@program("rows", "count")  # type: ignore[untyped-decorator]
def _lay(  # type: ignore[no-untyped-def]
    rows, ends, known, count,
    WINDOW: tl.constexpr, EACH: tl.constexpr, N: tl.constexpr, SEQUENCES: tl.constexpr,  # noqa: N803
):
    total = tl.full([], 0, tl.int32)
    tl.store(ends, total)
    for at in range(0, count, SEQUENCES):
        number = at + tl.arange(0, SEQUENCES)
        ours = number < count
        start = tl.load(rows + 3 * number, mask=ours, other=0)
        end = tl.load(rows + 3 * number + 1, mask=ours, other=0)
        past = tl.load(rows + 3 * number + 2, mask=ours, other=0)
        if WINDOW > 0:
            begin = tl.maximum(past + 1 - WINDOW, 0) // N * N
        else:
            begin = _prefix(known, number, past, ours, EACH)
        tiles = tl.maximum(1, (past - begin + N - 1) // N)
        tiles = tl.where(ours & (end - start == 1), tiles, 0)
        tl.store(ends + number + 1, total + tl.cumsum(tiles, 0), mask=ours)
        total += tl.sum(tiles, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _item(ends, tile, count, KV_HEADS: tl.constexpr, SEQUENCES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The item that a tile is of."""
    sequence = tl.full([], 0, tl.int32)
    for at in range(0, count, SEQUENCES):
        number = at + tl.arange(0, SEQUENCES)
        done = tl.load(ends + 1 + number, mask=number < count, other=2147483647 // KV_HEADS)
        sequence += tl.sum((done * KV_HEADS <= tile).to(tl.int32), 0)
    first = tl.load(ends + sequence)
    each = tl.load(ends + sequence + 1) - first
    return sequence * KV_HEADS + (tile - first * KV_HEADS) // each


@triton.jit  # type: ignore[untyped-decorator]
def _opened(  # type: ignore[no-untyped-def]
    query, key, value, opens, inner, factor,
    CAPPED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """What a program begins with: the token's own key and value, or nothing."""
    score = tl.sum(query.to(tl.float32) * key.to(query.dtype).to(tl.float32)[None, :], 1)
    if CAPPED:
        score = tanh(score * inner)
    peak = tl.where(opens, score * factor, float("-inf"))
    total = tl.zeros([M], tl.float32) + tl.where(opens, 1.0, 0.0)
    sums = tl.zeros([M, D], tl.float32) + tl.where(opens, value.to(tl.float32), 0.0)[None, :]
    return peak, total, sums


@program("rows", "tables", "count", "pages")  # type: ignore[untyped-decorator]
def _attend_single(  # type: ignore[no-untyped-def]
    queries, new_keys, new_values, old_keys, old_values, parts, weights, rows, tables, ends, known,
    count, pages,
    query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head, inner, factor,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SEQUENCES: tl.constexpr,  # noqa: N803
    EACH: tl.constexpr,  # noqa: N803
    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    program, whole = tl.program_id(0), tl.load(ends + count) * KV_HEADS
    share = tl.cdiv(whole, tl.num_programs(0))
    at, stop = program * share, tl.minimum(program * share + share, whole)
    if at >= stop:
        return
    row, dim = tl.arange(0, M), tl.arange(0, D)
    inside = dim < DIM
    here = (row < GROUP)[:, None] & inside[None, :]
    last = _item(ends, stop - 1, count, KV_HEADS, SEQUENCES)
    for item in range(_item(ends, at, count, KV_HEADS, SEQUENCES), last + 1):
        sequence, kv_head = item // KV_HEADS, item % KV_HEADS
        token, past = tl.load(rows + 3 * sequence).to(tl.int64), tl.load(rows + 3 * sequence + 2)
        first = tl.load(ends + sequence)
        each = tl.load(ends + sequence + 1) - first
        begin = first * KV_HEADS + kv_head * each
        skipped, until = tl.maximum(at - begin, 0), tl.minimum(stop - begin, each)
        where = token * query_token + (kv_head * GROUP + row)[:, None] * query_head + dim[None, :]
        query = tl.load(queries + where, mask=here, other=0.0)
        key_at, value_at = token * new_key_token + dim, token * new_value_token + dim
        key = tl.load(new_keys + key_at + kv_head * new_key_head, mask=inside, other=0.0)
        value = tl.load(new_values + value_at + kv_head * new_value_head, mask=inside, other=0.0)
        peak, total, sums = _opened(
            query, key, value, skipped == 0, inner, factor, CAPPED, M, D
        )
        if WINDOW > 0:
            least = tl.maximum(past + 1 - WINDOW, 0)
        else:
            least = _prefix(known, sequence, past, sequence >= 0, EACH)
        low = least // N * N
        peak, total, sums = earlier(
            query, row * 0 + past, peak, total, sums,
            old_keys + kv_head * key_head, old_values + kv_head * value_head,
            tables + tl.cast(sequence, tl.int64) * pages,
            low + skipped * N, tl.minimum(low + until * N, past), least,
            key_slot, key_entry, value_slot, value_entry, inner, factor,
            PAGE, WINDOW, CAPPED, True, N, DIM, D,
        )
        place = (tl.cast(item, tl.int64) + program) * GROUP + row
        tl.store(parts + place[:, None] * DIM + dim[None, :], sums, mask=here)
        tl.store(weights + 2 * place, peak, mask=row < GROUP)
        tl.store(weights + 2 * place + 1, total, mask=row < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    parts, weights, place, ours, peak, total, sums, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Some more parts of a result, each with its share of the whole."""
    dim = tl.arange(0, D)
    peaks = tl.load(weights + 2 * place, mask=ours, other=float("-inf"))
    totals = tl.load(weights + 2 * place + 1, mask=ours, other=0.0)
    mask = ours[:, None] & (dim < DIM)[None, :]
    some = tl.load(parts + place[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    higher = tl.maximum(peak, tl.max(peaks, 0))
    scales, before = tl.exp2(peaks - higher), tl.exp2(peak - higher)
    total = total * before + tl.sum(totals * scales, 0)
    return higher, total, sums * before + tl.sum(some * scales[:, None], 0)


@program("rows", "of_prefix", "count", "programs")  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts, weights, sinks, mixed, rows, ends, known, prefix_parts, prefix_weights,
    of_prefix, count, programs, mixed_token, mixed_head,
    SINKS: tl.constexpr, EACH: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """One result of what several programs have of an item."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(ends + sequence)
    each = tl.load(ends + sequence + 1) - first
    if each == 0:
        return
    kv_head = head // GROUP
    share = tl.cdiv(tl.load(ends + count) * KV_HEADS, programs)
    begin = first * KV_HEADS + kv_head * each
    low, high = begin // share, (begin + each - 1) // share + 1
    dim = tl.arange(0, D)
    peak, total, sums = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    if SINKS:
        peak, total = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0
    for at in range(low, high, PARTS):
        program = at + tl.arange(0, PARTS)
        place = (sequence * KV_HEADS + kv_head + program).to(tl.int64) * GROUP + head % GROUP
        peak, total, sums = _added(
            parts, weights, place, program < high, peak, total, sums, DIM, D)
    if EACH > 0:
        past = tl.load(rows + 3 * sequence + 2)
        if _prefix(known, sequence, past, sequence >= 0, EACH) > 0:
            for at in range(0, of_prefix, PARTS):
                part = at + tl.arange(0, PARTS)
                place = (part.to(tl.int64) * count + sequence) * (KV_HEADS * GROUP) + head
                peak, total, sums = _added(
                    prefix_parts, prefix_weights, place, part < of_prefix,
                    peak, total, sums, DIM, D)
    where = tl.load(rows + 3 * sequence).to(tl.int64) * mixed_token + head * mixed_head + dim
    tl.store(mixed + where, (sums / total).to(mixed.dtype.element_ty), mask=dim < DIM)
# fmt: on
