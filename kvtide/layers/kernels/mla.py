"""Attention of all heads over one vector a token: DeepSeek-V4's window and closed blocks, and
latents (MLA).

`block_attention` gives what `attend_seen` gives over a window and blocks, `mla_attention` what
`attend` and `attend_seen` give over latents. Sums go tile by tile with a running maximum. A program
takes heads of one token, or of neighbours, since all of them meet the same keys; where there are
few programs, each takes a part of the keys, and one more joins the parts.

What always holds:
- How work is divided depends on shapes and `Bounds` alone.
- Nothing is read where there is no slot. A query that sees nothing gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import Attending
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.mla_tiles import (
    KEYS,
    LOG2_E,
    ROWS,
    SplitParts,
    joined_vectors,
    rows_of,
    scaled_vectors,
    stored,
    taken,
    tiles,
)
from kvtide.layers.kernels.query_blocks import backwards, spans
from kvtide.layers.packing import plain
from kvtide.spec import Encoding
from kvtide.spec.pool import JOINED_GROUP, SCALED_GROUP


@dataclass(frozen=True, slots=True)
class _Far:
    """The blocks that queries see: `ratio` tokens each, 0 where there are none."""

    place: Place
    ratio: int
    chosen: Tensor | None

    def most(self, tokens: int) -> int:
        """How many a query sees at the most, in sequences of so many tokens."""
        if self.ratio == 0:
            return 0
        return tokens // self.ratio if self.chosen is None else self.chosen.shape[1]


def block_attention(
    run: ForwardPass,
    window: Place,
    kept: Tensor,
    entries: Place | None,
    queries: Tensor,
    how: Attending,
    chosen: Tensor | None = None,
) -> Tensor:
    """Of queries (tokens, heads, dim), over vectors that are key and value at once.

    A query sees the last tokens of its sequence: those before the step through the pages of
    `window`, the step's own in `kept` (tokens, dim). Of `entries` it sees the `chosen` ones, as
    `choose_paged` gives them, or without them all that are closed where it stands.
    """
    batch, queries = run.batch, queries.contiguous()
    # Exact, if queries have the precision of what is kept or sixteen bits.
    kept = kept.to(queries.dtype)
    tokens, heads, dim = queries.shape
    far = _Far(entries or window, entries.pool.tokens_per_entry if entries else 0, chosen)
    rows = rows_of(heads)
    programs = tokens * divided_up(heads, rows)
    assert how.window is not None, "what the step brings is seen through a window"
    span = far.most(batch.bounds.max_past + batch.bounds.longest) + how.window
    parts = SplitParts.of(queries, dim, programs, rows, span)
    near_fields, far_fields = _vectors_of(run, window), _vectors_of(run, far.place)
    tables = batch.slots[window.anchor], batch.slots[far.place.anchor]
    nope = near_fields[0].shape[-1] if window.pool.entry.encoding is Encoding.JOINED else 0
    assert nope // JOINED_GROUP == (dim - 1) // JOINED_GROUP or nope == 0, "the rest is one group"
    _attend_blocks[(programs, parts.count)](
        *(queries, kept, *near_fields, *far_fields, parts.mixed, parts.weights),
        *(queries if other is None else other for other in (chosen, how.sinks)),
        *(batch.rows, batch.owners, *tables, *(table.stride(0) for table in tables)),
        *(kept.stride(0), 0 if chosen is None else chosen.shape[1], how.scale * LOG2_E, tokens),
        NEAR_SLOT=near_fields[0].stride(0),
        FAR_SLOT=far_fields[0].stride(0),
        ENTRY=near_fields[0].stride(1),
        PAGE=run.step.page_tokens,
        FAR_PAGE=run.step.page_tokens // max(1, far.ratio),
        RATIO=far.ratio,
        CHOSEN=chosen is not None,
        WINDOW=how.window,
        SINKS=how.sinks is not None,
        SPLIT=parts.count > 1,
        HEADS=heads,
        OWN=MIN_ROWS if batch.bounds.longest == 1 else 32,
        DIM=dim,
        NOPE=nope,
        GROUP=JOINED_GROUP,
        M=rows,
        **tiles(queries, rows, dim, KEYS),
    )
    return parts.joined(queries.dtype)


def _vectors_of(run: ForwardPass, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of a vector: itself, or what it is packed in."""
    view = run.step.view(place.pool.name, place.layer)
    if place.pool.entry.encoding is Encoding.JOINED:
        return view["nope"], view["rope"], plain(view["scale"])
    return (view["kv"],) * 3


