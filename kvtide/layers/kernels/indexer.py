"""Indexers: the scores of all entries that a query sees, and the choice of the best of them.

The same as `selecting.choose`, with numbers in place of a mask. Scores are written down, for as
many queries at a time as there is room for. The choice is made tile by tile, then among those that
are left, until they are one tile.

What always holds:
- Of equal scores the entry that stands first is taken. What is equal here may differ in its last
  bits from what is equal in torch, where sums have another order.
- Numbers stand first in a row, the lowest first, and behind them -1 where a query sees fewer.
- Where no query can see more than it may choose, nothing is scored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.query_blocks import spans
from kvtide.spec import Encoding
from kvtide.spec.pool import SCALED_GROUP

SCORES = 1 << 26
"""So many are written down at a time."""
QUERIES = 32
"""Queries that a program takes of a prompt."""
PROGRAMS = 528
"""As many keep a large device busy."""
_KEYS = 128
"""Keys of a tile."""
TILE = 4096
"""Scores that are looked at together, if so few are to be chosen that `FEWER` times as many fit."""
FEWER = 4
_MIN_TILE = 1024
"""As many, where no query can see more."""


def select_entries(
    run: ForwardPass, place: Place, queries: Tensor, weights: Tensor, count: int
) -> Tensor:
    """For each query the numbers of the entries that it sees: (tokens, count) int32.

    A query at position p sees up to `count` of the first (p + 1) // ratio entries, those with
    the highest Σ over heads of weight · relu(query · key). Queries (tokens, heads, dim), weights
    (tokens, heads), whose rows may lie apart.
    """
    batch, ratio = run.batch, place.pool.tokens_per_entry
    most = (batch.bounds.max_past + batch.bounds.longest) // ratio
    chosen = batch.rows.new_empty((len(queries), count))
    if most <= count:
        _chosen(run, chosen.new_empty((1, 1), dtype=torch.float32), chosen, ratio, most, 0)
        return chosen
    queries = queries.contiguous()
    each = len(queries) if batch.bounds.longest == 1 else max(1, SCORES // most)
    assert weights.stride(1) == 1
    scores = weights.new_empty((min(each, len(queries)), most), dtype=torch.float32)
    for first in range(0, len(queries), each):
        score_entries(run, place, queries, weights, scores, first)
        ours = chosen[first : first + each]
        _chosen(run, scores, ours, ratio, most, first)
    return chosen


def score_entries(
    run: ForwardPass, place: Place, queries: Tensor, weights: Tensor, scores: Tensor, first: int
) -> None:
    """Of the queries from row `first` on, as many as `scores` (queries, entries) has room for.

    Nothing is written that holds for an entry which a query does not see.
    """
    batch, ratio = run.batch, place.pool.tokens_per_entry
    _, heads, dim = queries.shape
    view = run.step.view(place.pool.name, place.layer)
    keys, scales = view["index_key"], view.get("index_key_scale")
    assert (scales is not None) == (place.pool.entry.encoding is Encoding.SCALED)
    assert scales is None or dim <= SCALED_GROUP, "a key has one scale"
    table = batch.slots[place.anchor]
    tile = _KEYS if queries.element_size() == 2 else 2 * MIN_ROWS
    wide = max(MIN_ROWS, power_of_two(heads))
    last = min(len(queries), first + len(scores))
    tiles, single = divided_up(scores.shape[1], tile), batch.bounds.longest == 1
    if single:
        blocks, programs = batch.owners, len(queries)
        parts = max(1, min(PROGRAMS // programs, tiles))
    else:
        blocks = spans(run, QUERIES, within=(first, last)).table
        programs, parts = len(blocks), tiles
    (_score_single if single else _score_several)[(parts, programs)](
        *(queries, weights, keys, keys if scales is None else scales, scores),
        *(batch.rows, blocks, table, table.stride(0), weights.stride(0), scores.stride(0), first),
        SLOT=keys.stride(0),
        ENTRY=keys.stride(1),
        SCALED=scales is not None,
        PAGE=run.step.page_tokens // ratio,
        RATIO=ratio,
        HEADS=heads,
        H=wide,
        DIM=dim,
        D=max(MIN_ROWS, power_of_two(dim)),
        N=tile,
        TOKENS=max(1, tile // wide),
        num_warps=4 if single else 8,
        num_stages=3 if single else 2,
    )


def _chosen(
    run: ForwardPass, scores: Tensor, chosen: Tensor, ratio: int, most: int, first: int
) -> None:
    """Fills `chosen`, whose first row is row `first` of the step; `most` is what a query can see.

    With no more than may be chosen, scores are not looked at.
    """
    tokens, count = chosen.shape
    tile = max(TILE, power_of_two(FEWER * count))
    if most <= _MIN_TILE:
        tile = min(tile, _MIN_TILE)
    numbers, width = chosen, most
    for tiles in _rounds(most, tile, count):
        last = tiles == 1
        found = chosen if last else chosen.new_empty((tokens, tiles * count))
        values = scores if last else scores.new_empty(found.shape)
        _choose[(tokens, tiles)](
            *(scores, numbers, found, values, run.batch.rows, run.batch.owners),
            *(scores.stride(0), first, count, width),
            RATIO=ratio,
            FIRST=numbers is chosen,
            LAST=last,
            SCORED=most > count,
            B=tile,
            P=power_of_two(count),
            num_warps=max(4, min(16, tile // 512)),
        )
        numbers, scores, width = found, values, tiles * count


def _rounds(entries: int, tile: int, count: int) -> Iterator[int]:
    """How many tiles there are in each round: so many of every tile go on to the next."""
    while (tiles := divided_up(entries, tile)) > 1:
        yield tiles
        entries = tiles * count
    yield 1


# -- programs ----------------------------------------------------------------------------------


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _keys_of(  # type: ignore[no-untyped-def]
    keys, scales, slot, within, queries,
    SLOT: tl.constexpr, ENTRY: tl.constexpr, SCALED: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """A tile of keys, one a row, and what their scores are to be multiplied with."""
    at, dim, there = slot.to(tl.int64) * SLOT + within * ENTRY, tl.arange(0, D), slot >= 0
    mask = there[:, None] & (dim < DIM)[None, :]
    key = tl.load(keys + at[:, None] + dim[None, :], mask=mask, other=0.0)
    factor = tl.full(slot.shape, 1.0, tl.float32)
    if SCALED:
        # Of four bytes each, where keys have one.
        factor = tl.load(scales + at // 4, mask=there, other=0.0)
    return key.to(queries.dtype.element_ty), factor


@program("rows", "owners", "slots", "table", "scores_row", "first")  # type: ignore[untyped-decorator]
def _score_single(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, owners, slots, table, weights_row, scores_row,
    first,
    SLOT: tl.constexpr, ENTRY: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,  # noqa: N803
    RATIO: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    D: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):
    """Of one token, as the only one of its sequence: a part of the entries."""
    token, parts = tl.program_id(1), tl.num_programs(0)
    number = tl.load(owners + token)
    visible = (tl.load(rows + 3 * number + 2) + 1) // RATIO
    head, dim, column = tl.arange(0, H), tl.arange(0, D), tl.arange(0, N)
    line = token.to(tl.int64) * HEADS + head
    mask = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    query = tl.load(queries + line[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    weight = weights + token.to(tl.int64) * weights_row + head
    weight = tl.load(weight, mask=head < HEADS, other=0.0).to(tl.float32)
    each = tl.cdiv(tl.cdiv(visible, N), parts) * N
    begin = tl.program_id(0) * each
    pages, entry = slots + number * table, begin + column
    slot = tl.load(pages + entry // PAGE, mask=entry < visible, other=-1)
    for at in range(begin, tl.minimum(begin + each, visible), N):
        entry = at + column
        key, factor = _keys_of(
            keys, scales, slot, entry % PAGE, queries, SLOT, ENTRY, SCALED, DIM, D)
        # Where the next tile lies is known before this one is done with.
        slot = tl.load(pages + (entry + N) // PAGE, mask=entry + N < visible, other=-1)
        products = tl.dot(key, tl.trans(query), input_precision="ieee")
        found = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1) * factor
        tl.store(scores + token.to(tl.int64) * scores_row + entry, found, mask=entry < visible)


@program("rows", "slots", "table", "scores_row", "first")  # type: ignore[untyped-decorator]
def _score_several(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, blocks, slots, table, weights_row, scores_row,
    first,
    SLOT: tl.constexpr, ENTRY: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,  # noqa: N803
    RATIO: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    D: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):
    """Of neighbours in a sequence, a few after another: one tile of entries."""
    block = blocks + 3 * tl.program_id(1)
    number, low, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if number < 0:
        return
    before = tl.load(rows + 3 * number + 2) - tl.load(rows + 3 * number)
    begin, visible = tl.program_id(0) * N, (before + end) // RATIO
    if begin >= visible:
        return
    row, dim, entry = tl.arange(0, TOKENS * H), tl.arange(0, D), begin + tl.arange(0, N)
    token, head, after = row // H, row % H, tl.arange(0, TOKENS)
    slot = tl.load(slots + number * table + entry // PAGE, mask=entry < visible, other=-1)
    key, factor = _keys_of(keys, scales, slot, entry % PAGE, queries, SLOT, ENTRY, SCALED, DIM, D)
    # The first that sees an entry of this tile.
    low = tl.maximum(low, (begin + 1) * RATIO - 1 - before)
    for at in range(low, end, TOKENS):
        line = ((at + token) * HEADS + head).to(tl.int64)
        live = (head < HEADS) & (at + token < end)
        mask = live[:, None] & (dim < DIM)[None, :]
        query = tl.load(queries + line[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        weight = weights + (at + token).to(tl.int64) * weights_row + head
        weight = tl.load(weight, mask=live, other=0.0).to(tl.float32)
        products = tl.dot(key, tl.trans(query), input_precision="ieee")
        products = tl.maximum(products, 0.0) * weight[None, :]
        found = tl.sum(tl.reshape(products, [N, TOKENS, H]), 2) * factor[:, None]
        to = (at + after - first)[None, :] * scores_row + entry[:, None]
        seen = entry[:, None] < ((before + at + after + 1) // RATIO)[None, :]
        tl.store(scores + to, found, mask=seen & (at + after < end)[None, :])


@triton.jit
def _ordered(scores, there):  # type: ignore[no-untyped-def]
    """Scores as whole numbers of the same order; the least of all where there are none.

    Zeros of both signs never meet: a sum is -0 only if all weights are negative, and then none is
    +0.
    """
    bits = tl.load(scores, mask=there, other=0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648
    return tl.where(there, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _best(bits, there, count):  # type: ignore[no-untyped-def]
    """Where the best `count` of a tile stand: of those at the lowest that is taken, the first.

    That is found bit by bit, with no more than a sum over the tile for each, until just as many
    are above it.
    """
    lowest, above = tl.full([], 0, tl.uint32), tl.sum(there.to(tl.int32), 0)
    bit = tl.full([], 0x80000000, tl.uint32)
    while (bit > 0) & (above > count):
        higher = lowest | bit
        found = tl.sum((bits >= higher).to(tl.int32), 0)
        lowest = tl.where(found >= count, higher, lowest)
        above = tl.where(found >= count, found, above)
        bit = bit >> 1
    kept = there & (bits >= lowest)
    if above > count:
        alike = (kept & (bits == lowest)).to(tl.int32)
        wanted = count - above + tl.sum(alike, 0)
        kept = kept & ((alike == 0) | (tl.cumsum(alike, 0) <= wanted))
    return kept


@program("rows", "owners", "scores_row", "first", "width")  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores, numbers, chosen, values, rows, owners, scores_row, first, count, width,
    RATIO: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SCORED: tl.constexpr,  # noqa: N803
    B: tl.constexpr, P: tl.constexpr,  # noqa: N803
):
    """The best of a tile of a row, in the order in which they stand; behind them -1.

    In the first round entries are numbered as they stand; later these are those of the round
    before, with their `numbers`.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    wide, entry = row.to(tl.int64), tile * B + tl.arange(0, B)
    if FIRST:
        one = rows + 3 * tl.load(owners + first + row)
        visible = (tl.load(one + 2) + first + row - tl.load(one) + 1) // RATIO
        number, there = entry, entry < visible
    else:
        number = tl.load(numbers + wide * width + entry, mask=entry < width, other=-1)
        there = number >= 0
    kept = there
    if SCORED:
        scores += wide * scores_row
        kept = _best(_ordered(scores + entry, there), there, count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    at = (wide * tl.num_programs(1) + tile) * count
    tl.store(chosen + at + place, number, mask=kept)
    if not LAST:
        tl.store(values + at + place, tl.load(scores + entry, mask=kept, other=0.0), mask=kept)
    lane = tl.arange(0, P)
    rest = (lane > tl.max(place, 0)) & (lane < count)
    tl.store(chosen + at + lane, lane * 0 - 1, mask=rest)
# fmt: on
