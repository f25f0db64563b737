"""Indexers: the scores of all entries that a query sees, and the choice of the best of them.

The same as `selecting.choose`, with numbers in place of a mask. Scores are written down, for as
many queries at a time as there is room for; the choice then looks for the least score that is
taken, eight bits at a time.

What always holds:
- Of equal scores the entry that stands first is taken. What is equal here may differ in its last
  bits from what is equal in torch, where sums have another order.
- Numbers stand first in a row, and behind them -1 where a query sees fewer.
- Where no query can see more than it may choose, nothing is scored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.programs.sizes import divided_up, power_of_two
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
_MOST_AT_ONCE = 16384
"""Scores that are looked at together."""
_LEAST_ROWS = 16
"""What a matrix unit takes."""


def choose_paged(
    run: ForwardPass, place: Place, queries: Tensor, weights: Tensor, count: int
) -> Tensor:
    """For each query the numbers of the entries that it sees: (tokens, count) int32.

    A query at position p sees up to `count` of the first (p + 1) // ratio entries, those with
    the highest Σ over heads of weight · relu(query · key). Queries (tokens, heads, dim), weights
    (tokens, heads).
    """
    batch, ratio = run.batch, place.pool.tokens_per_entry
    most = (batch.most_past + batch.longest) // ratio
    chosen = batch.rows.new_empty((len(queries), count))
    if most <= count:
        _chosen(run, chosen.new_empty((1, 1), dtype=torch.float32), chosen, ratio, most, 0)
        return chosen
    queries, weights = queries.contiguous(), weights.contiguous()
    each = len(queries) if batch.longest == 1 else max(1, SCORES // most)
    scores = weights.new_empty((min(each, len(queries)), most), dtype=torch.float32)
    for first in range(0, len(queries), each):
        score(run, place, queries, weights, scores, first)
        ours = chosen[first : first + each]
        _chosen(run, scores, ours, ratio, most, first)
    return chosen


def score(
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
    tile = _KEYS if queries.element_size() == 2 else 2 * _LEAST_ROWS
    wide = max(_LEAST_ROWS, power_of_two(heads))
    last = min(len(queries), first + len(scores))
    tiles, single = divided_up(scores.shape[1], tile), batch.longest == 1
    if single:
        blocks, programs = batch.owners, len(queries)
        parts = max(1, min(PROGRAMS // programs, tiles))
    else:
        key = ("scored", first, last)
        blocks = run.shared(key, lambda: _blocks(run, first, last))
        programs, parts = len(blocks), tiles
    (_score_single if single else _score_several)[(parts, programs)](
        *(queries, weights, keys, keys if scales is None else scales, scores),
        *(batch.rows, blocks, table, table.stride(0), scores.stride(0), first),
        SLOT=keys.stride(0),
        ENTRY=keys.stride(1),
        SCALED=scales is not None,
        PAGE=run.step.page_tokens // ratio,
        RATIO=ratio,
        HEADS=heads,
        H=wide,
        DIM=dim,
        D=max(_LEAST_ROWS, power_of_two(dim)),
        N=tile,
        TOKENS=max(1, tile // wide),
        num_warps=4 if single else 8,
        num_stages=3 if single else 2,
    )


def _blocks(run: ForwardPass, first: int, last: int) -> Tensor:
    """(programs, 3): sequence, first row, end row; those of rows [first, last)."""
    blocks = [
        (number, row, min(row + QUERIES, rows.end, last))
        for number, rows in enumerate(run.sequences)
        for row in range(max(first, rows.start), min(last, rows.end), QUERIES)
    ]
    return torch.tensor(blocks, dtype=torch.int32).to(run.positions.device)


def _chosen(
    run: ForwardPass, scores: Tensor, chosen: Tensor, ratio: int, most: int, first: int
) -> None:
    """Fills `chosen`, whose first row is row `first` of the step."""
    tokens, count = chosen.shape
    size = min(_MOST_AT_ONCE, max(512, power_of_two(most)))
    _choose[(tokens,)](
        *(scores, chosen, run.batch.rows, run.batch.owners, scores.stride(0), first, count),
        RATIO=ratio,
        B=size,
        num_warps=min(16, max(4, size // 1024)),
    )


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


@triton.jit  # type: ignore[untyped-decorator]
def _score_single(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, owners, slots, table, scores_row, first,
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
    weight = tl.load(weights + line, mask=head < HEADS, other=0.0).to(tl.float32)
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


@triton.jit  # type: ignore[untyped-decorator]
def _score_several(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, blocks, slots, table, scores_row, first,
    SLOT: tl.constexpr, ENTRY: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,  # noqa: N803
    RATIO: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    D: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):
    """Of neighbours in a sequence, a few after another: one tile of entries."""
    block = blocks + 3 * tl.program_id(1)
    number, low, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
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
        weight = tl.load(weights + line, mask=live, other=0.0).to(tl.float32)
        products = tl.dot(key, tl.trans(query), input_precision="ieee")
        products = tl.maximum(products, 0.0) * weight[None, :]
        found = tl.sum(tl.reshape(products, [N, TOKENS, H]), 2) * factor[:, None]
        to = (at + after - first)[None, :] * scores_row + entry[:, None]
        seen = entry[:, None] < ((before + at + after + 1) // RATIO)[None, :]
        tl.store(scores + to, found, mask=seen & (at + after < end)[None, :])


@triton.jit
def _ordered(scores, entry, visible):  # type: ignore[no-untyped-def]
    """Scores as whole numbers of the same order; the least of all where there are none.

    Zeros of both signs never meet: a sum is -0 only if all weights are negative, and then none is
    +0.
    """
    score = tl.load(scores + entry, mask=entry < visible, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648
    return tl.where(entry < visible, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    scores, chosen, rows, owners, scores_row, first, count,
    RATIO: tl.constexpr, B: tl.constexpr,  # noqa: N803
):
    """The best `count` of a row: those that are above a threshold, and the first that are at it.

    The threshold is found eight bits at a time, by how many scores have which.
    """
    row = tl.program_id(0).to(tl.int64)
    one = rows + 3 * tl.load(owners + first + row)
    visible = (tl.load(one + 2) + first + tl.program_id(0) - tl.load(one) + 1) // RATIO
    chosen, scores, column = chosen + row * count, scores + row * scores_row, tl.arange(0, B)
    if visible <= count:
        for at in range(0, count, B):
            entry = at + column
            tl.store(chosen + entry, tl.where(entry < visible, entry, -1), mask=entry < count)
        return
    # Always: more than are wanted agree with `known` in the bits from `shift` on, or just as many.
    digit = tl.arange(0, 256)
    known, shift, wanted, alike = tl.full([], 0, tl.int64), 32, count, visible
    while (shift > 0) & (alike > wanted):
        shift -= 8
        counts = tl.zeros([256], tl.int32)
        for at in range(0, visible, B):
            entry = at + column
            bits = _ordered(scores, entry, visible)
            upper = (bits >> shift).to(tl.int64)
            live = (upper >> 8 == known) & (entry < visible)
            counts += tl.histogram(tl.where(live, upper & 255, 0).to(tl.int32), 256)
            counts -= tl.where(digit == 0, B - tl.sum(live.to(tl.int32), 0), 0)
        least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        here = digit == tl.sum((least >= wanted).to(tl.int32), 0) - 1
        alike = tl.sum(tl.where(here, counts, 0), 0)
        wanted -= tl.sum(tl.where(here, least - counts, 0), 0)
        known = known * 256 + tl.sum(tl.where(here, digit, 0), 0)
    best, others = count * 0, count * 0
    for at in range(0, visible, B):
        entry = at + column
        upper = (_ordered(scores, entry, visible) >> shift).to(tl.int64)
        better = ((upper > known) & (entry < visible)).to(tl.int32)
        other = ((upper == known) & (entry < visible)).to(tl.int32)
        place = best + tl.cumsum(better, 0) - 1
        tl.store(chosen + place, entry, mask=better > 0)
        place = count - wanted + others + tl.cumsum(other, 0) - 1
        tl.store(chosen + place, entry, mask=(other > 0) & (place < count))
        best, others = best + tl.sum(better, 0), others + tl.sum(other, 0)
# fmt: on
