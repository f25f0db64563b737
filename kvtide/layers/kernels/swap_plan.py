"""The plan of a swap-in: which selected entries are hot, which miss, and which slots they get.

`plan_rows`      grid (sequences,): sequences that read their hot rows
`plan_gathered`  grid (sequences,): sequences whose context is gathered
Torch reference: `layers/reference/swap_in.py`, functions of these names. `swap_in` launches both.

A CTA has one sequence, with all slots of its hot row in one tile. That of `plan_rows` marks the
selected entries in `marks`, finds the marks of what is hot, and counts the rest: the misses. It
frees the least recently used slots that hold no choice, gives them to misses and new entries, and
locates all choices. Then it takes the marks away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtide.layers.kernels.jit import kernel


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _choices(  # type: ignore[no-untyped-def]
    selected, first, at, choices, total, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """A tile of choices, and which of them are entries; one tile is loaded once."""
    position = at + tl.arange(0, BLOCK_C)
    if ONE_TILE:
        entry = first
    else:
        entry = tl.load(selected + position, mask=position < choices, other=-1)
    return position, entry, (entry >= 0) & (entry < total)


@triton.jit
def _least_recent(used, candidates, count):  # type: ignore[no-untyped-def]
    """A mask of the `count` candidates that were used least recently; of ties, the first ones.

    The threshold is found by bisection, with one sum over all slots per round.
    """
    key = tl.where(candidates, used, 2147483647)
    lo, hi = tl.min(key, 0), tl.max(tl.where(candidates, used, -1), 0)
    while lo < hi:
        middle = lo + (hi - lo) // 2
        reached = tl.sum((key <= middle).to(tl.int32), 0)
        lo = tl.where(reached < count, middle + 1, tl.where(reached == count, middle, lo))
        hi = tl.where(reached < count, hi, middle)
    ties = (candidates & (key == lo)).to(tl.int32)
    earlier = candidates & (key < lo)
    ties_wanted = count - tl.sum(earlier.to(tl.int32), 0)
    return earlier | ((ties > 0) & (tl.cumsum(ties, 0) <= ties_wanted))


@triton.jit  # type: ignore[untyped-decorator]
def _mark_choices(  # type: ignore[no-untyped-def]
    selected, marks, first, choices, total,
    WANTED: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Marks every selected entry as wanted by one of its choices, or takes all marks away."""
    for at in range(0, choices, BLOCK_C):
        position, entry, valid = _choices(selected, first, at, choices, total, ONE_TILE, BLOCK_C)
        tl.store(marks + entry, -2 - position if WANTED else position * 0 - 1, mask=valid)