# -- latents -----------------------------------------------------------------------------------


def mla_attention(
    run: ForwardPass, place: Place, queries: Tensor, how: Attending, chosen: Tensor | None = None
) -> Tensor:
    """Of queries (tokens, heads, latent and shared dimensions): (tokens, heads, latent).

    A key is a token's latent beside what all heads share, its value the latent. A query sees the
    `chosen` tokens, as `choose_paged` gives them, or without them all up to itself. The step's own
    are read from the pages too.
    """
    batch, queries = run.batch, queries.contiguous()
    tokens, heads, _ = queries.shape
    view = run.step.view(place.pool.name, place.layer)
    latent, rope, scales = view["latent"], view["rope"], view.get("latent_scale")
    rank, shared = latent.shape[-1], rope.shape[-1]
    each = 1 if batch.bounds.longest == 1 or chosen is not None else max(1, ROWS // heads)
    blocks, busy = batch.owners, tokens
    if each > 1:
        cut = spans(run, each)
        blocks, busy = cut.table, cut.busy
    rows = rows_of(each * heads)
    shares = divided_up(each * heads, rows)
    span = batch.bounds.max_past + batch.bounds.longest
    seen = span if chosen is None else min(span, chosen.shape[1])
    parts = SplitParts.of(queries, rank, busy * shares, rows, seen)
    table = batch.slots[place.anchor]
    # What is gathered or unpacked, or met by few, takes other room than larger tiles leave.
    shared_by_many = rows == ROWS and chosen is None and scales is None
    _attend_latent[(len(blocks) * shares, parts.count)](
        *(queries, latent, latent if scales is None else scales, rope, parts.mixed, parts.weights),
        *(queries if chosen is None else chosen, batch.rows, blocks, table, table.stride(0)),
        *(0 if chosen is None else chosen.shape[1], how.scale * LOG2_E, tokens),
        SLOT=latent.stride(0),
        ENTRY=latent.stride(1),
        SCALE_SLOT=0 if scales is None else scales.stride(0),
        SCALE_ENTRY=0 if scales is None else scales.stride(1),
        ROPE_SLOT=rope.stride(0),
        ROPE_ENTRY=rope.stride(1),
        PAGE=run.step.page_tokens,
        CHOSEN=chosen is not None,
        SPLIT=parts.count > 1,
        HEADS=heads,
        TOKENS=each,
        DIM=rank,
        SHARED=shared,
        S=max(MIN_ROWS, power_of_two(shared)),
        GROUP=0 if scales is None else SCALED_GROUP,
        M=rows,
        **tiles(queries, rows, rank, 2 * KEYS if shared_by_many else KEYS),
    )
    return parts.joined(queries.dtype)


# -- programs ----------------------------------------------------------------------------------


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _block_at(  # type: ignore[no-untyped-def]
    tile, column, chosen, far_slots, near_slots, blocks, begin, past, count, visible,
    FAR_PAGE: tl.constexpr, PAGE: tl.constexpr, CHOSEN: tl.constexpr, N: tl.constexpr,  # noqa: N803
):
    """Slots of a tile's vectors, -1 where there are none, and their places in them: of blocks,
    and in tiles after those, of the window's tokens before the step."""
    far = tile < blocks
    entry = tl.where(far, tile * N, begin + (tile - blocks) * N) + column
    if CHOSEN:
        picked = tl.load(chosen + entry, mask=far & (entry < count), other=-1)
        entry = tl.where(far, picked, entry)
    there = (entry >= 0) & (entry < tl.where(far, visible, past))
    page = tl.where(far, entry // FAR_PAGE, entry // PAGE)
    slot = tl.load(tl.where(far, far_slots, near_slots) + page, mask=there, other=-1)
    return slot, tl.where(far, entry % FAR_PAGE, entry % PAGE)


@triton.jit  # type: ignore[untyped-decorator]
def _own(  # type: ignore[no-untyped-def]
    query, kept, kept_token, first, last, scale, peak, total, sums,
    DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,  # noqa: N803
):
    """The step's rows from `first` to `last`."""
    dim = tl.arange(0, D)
    for begin in range(first, last + 1, N):
        row = begin + tl.arange(0, N)
        mask = (row <= last)[:, None] & (dim < DIM)[None, :]
        at = row.to(tl.int64)[:, None] * kept_token + dim[None, :]
        key = tl.load(kept + at, mask=mask, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((row <= last)[None, :], scores, float("-inf"))
        peak, total, sums = taken(scores, key, peak, total, sums)
    return peak, total, sums


@program(  # type: ignore[untyped-decorator]
    "rows", "owners", "near_slots", "far_slots", "near_table", "far_table", "tokens"
)
def _attend_blocks(  # type: ignore[no-untyped-def]
    queries, kept, near_first, near_second, near_third, far_first, far_second, far_third,
    mixed, weights, chosen, sinks, rows, owners, near_slots, far_slots, near_table, far_table,
    kept_token, count, scale, tokens,
    NEAR_SLOT: tl.constexpr, FAR_SLOT: tl.constexpr, ENTRY: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr, FAR_PAGE: tl.constexpr, RATIO: tl.constexpr,  # noqa: N803
    CHOSEN: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,  # noqa: N803
    SPLIT: tl.constexpr, HEADS: tl.constexpr, OWN: tl.constexpr, DIM: tl.constexpr,  # noqa: N803
    NOPE: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,  # noqa: N803
    D: tl.constexpr,  # noqa: N803
):
    BLOCKS: tl.constexpr = (HEADS + M - 1) // M  # noqa: N806
    token, part, parts = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.num_programs(1)
    number = tl.load(owners + token)
    one = rows + 3 * number
    start, past = tl.load(one), tl.load(one + 2)
    position = past + token - start
    head, dim = tl.program_id(0) % BLOCKS * M + tl.arange(0, M), tl.arange(0, D)
    live, column = head < HEADS, tl.arange(0, N)
    line = token.to(tl.int64) * HEADS + head
    inside = live[:, None] & (dim < DIM)[None, :]
    query = tl.load(queries + line[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if SINKS and part == parts - 1:
        peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    sums = tl.zeros([M, D], tl.float32)
    # Tiles of blocks, then of the window before the step: this part of them.
    begin, visible = tl.maximum(0, position + 1 - WINDOW), 0
    if RATIO > 0:
        visible = (position + 1) // RATIO
    # Numbers stand first among those chosen.
    blocks = tl.cdiv(tl.minimum(count, visible) if CHOSEN else visible, N)
    every = blocks + tl.cdiv(tl.maximum(past - begin, 0), N)
    each = tl.cdiv(every, parts)
    low, high = part * each, tl.minimum(every, part * each + each)
    slot, within = _block_at(
        low, column, chosen + token.to(tl.int64) * count, far_slots + number * far_table,
        near_slots + number * near_table, blocks, begin, past, count, visible,
        FAR_PAGE, PAGE, CHOSEN, N)
    for tile in range(low, high):
        far, there = tile < blocks, slot >= 0
        at = slot.to(tl.int64) * tl.where(far, FAR_SLOT, NEAR_SLOT) + within * ENTRY
        key = joined_vectors(
            tl.where(far, far_first, near_first), tl.where(far, far_second, near_second),
            tl.where(far, far_third, near_third), at, there, query, DIM, D, NOPE, GROUP, N)
        # Where the next tile lies is known before this one is done with.
        slot, within = _block_at(
            tile + 1, column, chosen + token.to(tl.int64) * count, far_slots + number * far_table,
            near_slots + number * near_table, blocks, begin, past, count, visible,
            FAR_PAGE, PAGE, CHOSEN, N)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        peak, total, sums = taken(scores, key, peak, total, sums)
    # The step's own tokens, with the last part.
    first = tl.maximum(start, token + 1 - WINDOW) if part == parts - 1 else token + 1
    peak, total, sums = _own(
        query, kept, kept_token, first, token, scale, peak, total, sums, DIM, D, OWN)
    line += part.to(tl.int64) * tokens * HEADS
    stored(mixed, weights, line, live, peak, total, sums, DIM, D, SPLIT)


@triton.jit  # type: ignore[untyped-decorator]
def _token_at(  # type: ignore[no-untyped-def]
    tile, column, chosen, slots, count, visible,
    PAGE: tl.constexpr, CHOSEN: tl.constexpr, N: tl.constexpr,  # noqa: N803
):
    """Numbers of a tile's tokens, and their slots, or the one of all; -1 where there are none."""
    entry = tile * N + column
    if CHOSEN:
        entry = tl.load(chosen + entry, mask=entry < count, other=-1)
    if CHOSEN or PAGE % N > 0:
        there = (entry >= 0) & (entry < visible)
        slot = tl.load(slots + entry // PAGE, mask=there, other=-1)
    else:
        # All of them lie in one page.
        slot = tl.load(slots + tile * N // PAGE, mask=tile * N < visible, other=-1)
    return entry, slot


@program("rows", "owners", "slots", "table", "tokens")  # type: ignore[untyped-decorator]
def _attend_latent(  # type: ignore[no-untyped-def]
    queries, latents, scales, ropes, mixed, weights, chosen, rows, owners, slots, table,
    count, scale, tokens,
    SLOT: tl.constexpr, ENTRY: tl.constexpr, SCALE_SLOT: tl.constexpr,  # noqa: N803
    SCALE_ENTRY: tl.constexpr, ROPE_SLOT: tl.constexpr, ROPE_ENTRY: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr, CHOSEN: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr, S: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    SHARES: tl.constexpr = (TOKENS * HEADS + M - 1) // M  # noqa: N806
    place, part = backwards(tl.program_id(0), tl.num_programs(0)), tl.program_id(1)
    block, share = place // SHARES, place % SHARES
    # Where a program takes one token, its number is the block's.
    number = tl.load(owners + block * (1 if TOKENS == 1 else 3))
    first = block if TOKENS == 1 else tl.load(owners + block * 3 + 1)
    if number < 0:
        return
    start, end = tl.load(rows + 3 * number), tl.load(rows + 3 * number + 1)
    before = tl.load(rows + 3 * number + 2) - start
    row = share * M + tl.arange(0, M)
    dim, extra, column = tl.arange(0, D), tl.arange(0, S), tl.arange(0, N)
    token, live = first + row // HEADS, row < TOKENS * HEADS
    live = live & (token < end)
    line = token.to(tl.int64) * HEADS + row % HEADS
    queries, inside = queries + line[:, None] * (DIM + SHARED), live[:, None] & (dim < DIM)[None, :]
    query = tl.load(queries + dim[None, :], mask=inside, other=0.0)
    beside = live[:, None] & (extra < SHARED)[None, :]
    query_rope = tl.load(queries + DIM + extra[None, :], mask=beside, other=0.0)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    visible = before + tl.minimum(first + TOKENS, end)
    every = tl.cdiv(tl.minimum(count, visible) if CHOSEN else visible, N)
    each = tl.cdiv(every, tl.num_programs(1))
    low, high = part * each, tl.minimum(every, part * each + each)
    chosen, slots = chosen + first.to(tl.int64) * count, slots + number * table
    entry, slot = _token_at(low, column, chosen, slots, count, visible, PAGE, CHOSEN, N)
    for tile in range(low, high):
        at, within = slot.to(tl.int64), entry % PAGE
        if not CHOSEN and PAGE % N == 0:
            entry, within = tile * N + column, tile * N % PAGE + column
        there = (slot >= 0) & (entry < visible)
        latent = scaled_vectors(
            latents, scales, at * SLOT + within * ENTRY, at * SCALE_SLOT + within * SCALE_ENTRY,
            there, query, DIM, D, GROUP, N)
        near = at * ROPE_SLOT + within * ROPE_ENTRY
        mask = there[:, None] & (extra < SHARED)[None, :]
        rope = tl.load(ropes + near[:, None] + extra[None, :], mask=mask, other=0.0)
        seen = there[None, :] & (entry[None, :] <= (before + token)[:, None])
        # Where the next tile lies is known before this one is done with.
        entry, slot = _token_at(tile + 1, column, chosen, slots, count, visible, PAGE, CHOSEN, N)
        scores = tl.dot(query_rope, tl.trans(rope.to(query.dtype)), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latent), scores, input_precision="ieee") * scale
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, sums = taken(scores, latent, peak, total, sums)
    line += part.to(tl.int64) * tokens * HEADS
    stored(mixed, weights, line, live, peak, total, sums, DIM, D, SPLIT)


# fmt: on
