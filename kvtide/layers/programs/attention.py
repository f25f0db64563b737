"""Attention by head over pages as device programs, for all sequences of a step.

The same sums as `attending.attend`, tile by tile with a running maximum, so nothing but a tile
of scores is ever written down. Earlier tokens are read through the page table, the step's own from
the step, as `attend_over_pages` does.

Of several tokens of a sequence a program takes some neighbouring ones, with all query heads of one
KV head, over all keys that they see; or a part of those keys, where there are few tokens and much
before them. Single tokens are taken by `attention_single`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.attending import Attending
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.programs.attention_single import attend_singly
from kvtide.layers.programs.attention_tiles import compiled_for, earlier, own, scaling
from kvtide.layers.programs.compiling import program
from kvtide.layers.programs.sizes import LEAST_ROWS, power_of_two
from kvtide.layers.programs.spans import backwards, spans
from kvtide.layers.programs.tiles import LEAST_KEYS, Parts, stored

ROWS = 128
"""Queries times heads that a program takes."""
WIDE_ROWS = 32
"""As many where numbers have four bytes."""
LEAST_TILES = 8
"""A part has no fewer tiles of keys than this, or some more of them."""
STAGES = 3
"""Tiles of the step's own keys that are on their way."""


def attend_paged(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending
) -> Tensor:
    """Of the step's queries (tokens, heads, dim), over what was kept and what the step brings."""
    if run.batch.bounds.longest == 1:
        mixed = torch.empty_like(queries)
        attend_singly(run, place, queries, kept, how, mixed)
        return mixed
    mixed = _attend_blocks(run, place, queries, kept, how)
    if run.batch.bounds.singles:
        attend_singly(run, place, queries, kept, how, mixed)
    return mixed


def _attend_blocks(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending
) -> Tensor:
    """Of all sequences with more than one token; room for those with one."""
    batch, keys, values = run.batch, kept["k"], kept["v"]
    group = queries.shape[1] // keys.shape[1]
    most = ROWS if queries.itemsize < 4 else WIDE_ROWS
    past, few = batch.bounds.prompt_past, batch.bounds.longest * group <= LEAST_ROWS
    rows = max(LEAST_ROWS if few else most, power_of_two(group))
    tokens = rows // group
    blocks = spans(run, tokens, singles=False)
    view, table = run.step.view(place.pool.name, place.layer), batch.slots[place.anchor]
    shape = compiled_for(queries, keys, how, run.step.page_tokens)
    parts = Parts.of(
        queries,
        queries.shape[-1],
        blocks.busy * keys.shape[1],
        rows,
        0 if how.window is not None else past * LEAST_KEYS // (LEAST_TILES * shape["N"]),
    )
    if parts.count > 1 and len(batch.rows) > 1:
        parts.weights.zero_()  # Of single tokens nobody writes any here.
    _attend[(keys.shape[1], len(blocks.table), parts.count)](
        *(queries, keys, values, view["k"], view["v"], parts.mixed, parts.weights),
        queries if how.sinks is None else how.sinks,
        *(batch.rows, table, blocks.table, table.stride(0), len(queries)),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *scaling(how),
        SINKS=how.sinks is not None,
        SPLIT=parts.count > 1,
        GROUP=group,
        TOKENS=tokens,
        M=rows,
        **shape,
        num_warps=8 if rows > 64 else 4,
        num_stages=STAGES,
    )
    return parts.joined(queries.dtype)


@triton.jit
def located(rows, sequence):  # type: ignore[no-untyped-def]
    """A sequence's first row, end row, and tokens before the step."""
    one = rows + 3 * sequence
    return tl.load(one), tl.load(one + 1), tl.load(one + 2)


# fmt: off
@program("rows", "tables", "pages", "tokens")  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, new_keys, new_values, old_keys, old_values, mixed, weights, sinks,
    rows, tables, blocks, pages, tokens,
    query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head, inner, factor,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,  # noqa: N803
    N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    kv_head, part = tl.program_id(0), tl.program_id(2)
    last, block = part == tl.num_programs(2) - 1, backwards(tl.program_id(1), tl.num_programs(1))
    sequence, first = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1)
    if sequence < 0:
        return
    start, end, past = located(rows, sequence)
    row, dim = tl.arange(0, M), tl.arange(0, D)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < end)
    where = token.to(tl.int64)[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    query = tl.load(queries + where, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        peak, total = tl.where(last, sink, peak), tl.where(last, total + 1.0, total)
    sums = tl.zeros([M, D], tl.float32)
    table, position = tables + sequence.to(tl.int64) * pages, past + token - start
    old_keys, old_values = old_keys + kv_head * key_head, old_values + kv_head * value_head
    new_keys, new_values = new_keys + kv_head * new_key_head, new_values + kv_head * new_value_head
    if WINDOW > 0:
        least = tl.maximum(past + first - start + 1 - WINDOW, 0)
        low, origin = least // N * N, tl.maximum(start, first + 1 - WINDOW)
    else:
        # All that came before the first query is seen: only what whole tiles leave is masked.
        least, low, origin = 0, past // N * N, start + (first - start) // N * N
        each = tl.cdiv(low // N, tl.num_programs(2)) * N
        peak, total, sums = earlier(
            query, position, peak, total, sums, old_keys, old_values, table,
            part * each, tl.minimum(part * each + each, low), least,
            key_slot, key_entry, value_slot, value_entry, inner, factor,
            PAGE, WINDOW, CAPPED, False, N, DIM, D,
        )
        peak, total, sums = own(
            query, token, peak, total, sums, new_keys, new_values,
            start, tl.where(last, origin, start), end,
            new_key_token, new_value_token, inner, factor, WINDOW, CAPPED, False, N, DIM, D,
        )
    peak, total, sums = earlier(
        query, position, peak, total, sums, old_keys, old_values, table,
        low, tl.where(last, past, low), least,
        key_slot, key_entry, value_slot, value_entry, inner, factor,
        PAGE, WINDOW, CAPPED, True, N, DIM, D,
    )
    peak, total, sums = own(
        query, token, peak, total, sums, new_keys, new_values,
        origin, tl.where(last, tl.minimum(first + TOKENS, end), origin), end,
        new_key_token, new_value_token, inner, factor, WINDOW, CAPPED, True, N, DIM, D,
    )
    # What is left of the step, and the sinks, are the last part's.
    line = (part.to(tl.int64) * tokens + token) * (tl.num_programs(0) * GROUP) + head
    stored(mixed, weights, line, live, peak, total, sums, DIM, D, SPLIT)
# fmt: on
