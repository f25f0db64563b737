"""Which programs take which blocks of new tokens, in attention by head.

A block is some neighbouring new tokens of a sequence (`spans`), with all query heads of one KV
head: so many tiles of keys. As many programs as run at a time are a round, and blocks seldom come
in whole rounds. So the last ones, of one round and what makes none, are shared, unless they see
little or the rounds are many: their tiles lie in one row, one KV head behind the other, and a round
of programs cuts it into equal shares. All other blocks have a program each, and these begin when a
share is done. A step has prompts after many tokens last, so what is shared is the longest.

Who takes what is worked out on the device, from the lengths in `Batch.rows`: a recorded step is
played with other sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels.grid import SEQUENCES_AT_ONCE, sm_count
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.query_blocks import spans

MIN_TILES = 8
"""Fewer are not worth a program."""
OPENING_TILES = 6
"""As many take as long as going on with a block that another program began: twice in a share."""
MAX_ROUNDS = 12
"""Of more, what makes no round is little."""
RECORD = tl.constexpr(8)
"""Numbers kept of a block, or room for them."""


def laid_blocks(
    run: ForwardPass, tokens: int, shared: dict[str, int], window: int, keys: int
) -> Tensor:
    """(blocks + 2, RECORD) int32, of blocks of so many tokens, that see tiles of so many keys.

    First which blocks are shared, from one to before another, and how many blocks there are. Then,
    of every block and of what is behind the last: where its tiles begin among those of one KV head,
    its sequence, first row and end row, and the sequence's first row, end row and tokens before the
    step.
    """
    blocks = spans(run, tokens, singles=False).table

    def lay() -> Tensor:
        laid = blocks.new_empty((len(blocks) + 2, RECORD.value))
        _lay[(1,)](
            *(run.batch.rows, blocks, laid, len(blocks)),
            OPENING=OPENING_TILES,
            ROUNDS=MAX_ROUNDS,
            WINDOW=window,
            N=keys,
            B=SEQUENCES_AT_ONCE,
            **shared,
        )
        return laid

    return run.shared(("blocks", tokens, window, keys, *shared.values()), lay)


def shares(kv_heads: int, small: bool, device: torch.device) -> dict[str, int]:
    """How tiles of shared blocks are divided: constants of all programs here."""
    return {
        "SHARES": (2 if small else 1) * sm_count(device),
        "LEAST": MIN_TILES,
        "KV_HEADS": kv_heads,
    }


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def tiles_of(  # type: ignore[no-untyped-def]
    start, past, first, until, WINDOW: tl.constexpr, N: tl.constexpr,
):
    """How many tiles a block of rows [first, until) sees: of earlier tokens and of the step's own,
    first without a mask, then with one. All that came before the first query is seen: only what
    whole tiles leave is masked."""
    if WINDOW > 0:
        low = tl.maximum(past + first - start + 1 - WINDOW, 0) // N * N
        rest = (tl.maximum(past - low, 0) + N - 1) // N
        own = (until - tl.maximum(start, first + 1 - WINDOW) + N - 1) // N
        return past * 0, past * 0, rest, own
    else:
        before = (first - start) // N
        own = (until - start - before * N + N - 1) // N
        return past // N, before, (past % N + N - 1) // N, own


@program("rows", "blocks", "laid", "most")  # type: ignore[untyped-decorator]
def _lay(  # type: ignore[no-untyped-def]
    rows, blocks, laid, most,
    SHARES: tl.constexpr, LEAST: tl.constexpr, OPENING: tl.constexpr, ROUNDS: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, B: tl.constexpr,
):
    total = tl.full([], 0, tl.int32)
    used, high, longest = total, total, total
    for at in range(0, most + 1, B):
        number = at + tl.arange(0, B)
        sequence = tl.load(blocks + 3 * number, mask=number < most, other=-1)
        ours, one = sequence >= 0, rows + 3 * sequence
        first = tl.load(blocks + 3 * number + 1, mask=ours, other=0)
        until = tl.load(blocks + 3 * number + 2, mask=ours, other=0)
        start, end = tl.load(one, mask=ours, other=0), tl.load(one + 1, mask=ours, other=0)
        past = tl.load(one + 2, mask=ours, other=0)
        old, new, rest, masked = tiles_of(start, past, first, until, WINDOW, N)
        tiles = tl.where(ours, old + new + rest + masked, 0)
        record, there = laid + RECORD * (1 + number), number <= most
        tl.store(record, total + tl.cumsum(tiles, 0) - tiles, mask=there)
        tl.store(record + 1, sequence, mask=there)
        tl.store(record + 2, first, mask=there)
        tl.store(record + 3, until, mask=there)
        tl.store(record + 4, start, mask=there)
        tl.store(record + 5, end, mask=there)
        tl.store(record + 6, past, mask=there)
        # Behind the last that sees more than a little is what fills a recording up.
        seen = ours & (tiles > 2 * OPENING)
        high = tl.maximum(high, tl.max(tl.where(seen, number + 1, 0), 0))
        longest = tl.maximum(longest, tl.max(tiles, 0))
        total += tl.sum(tiles, 0)
        used += tl.sum(ours.to(tl.int32), 0)
    rounds = high * KV_HEADS // SHARES
    low = tl.maximum(rounds - 1, 0) * SHARES // KV_HEADS
    items = (high - low) * KV_HEADS
    tiles = tl.where(low == 0, total * KV_HEADS, items * longest)
    shared = tl.maximum(tl.cdiv(tiles, SHARES), LEAST) + 2 * OPENING
    pays = (tl.cdiv(items, SHARES) * longest > shared) & (rounds <= ROUNDS)
    tl.store(laid, tl.where(pays, low, 0))
    tl.store(laid + 1, tl.where(pays, high, 0))
    tl.store(laid + 2, used)


@triton.jit  # type: ignore[untyped-decorator]
def row_of(  # type: ignore[no-untyped-def]
    laid, low, high, SHARES: tl.constexpr, LEAST: tl.constexpr, KV_HEADS: tl.constexpr,
):
    """Of the row of shared tiles: where they begin among those of one KV head, how many each KV
    head has of them, and how many a share has."""
    begin = tl.load(laid + RECORD * (1 + low))
    each = tl.load(laid + RECORD * (1 + high)) - begin
    return begin, each, tl.maximum(tl.cdiv(each * KV_HEADS, SHARES), LEAST)


@triton.jit  # type: ignore[untyped-decorator]
def _items(  # type: ignore[no-untyped-def]
    laid, low, high, begin, each, first, last, B: tl.constexpr,
):
    """The numbers of KV heads and blocks, in the order of the row, whose tiles these two are."""
    first_block, last_block = low * 0 - 1, low * 0 - 1
    for at in range(low, high, B):
        number = at + tl.arange(0, B)
        begins = tl.load(laid + RECORD * (1 + number), mask=number < high, other=2147483647)
        first_block += tl.sum((begins - begin <= first % each).to(tl.int32), 0)
        last_block += tl.sum((begins - begin <= last % each).to(tl.int32), 0)
    count = high - low
    return first // each * count + first_block, last // each * count + last_block


@triton.jit  # type: ignore[untyped-decorator]
def taken_by(  # type: ignore[no-untyped-def]
    number, laid, most,
    SHARES: tl.constexpr, LEAST: tl.constexpr, KV_HEADS: tl.constexpr, B: tl.constexpr,
):
    """What a program takes: its first item and how many; of how many blocks a KV head has items,
    and which is the first of them; where that one's tiles begin among those of one KV head, and how
    many each KV head has in the row; and which tiles of the row are the program's.

    Who has a block alone goes by a row in which all tiles are its own.
    """
    low, high = tl.load(laid), tl.load(laid + 1)
    nothing = low * 0
    item, items, count, origin = nothing, nothing, most, nothing
    begin, each, at, stop = nothing, nothing, nothing, nothing + 2147483647
    if number >= SHARES:
        block = most - 1 - (number - SHARES) // KV_HEADS
        alone = (block < low) | ((block >= high) & (block < tl.load(laid + 2)))
        item, items = (number - SHARES) % KV_HEADS * most + block, alone.to(tl.int32)
    else:
        begin, each, share = row_of(laid, low, high, SHARES, LEAST, KV_HEADS)
        at, stop = number * share, tl.minimum(number * share + share, each * KV_HEADS)
        count, origin = high - low, low
        if at < stop:
            item, last = _items(laid, low, high, begin, each, at, stop - 1, B)
            items = last + 1 - item
    return item, items, count, origin, begin, each, at, stop
# fmt: on