@triton.jit  # type: ignore[untyped-decorator]
def _misses_of_tile(  # type: ignore[no-untyped-def]
    selected, marks, first, at, choices, past, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """A tile of choices, and which of them are misses: 1 for one choice of each such entry."""
    position, entry, valid = _choices(selected, first, at, choices, past, ONE_TILE, BLOCK_C)
    mark = tl.load(marks + entry, mask=valid, other=-1)
    return entry, (valid & (mark == -2 - position)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _count_misses(  # type: ignore[no-untyped-def]
    selected, marks, first, choices, past, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    missing = tl.full([], 0, tl.int32)
    for at in range(0, choices, BLOCK_C):
        _, is_miss = _misses_of_tile(
            selected, marks, first, at, choices, past, ONE_TILE, BLOCK_C)
        missing += tl.sum(is_miss, 0)
    return missing


@triton.jit  # type: ignore[untyped-decorator]
def _place_misses(  # type: ignore[no-untyped-def]
    selected, marks, first, choices, past, host_tables, held, freed, sources, targets, first_place,
    PAGE: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Gives every miss one of the freed slots, and lists where it is read and written."""
    placed = tl.full([], 0, tl.int32)
    for at in range(0, choices, BLOCK_C):
        entry, is_miss = _misses_of_tile(
            selected, marks, first, at, choices, past, ONE_TILE, BLOCK_C)
        rank, mask = placed + tl.cumsum(is_miss, 0) - 1, is_miss > 0
        slot = tl.load(freed + rank, mask=mask, other=0)
        page = tl.load(host_tables + entry // PAGE, mask=mask, other=0)
        tl.store(sources + rank, page * PAGE + entry % PAGE, mask=mask)
        tl.store(targets + rank, first_place + slot, mask=mask)
        tl.store(held + slot, entry, mask=mask)
        tl.store(marks + entry, slot, mask=mask)
        placed += tl.sum(is_miss, 0)


@triton.jit
def _place_new(  # type: ignore[no-untyped-def]
    held, freed, new_slots, new, total, is_wanted, missing, given_count,
):
    """Gives new entries the freed slots that misses leave: wanted ones first, while there are
    any. `new_slots` are those of tokens that complete them."""
    is_new = new < total
    other = is_new.to(tl.int32) - is_wanted
    rank = tl.where(
        is_wanted > 0, tl.cumsum(is_wanted, 0), tl.sum(is_wanted, 0) + tl.cumsum(other, 0))
    rank += missing - 1
    stays = is_new & (rank < given_count)
    slot = tl.load(freed + rank, mask=stays, other=-1)
    tl.store(held + slot, new, mask=stays)
    tl.store(new_slots, slot, mask=is_new)


@triton.jit  # type: ignore[untyped-decorator]
def _locate_choices(  # type: ignore[no-untyped-def]
    selected, located, marks, first, choices, past, total, tables, first_place,
    PAGE: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Places of all choices: earlier entries in hot slots, new ones in the step's pages."""
    for at in range(0, choices, BLOCK_C):
        position, entry, valid = _choices(selected, first, at, choices, total, ONE_TILE, BLOCK_C)
        slot = tl.load(marks + entry, mask=valid & (entry < past), other=0)
        page = tl.load(tables + entry // PAGE, mask=valid & (entry >= past), other=0)
        place = tl.where(entry < past, first_place + slot, page * PAGE + entry % PAGE)
        tl.store(located + position, tl.where(valid, place, -1), mask=position < choices)


@triton.jit  # type: ignore[untyped-decorator]
def _swap_row(  # type: ignore[no-untyped-def]
    selected, located, choices, past, total, tables, host_tables, held, used, now, marks, counts,
    sources, targets, misses, freed, new_slots, new, first_place,
    ENTRIES: tl.constexpr, PAGE: tl.constexpr, ONE_TILE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Marks of an entry: -2 - p if choice p wants it and it is not hot, else its hot slot."""
    column, slot = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_B)
    first = tl.load(selected + column, mask=column < choices, other=-1)
    _mark_choices(selected, marks, first, choices, total, True, ONE_TILE, BLOCK_C)
    in_row = slot < ENTRIES
    hot = tl.load(held + slot, mask=in_row, other=-1)
    last_use = tl.load(used + slot, mask=in_row, other=-1)
    is_hot, is_stale = (hot >= 0) & (hot < past), hot >= past
    tl.debug_barrier()
    is_hit = is_hot & (tl.load(marks + hot, mask=is_hot, other=-1) < -1)
    hits = tl.sum(is_hit.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(marks + hot, slot, mask=is_hit)
    tl.debug_barrier()
    missing = _count_misses(selected, marks, first, choices, past, ONE_TILE, BLOCK_C)
    is_wanted = (tl.load(marks + new, mask=new < total, other=-1) < -1).to(tl.int32)
    given_count = tl.minimum(missing + total - past, ENTRIES - hits)
    last_use = tl.where(is_hot, last_use, -1)
    given = _least_recent(last_use, in_row & (is_hit == 0), given_count)
    tl.store(freed + tl.cumsum(given.to(tl.int32), 0) - 1, slot, mask=given)
    tl.store(held + slot, slot * 0 - 1, mask=is_stale & (given == 0))
    tl.store(used + slot, tl.where(is_hit | given, now, -1), mask=is_hit | given | is_stale)
    base = tl.atomic_add(misses, missing, sem="relaxed")
    tl.atomic_add(counts, (hits + tl.sum(is_wanted, 0)).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + 1, missing.to(tl.int64), sem="relaxed")
    tl.debug_barrier()
    _place_misses(
        selected, marks, first, choices, past, host_tables, held, freed, sources + base,
        targets + base, first_place, PAGE, ONE_TILE, BLOCK_C)
    _place_new(held, freed, new_slots, new, total, is_wanted, missing, given_count)
    tl.debug_barrier()
    _locate_choices(
        selected, located, marks, first, choices, past, total, tables, first_place, PAGE, ONE_TILE,
        BLOCK_C)
    tl.debug_barrier()
    _mark_choices(selected, marks, first, choices, total, False, ONE_TILE, BLOCK_C)


@kernel(  # type: ignore[untyped-decorator]
    "rows", "tables", "stride_table", "host_tables", "stride_host_table", "hot_rows",
    "stride_hot_rows", "stride_marks", "layer",
)
def plan_rows(  # type: ignore[no-untyped-def]
    selected, located, rows, tables, stride_table, host_tables, stride_host_table, hot_rows,
    stride_hot_rows, held, used, clock, marks, stride_marks, counts, sources, targets, misses,
    freed, new_slots, layer,
    COUNT: tl.constexpr, ONE_TILE: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
    ROW_ENTRIES: tl.constexpr, FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_NEW: tl.constexpr,
):
    sequence = tl.program_id(0)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    past_tokens = tl.load(rows + 3 * sequence + 2)
    past, total = past_tokens // RATIO, (past_tokens + end - start) // RATIO
    row, now = tl.load(hot_rows + sequence * stride_hot_rows), tl.load(clock)
    tables += sequence * stride_table
    selected += start.to(tl.int64) * COUNT
    located += start.to(tl.int64) * COUNT
    choices = (end - start) * COUNT
    if tl.load(tables) >= FIRST_GATHER:
        return
    if row < 0:
        for at in range(0, choices, BLOCK_C):
            position = at + tl.arange(0, BLOCK_C)
            tl.store(located + position, position * 0 - 1, mask=position < choices)
        return
    hot_row = (layer * ROWS + row).to(tl.int64)
    held += hot_row * ENTRIES
    used += hot_row * ENTRIES
    new = past + tl.arange(0, BLOCK_NEW)
    _swap_row(
        selected, located, choices, past, total, tables,
        host_tables + sequence * stride_host_table, held, used, now,
        marks + row.to(tl.int64) * stride_marks, counts + 3 * layer, sources, targets,
        misses + layer, freed + sequence.to(tl.int64) * ENTRIES,
        new_slots + start + (new + 1) * RATIO - 1 - past_tokens, new,
        (hot_row * ROW_ENTRIES).to(tl.int32), ENTRIES, PAGE, ONE_TILE, BLOCK_B, BLOCK_C)


@triton.jit  # type: ignore[untyped-decorator]
def _is_wanted(  # type: ignore[no-untyped-def]
    wanted, tables, entry, valid, FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr,
):
    """Whether a query of a gathered sequence selected these entries."""
    page = tl.load(tables + entry // PAGE, mask=valid, other=FIRST_GATHER)
    place = (page - FIRST_GATHER) * PAGE + entry % PAGE
    return tl.load(wanted + place, mask=valid, other=0) > 0


@kernel(  # type: ignore[untyped-decorator]
    "rows", "tables", "stride_table", "host_tables", "stride_host_table", "hot_rows",
    "stride_hot_rows", "stride_marks", "layer",
)
def plan_gathered(  # type: ignore[no-untyped-def]
    wanted, rows, tables, stride_table, host_tables, stride_host_table, hot_rows, stride_hot_rows,
    held, used, clock, marks, stride_marks, counts, freed, new_slots, layer,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, ROW_ENTRIES: tl.constexpr,
    FIRST_GATHER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """Marks earlier entries: their hot slot, or -2 - s if they are to be loaded into slot s too."""
    sequence = tl.program_id(0)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    past_tokens = tl.load(rows + 3 * sequence + 2)
    past, total = past_tokens // RATIO, (past_tokens + end - start) // RATIO
    row, now = tl.load(hot_rows + sequence * stride_hot_rows), tl.load(clock)
    tables += sequence * stride_table
    if tl.load(tables) < FIRST_GATHER:
        return
    hot_row = (layer * ROWS + row).to(tl.int64)
    held += hot_row * ENTRIES
    used += hot_row * ENTRIES
    marks += row.to(tl.int64) * stride_marks
    freed += sequence.to(tl.int64) * ENTRIES
    slot = tl.arange(0, BLOCK_B)
    in_row = slot < ENTRIES
    hot = tl.load(held + slot, mask=in_row, other=-1)
    last_use = tl.load(used + slot, mask=in_row, other=-1)
    is_hot, is_stale = (hot >= 0) & (hot < past), hot >= past
    is_hit = is_hot & _is_wanted(wanted, tables, hot, is_hot, FIRST_GATHER, PAGE)
    hits = tl.sum(is_hit.to(tl.int32), 0)
    tl.atomic_add(counts + 3 * layer, hits.to(tl.int64), sem="relaxed")
    tl.store(marks + hot, slot, mask=is_hot)
    tl.debug_barrier()
    entry = tl.maximum(total - ENTRIES, 0) + slot
    is_new, is_miss = (entry >= past) & (entry < total), (entry < past) & (total <= ENTRIES)
    is_miss = is_miss & _is_wanted(wanted, tables, entry, is_miss, FIRST_GATHER, PAGE)
    is_miss = is_miss & (tl.load(marks + entry, mask=is_miss, other=0) == -1)
    comes = (is_new | is_miss).to(tl.int32)
    last_use = tl.where(is_hit, now, tl.where(is_hot, last_use, -1))
    given = _least_recent(last_use, in_row, tl.sum(comes, 0))
    tl.store(freed + tl.cumsum(given.to(tl.int32), 0) - 1, slot, mask=given)
    tl.store(held + slot, slot * 0 - 1, mask=is_stale & (given == 0))
    tl.store(used + slot, tl.where(is_hit | given, now, -1), mask=is_hit | given | is_stale)
    tl.debug_barrier()
    target = tl.load(freed + tl.cumsum(comes, 0) - 1, mask=comes > 0, other=0)
    tl.store(held + target, entry, mask=comes > 0)
    tl.store(marks + entry, -2 - target, mask=is_miss)
    tl.store(new_slots + start + (entry + 1) * RATIO - 1 - past_tokens, target, mask=is_new)
# fmt: on
