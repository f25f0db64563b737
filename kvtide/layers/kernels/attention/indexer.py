"""The indexer of sparse attention: scores of all visible entries, and the top-k of each query.

`select_entries` gives what `layers/reference/indexer.py`, `select`, gives (the torch reference), as
indices in place of a mask. Scores are written to memory, for as many queries at a time as
MAX_SCORES allows. Top-k runs tile by tile, then among the winners of all tiles, until one tile is
left.

`_score_decode`   grid (splits, tokens or query blocks): few queries over a split of their entries
`_score_prefill`  grid (entry tiles, query blocks): one tile of entries, all queries of a block
`_select_tile`    grid (tokens, tiles): top-k of a tile by radix selection

What always holds:
- Of equal scores the first entry wins. Ties may differ from torch's in the last bits of sums.
- Indices are at the front of a row in ascending order, then -1 where a query sees fewer.
- Where no query can see more than top-k entries, nothing is scored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.query_blocks import query_blocks
from kvtide.spec import Encoding
from kvtide.spec.pool import SCALED_GROUP

MAX_SCORES = 1 << 26
"""Scores in memory at a time."""
QUERY_BLOCK = 32
"""Queries of a prefill chunk per CTA."""
FEW_QUERIES = 8
"""New tokens of a sequence up to which a CTA scores all of them over a split of the entries: decode
and verify steps."""
CTAS_PER_SM = 4
"""CTAs that the grid of a decode or verify step has per SM, at most."""
_TILE_KEYS = 128
"""Keys per tile (BLOCK_N); half as many where few queries unpack them, or have several tokens."""
_FEW_COLUMNS = 256
"""Columns of the dot for few queries (tokens times heads), at most; a quarter in fp32."""
TILE = 4096
"""Scores per tile of the selection, or MIN_TILES_OF_TOP_K times top-k if that is more."""
MIN_TILES_OF_TOP_K = 8
_MAX_TILE_WARPS = 8
_MIN_TILE = 1024
"""Scores per tile where no query sees more."""
_QUERY_FACTOR = tl.constexpr(2.0**60)
"""Of queries over keys that are 2⁻¹²⁰ times as large as stored, so that no product underflows."""


def select_entries(
    run: ForwardPass, place: Place, queries: Tensor, weights: Tensor, count: int
) -> Tensor:
    """The indices of each query's top-k entries, (tokens, count) int32.

    Of the first (p + 1) // ratio entries, a query at position p selects up to `count` with the
    highest Σ over heads of weight · relu(query · key). Queries are (tokens, heads, dim), weights
    (tokens, heads) with any row stride.
    """
    batch, ratio = run.batch, place.pool.tokens_per_entry
    max_visible = (batch.bounds.max_past + batch.bounds.longest) // ratio
    selected = batch.rows.new_empty((len(queries), count))
    if max_visible <= count:
        _select(
            run, selected.new_empty((1, 1), dtype=torch.float32), selected, ratio, max_visible, 0
        )
        return selected
    queries = queries.contiguous()
    queries_at_once = max(1, MAX_SCORES // max_visible)
    if batch.bounds.longest == 1:
        queries_at_once = len(queries)
    assert weights.stride(1) == 1
    scores = weights.new_empty(
        (min(queries_at_once, len(queries)), max_visible), dtype=torch.float32
    )
    for first in range(0, len(queries), queries_at_once):
        score_entries(run, place, queries, weights, scores, first)
        rows = selected[first : first + queries_at_once]
        _select(run, scores, rows, ratio, max_visible, first)
    return selected


def score_entries(
    run: ForwardPass, place: Place, queries: Tensor, weights: Tensor, scores: Tensor, first: int
) -> None:
    """Scores of the queries from row `first` on, as many as `scores` (queries, entries) has rows.

    Scores of entries that a query does not see are left unwritten.
    """
    batch, ratio = run.batch, place.pool.tokens_per_entry
    _, heads, dim = queries.shape
    view = run.step.view(place.pool.name, place.layer)
    keys, scales = view["index_key"], view.get("index_key_scale")
    assert (scales is not None) == (place.pool.entry.encoding is Encoding.SCALED)
    assert scales is None or dim <= SCALED_GROUP, "a key has one scale"
    table = batch.slots[place.anchor]
    block_heads, half = max(MIN_ROWS, power_of_two(heads)), queries.element_size() == 2
    last, longest = min(len(queries), first + len(scores)), batch.bounds.longest
    few = longest <= FEW_QUERIES
    tile_keys = _TILE_KEYS if half else 2 * MIN_ROWS
    # The heads of so many queries are the columns of a dot.
    columns = (_FEW_COLUMNS if half else _FEW_COLUMNS // 4) if few else tile_keys
    tokens = min(max(1, columns // block_heads), power_of_two(longest))
    if half and few and (tokens > 1 or scales is not None):
        tile_keys //= 2
    blocks, busy = batch.owners[first:last], last - first
    if tokens > 1 or not few:
        query_tiles = query_blocks(run, tokens if few else QUERY_BLOCK, rows=(first, last))
        blocks, busy = query_tiles.table, query_tiles.busy
    splits = tiles = divided_up(scores.shape[1], tile_keys)
    if few:
        splits = max(1, min(CTAS_PER_SM * sm_count(queries.device) // busy, tiles))
    (_score_decode if few else _score_prefill)[(splits, len(blocks))](
        *(queries, weights, keys, keys if scales is None else scales, scores),
        *(batch.rows, blocks, table, table.stride(0), weights.stride(0), scores.stride(0), first),
        KEY_STRIDES=keys.stride()[:2],
        SCALED=scales is not None,
        PAGE=run.step.page_tokens // ratio,
        RATIO=ratio,
        HEADS=heads,
        BLOCK_H=block_heads,
        HEAD_DIM=dim,
        BLOCK_D=max(MIN_ROWS, power_of_two(dim)),
        BLOCK_N=tile_keys,
        TOKENS=tokens,
        # Inline PTX; the interpreter has the plain conversion.
        FAST_UNPACK=scales is not None and queries.is_cuda and queries.dtype == torch.bfloat16,
        num_warps=4 if few else 8,
        num_stages=3 if few and (tokens > 1 or scales is None) else 2,
    )


def _select(
    run: ForwardPass, scores: Tensor, selected: Tensor, ratio: int, max_visible: int, first: int
) -> None:
    """Fills `selected`, whose first row is row `first` of the step, with the top-k indices.

    If no query can see more than top-k entries, scores are not read.
    """
    tokens, count = selected.shape
    tile = max(TILE, power_of_two(MIN_TILES_OF_TOP_K * count))
    if max_visible <= _MIN_TILE:
        tile = min(tile, _MIN_TILE)
    numbers, width = selected, max_visible
    for tiles in _tiles_per_round(max_visible, tile, count):
        last = tiles == 1
        found = selected if last else selected.new_empty((tokens, tiles * count))
        values = scores if last else scores.new_empty(found.shape)
        _select_tile[(tokens, tiles)](
            *(scores, numbers, found, values, run.batch.rows, run.batch.owners),
            *(scores.stride(0), first, count, width),
            RATIO=ratio,
            FIRST=numbers is selected,
            LAST=last,
            SCORED=max_visible > count,
            BLOCK=tile,
            BLOCK_K=power_of_two(count),
            num_warps=max(4, min(_MAX_TILE_WARPS, tile // 512)),
        )
        numbers, scores, width = found, values, tiles * count


def _tiles_per_round(entries: int, tile: int, count: int) -> Iterator[int]:
    """Tiles of each round of the selection; `count` winners of every tile enter the next round."""
    while (tiles := divided_up(entries, tile)) > 1:
        yield tiles
        entries = tiles * count
    yield 1


# -- kernels -----------------------------------------------------------------------------------


# fmt: off
@triton.jit
def _shifted_e4m3(values):  # type: ignore[no-untyped-def]
    """Values in e4m3 as bf16, 2⁻¹²⁰ times as large: their bits, moved to their places in bf16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, sign;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 sign, low, 0x80008000;
        shr.u32 low, low, 4;
        lop3.b32 $0, low, 0x07F007F0, sign, 0xEA;
        and.b32 sign, high, 0x80008000;
        shr.u32 high, high, 4;
        lop3.b32 $1, high, 0x07F007F0, sign, 0xEA;
        }""",
        "=r,=r,r", [values.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(  # type: ignore[no-untyped-def]
    queries, row, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FAST_UNPACK: tl.constexpr,
):
    """A tile of queries, one per row, as large as `_load_keys` wants them."""
    dim = tl.arange(0, BLOCK_D)
    mask = mask[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(queries + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    return (query.to(tl.float32) * _QUERY_FACTOR).to(query.dtype) if FAST_UNPACK else query


@triton.jit  # type: ignore[untyped-decorator]
def _load_keys(  # type: ignore[no-untyped-def]
    keys, scales, slot, within, queries, KEY_STRIDES: tl.constexpr, SCALED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FAST_UNPACK: tl.constexpr,
):
    """A tile of keys, one per row, and the scales of their scores. `slot` is that of each key, or
    of all of them."""
    offsets = slot.to(tl.int64) * KEY_STRIDES[0] + within * KEY_STRIDES[1]
    dim, valid = tl.arange(0, BLOCK_D), (slot >= 0) & (within >= 0)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    key = tl.load(keys + offsets[:, None] + dim[None, :], mask=mask, other=0.0)
    factor = tl.full(within.shape, 1.0, tl.float32)
    if SCALED:
        # Scales have four bytes, elements of keys one.
        factor = tl.load(scales + offsets // 4, mask=valid, other=0.0)
    if FAST_UNPACK:
        return _shifted_e4m3(key), factor * _QUERY_FACTOR
    else:
        return key.to(queries.dtype.element_ty), factor


@kernel(  # type: ignore[untyped-decorator]
    "rows", "blocks", "block_tables", "stride_table", "stride_scores", "first"
)
def _score_decode(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, blocks, block_tables, stride_table,
    stride_weights, stride_scores, first,
    KEY_STRIDES: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,
    RATIO: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, FAST_UNPACK: tl.constexpr,
):
    """Scores of a block of few queries, all at once, over a split of their entries."""
    block, splits = tl.program_id(1), tl.num_programs(0)
    # With one query per block, `blocks` has the sequence of a token, else it has query blocks.
    sequence = tl.load(blocks + block * (1 if TOKENS == 1 else 3))
    if sequence < 0:
        return
    lo = first + block if TOKENS == 1 else tl.load(blocks + block * 3 + 1)
    hi = lo + 1 if TOKENS == 1 else tl.load(blocks + block * 3 + 2)
    position_offset = tl.load(rows + 3 * sequence + 2) - tl.load(rows + 3 * sequence)
    visible = (position_offset + hi) // RATIO
    row, cols = tl.arange(0, TOKENS * BLOCK_H), tl.arange(0, BLOCK_N)
    token, head, block_tokens = lo + row // BLOCK_H, row % BLOCK_H, lo + tl.arange(0, TOKENS)
    row_valid = (head < HEADS) & (token < hi)
    query_row = token.to(tl.int64) * HEADS + head
    query = _load_queries(queries, query_row, row_valid, HEAD_DIM, BLOCK_D, FAST_UNPACK)
    weight = weights + token.to(tl.int64) * stride_weights + head
    weight = tl.load(weight, mask=row_valid, other=0.0).to(tl.float32)
    # Entries that each query sees: none of those behind the block's end.
    visible_to = (position_offset + block_tokens + 1) // RATIO
    visible_to = tl.where(block_tokens < hi, visible_to, 0)[None, :]
    score_rows = scores + (block_tokens - first).to(tl.int64)[None, :] * stride_scores
    split_entries = tl.cdiv(tl.cdiv(visible, BLOCK_N), splits) * BLOCK_N
    begin = tl.program_id(0) * split_entries
    pages = block_tables + sequence * stride_table
    # One slot serves a tile that lies within a page.
    paged = begin if PAGE % BLOCK_N == 0 else begin + cols
    slot = tl.load(pages + paged // PAGE, mask=paged < visible, other=-1)
    for start_n in range(begin, tl.minimum(begin + split_entries, visible), BLOCK_N):
        entry = start_n + cols
        within = start_n % PAGE + cols if PAGE % BLOCK_N == 0 else entry % PAGE
        key, factor = _load_keys(
            keys, scales, slot, within, queries, KEY_STRIDES, SCALED, HEAD_DIM, BLOCK_D,
            FAST_UNPACK)
        # Prefetch: the slot of the next tile, before this one is used.
        paged += BLOCK_N
        slot = tl.load(pages + paged // PAGE, mask=paged < visible, other=-1)
        qk = tl.dot(key, tl.trans(query), input_precision="ieee")
        qk = tl.maximum(qk, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(qk, [BLOCK_N, TOKENS, BLOCK_H]), 2) * factor[:, None]
        tl.store(score_rows + entry[:, None], score, mask=entry[:, None] < visible_to)


@kernel(  # type: ignore[untyped-decorator]
    "rows", "block_tables", "stride_table", "stride_scores", "first"
)
def _score_prefill(  # type: ignore[no-untyped-def]
    queries, weights, keys, scales, scores, rows, blocks, block_tables, stride_table,
    stride_weights, stride_scores, first,
    KEY_STRIDES: tl.constexpr, SCALED: tl.constexpr, PAGE: tl.constexpr,
    RATIO: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, FAST_UNPACK: tl.constexpr,
):
    """Scores of a block of queries, some at a time, over one tile of entries."""
    block = blocks + 3 * tl.program_id(1)
    sequence, lo, hi = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    if sequence < 0:
        return
    position_offset = tl.load(rows + 3 * sequence + 2) - tl.load(rows + 3 * sequence)
    first_entry, visible = tl.program_id(0) * BLOCK_N, (position_offset + hi) // RATIO
    if first_entry >= visible:
        return
    row = tl.arange(0, TOKENS * BLOCK_H)
    entry = first_entry + tl.arange(0, BLOCK_N)
    token, head, next_tokens = row // BLOCK_H, row % BLOCK_H, tl.arange(0, TOKENS)
    slot = tl.load(
        block_tables + sequence * stride_table + entry // PAGE, mask=entry < visible, other=-1)
    key, factor = _load_keys(
        keys, scales, slot, entry % PAGE, queries, KEY_STRIDES, SCALED, HEAD_DIM, BLOCK_D,
        FAST_UNPACK)
    # The first query that sees an entry of this tile.
    lo = tl.maximum(lo, (first_entry + 1) * RATIO - 1 - position_offset)
    for at in range(lo, hi, TOKENS):
        query_row = ((at + token) * HEADS + head).to(tl.int64)
        row_valid = (head < HEADS) & (at + token < hi)
        query = _load_queries(queries, query_row, row_valid, HEAD_DIM, BLOCK_D, FAST_UNPACK)
        weight = weights + (at + token).to(tl.int64) * stride_weights + head
        weight = tl.load(weight, mask=row_valid, other=0.0).to(tl.float32)
        qk = tl.dot(key, tl.trans(query), input_precision="ieee")
        qk = tl.maximum(qk, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(qk, [BLOCK_N, TOKENS, BLOCK_H]), 2) * factor[:, None]
        offsets = (at + next_tokens - first)[None, :] * stride_scores + entry[:, None]
        visible_mask = entry[:, None] < ((position_offset + at + next_tokens + 1) // RATIO)[None, :]
        tl.store(scores + offsets, score, mask=visible_mask & (at + next_tokens < hi)[None, :])


@triton.jit
def _sortable_bits(scores, valid):  # type: ignore[no-untyped-def]
    """Scores as unsigned integers of the same order; 0 where invalid.

    +0 and -0 never occur together: a sum is -0 only if all weights are negative, and then none is
    +0.
    """
    bits = tl.load(scores, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648
    return tl.where(valid, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _top_k(bits, valid, count):  # type: ignore[no-untyped-def]
    """A mask of the top `count` of a tile; of ties at the threshold, the first ones.

    Radix selection: the threshold is found bit by bit, with one sum over the tile per bit, until
    exactly `count` scores reach it.
    """
    threshold, above = tl.full([], 0, tl.uint32), tl.sum(valid.to(tl.int32), 0)
    bit = tl.full([], 0x80000000, tl.uint32)
    while (bit > 0) & (above > count):
        higher = threshold | bit
        at_least = tl.sum((bits >= higher).to(tl.int32), 0)
        threshold = tl.where(at_least >= count, higher, threshold)
        above = tl.where(at_least >= count, at_least, above)
        bit = bit >> 1
    selected = valid & (bits >= threshold)
    if above > count:
        ties = (selected & (bits == threshold)).to(tl.int32)
        ties_wanted = count - above + tl.sum(ties, 0)
        selected = selected & ((ties == 0) | (tl.cumsum(ties, 0) <= ties_wanted))
    return selected


@kernel("rows", "owners", "stride_scores", "first", "width")  # type: ignore[untyped-decorator]
def _select_tile(  # type: ignore[no-untyped-def]
    scores, indices, out, values, rows, owners, stride_scores, first, count, width,
    RATIO: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SCORED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """The top-k of a tile of a row, in ascending order of index, then -1.

    In the first round indices are those of entries; later they are the `indices` of the round
    before.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    row64, entry = row.to(tl.int64), tile * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        seq = rows + 3 * tl.load(owners + first + row)
        visible = (tl.load(seq + 2) + first + row - tl.load(seq) + 1) // RATIO
        index, valid = entry, entry < visible
    else:
        index = tl.load(indices + row64 * width + entry, mask=entry < width, other=-1)
        valid = index >= 0
    selected = valid
    if SCORED:
        scores += row64 * stride_scores
        selected = _top_k(_sortable_bits(scores + entry, valid), valid, count)
    rank = tl.cumsum(selected.to(tl.int32), 0) - 1
    out_offset = (row64 * tl.num_programs(1) + tile) * count
    tl.store(out + out_offset + rank, index, mask=selected)
    if not LAST:
        tl.store(
            values + out_offset + rank, tl.load(scores + entry, mask=selected, other=0.0),
            mask=selected)
    lane = tl.arange(0, BLOCK_K)
    rest = (lane > tl.max(rank, 0)) & (lane < count)
    tl.store(out + out_offset + lane, lane * 0 - 1, mask=rest)
# fmt: on
