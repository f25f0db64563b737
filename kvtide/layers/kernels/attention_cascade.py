"""Attention of single tokens to what several of their sequences begin with.

Sequences over one system prompt have its pages in common, and each would read all of their keys for
itself. Here neighbours in the batch are a block, whose queries go over the pages that all of them
begin with together: these are read once for the block. `attention_single` takes what comes behind.

Which pages that are is found on the device, from the tables alone: a recorded step is played with
other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import Attending
from kvtide.layers.kernels.attention_tiles import compiled_for, earlier, scaling
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program

ROWS = 64
"""Queries times heads of a block."""
WIDE_ROWS = 32
"""As many where numbers have four bytes."""
MIN_TOKENS = 256
"""Fewer in common are not worth it."""
PROGRAMS = 2 * 132
"""As many keep a large device busy."""
MAX_PARTS = 32
_PAGES = 64
"""That are compared at a time."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What blocks of sequences begin with, and what their tokens see there.

    each    sequences of a block
    known   (blocks, 2) int32: how many tokens they have in common, 0 for too few, and one of the
            sequences
    parts   (parts, sequences, heads, dim) fp32, of the tokens in common
    weights (parts, sequences, heads, 2): the highest score of each part, and the sum of shares
            relative to it
    """

    each: int
    known: Tensor
    parts: Tensor
    weights: Tensor

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.known, self.parts, self.weights


def attend_together(
    run: ForwardPass, place: Place, queries: Tensor, keys: Tensor, how: Attending
) -> Prefixes | None:
    """Of all sequences with one token; None where no two could have anything in common."""
    batch = run.batch
    (_, heads, dim), kv_heads, count = queries.shape, keys.shape[1], len(batch.rows)
    group = heads // kv_heads
    each = (ROWS if queries.itemsize < 4 else WIDE_ROWS) // group
    if how.window is not None or min(each, count) < 2 or batch.bounds.max_past < MIN_TOKENS:
        return None
    blocks, page = divided_up(count, each), run.step.page_tokens
    view, table = run.step.view(place.pool.name, place.layer), batch.slots[place.anchor]
    shape = compiled_for(queries, keys, how, page)
    key = ("prefixes", place.anchor, each, shape["N"])
    known = run.shared(key, lambda: _compared(batch.rows, table, each, page, shape["N"]))
    most = min(PROGRAMS // (kv_heads * blocks), divided_up(batch.bounds.max_past, MIN_TOKENS))
    count_of_parts = 1 << max(1, min(most, MAX_PARTS)).bit_length() - 1
    parts = queries.new_empty((count_of_parts, count, heads, dim), dtype=torch.float32)
    found = Prefixes(each, known, parts, parts.new_empty((*parts.shape[:3], 2)))
    _attend_prefix[(kv_heads, blocks, count_of_parts)](
        *(queries, view["k"], view["v"], found.parts, found.weights),
        *(batch.rows, table, known, count, table.stride(0)),
        *queries.stride()[:2],
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *scaling(how),
        EACH=each,
        HEADS=heads,
        GROUP=group,
        M=max(MIN_ROWS, power_of_two(each * group)),
        **shape,
        num_warps=4,
    )
    return found


def _compared(rows: Tensor, table: Tensor, each: int, page: int, keys: int) -> Tensor:
    blocks = divided_up(len(rows), each)
    known = rows.new_empty((blocks, 2))
    _compare[(blocks,)](
        *(rows, table, known, len(rows), table.stride(0), MIN_TOKENS),
        EACH=each,
        SEQUENCES=power_of_two(each),
        PAGE=page,
        N=keys,
        PAGES=_PAGES,
    )
    return known


# fmt: off
@program("rows", "tables", "count", "pages")  # type: ignore[untyped-decorator]
def _compare(  # type: ignore[no-untyped-def]
    rows, tables, known, count, pages, min_tokens,
    EACH: tl.constexpr, SEQUENCES: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,  # noqa: N803
    PAGES: tl.constexpr,  # noqa: N803
):
    """How many tokens, in whole tiles, the sequences of a block have in common."""
    block, offset = tl.program_id(0), tl.arange(0, SEQUENCES)
    number = block * EACH + offset
    ours = (offset < EACH) & (number < count)
    start = tl.load(rows + 3 * number, mask=ours, other=0)
    end = tl.load(rows + 3 * number + 1, mask=ours, other=0)
    past = tl.load(rows + 3 * number + 2, mask=ours, other=0)
    ours = ours & (end - start == 1) & (past > 0)
    one = tl.min(tl.where(ours, number, count - 1), 0)
    shortest = tl.min(tl.where(ours, past, 2147483647), 0)
    most = tl.where(tl.sum(ours.to(tl.int32)) > 1, shortest // PAGE, 0)
    at, alike = 0, most
    while at < alike:
        page = at + tl.arange(0, PAGES)
        where = number.to(tl.int64)[:, None] * pages + page[None, :]
        inside = page < most
        theirs = tl.load(tables + tl.cast(one, tl.int64) * pages + page, mask=inside, other=-1)
        slots = tl.load(tables + where, mask=ours[:, None] & inside[None, :], other=-1)
        other = tl.sum((ours[:, None] & (slots != theirs[None, :])).to(tl.int32), 0) > 0
        alike = tl.minimum(alike, tl.min(tl.where(other, page, 2147483647), 0))
        at += PAGES
    tokens = alike * PAGE // N * N
    tl.store(known + 2 * block, tl.where(tokens < min_tokens, 0, tokens))
    tl.store(known + 2 * block + 1, one)


@program("rows", "tables", "count", "pages")  # type: ignore[untyped-decorator]
def _attend_prefix(  # type: ignore[no-untyped-def]
    queries, keys, values, parts, weights, rows, tables, known, count, pages,
    query_token, query_head,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head, inner, factor,
    EACH: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,  # noqa: N803
    N: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    kv_head, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(known + 2 * block)
    if tokens == 0:
        return
    row, dim = tl.arange(0, M), tl.arange(0, D)
    number, head = block * EACH + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < EACH * GROUP) & (number < count)
    token = tl.load(rows + 3 * number, mask=live, other=0).to(tl.int64)
    live = live & (tl.load(rows + 3 * number + 1, mask=live, other=0) - token == 1)
    here = live[:, None] & (dim < DIM)[None, :]
    where = token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    query = tl.load(queries + where, mask=here, other=0.0)
    each = tl.cdiv(tokens // N, tl.num_programs(2)) * N
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    peak, total, sums = earlier(
        query, row, peak, total, tl.zeros([M, D], tl.float32),
        keys + kv_head * key_head, values + kv_head * value_head,
        tables + tl.load(known + 2 * block + 1).to(tl.int64) * pages,
        part * each, tl.minimum(part * each + each, tokens), 0,
        key_slot, key_entry, value_slot, value_entry, inner, factor,
        PAGE, WINDOW, CAPPED, False, N, DIM, D,
    )
    line = (part.to(tl.int64) * count + number) * HEADS + head
    tl.store(parts + line[:, None] * DIM + dim[None, :], sums, mask=here)
    tl.store(weights + 2 * line, peak, mask=live)
    tl.store(weights + 2 * line + 1, total, mask=live)
# fmt: on
