"""Attention by head over pages as one device program, for all sequences of a step.

The same sums as `attending.attend`, tile by tile with a running maximum, so nothing but a tile
of scores is ever written down. A program takes a few neighbouring queries of one sequence with all
query heads of one KV head. It reads earlier tokens through the page table and the step's own from
the step, as `attend_over_pages` does.

Triton is imported here and nowhere else in this room: only who has such a device needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.attending import Attending
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields

ROWS = 64
"""Queries times heads that a program takes of a prompt; of a single token its heads alone."""
KEYS = 64
"""Keys of a tile."""
PROGRAMS = 264
"""As many keep a large device busy: where there are fewer, each takes a part of the keys."""
MOST_PARTS = 32
LEAST_KEYS = 256
"""Fewer keys than this are not worth a program."""
_LEAST_ROWS = 16
"""What a matrix unit takes."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where a step's sequences lie, for programs: what all layers of an anchor share.

    rows    (sequences, 4): first and end row of the step, tokens before it, where its pages begin
    pages   slots of all sequences, one after another
    blocks  (programs, 2): sequence, first row
    """

    rows: Tensor
    pages: Tensor
    blocks: Tensor


def attend_paged(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending
) -> Tensor:
    """Of the step's queries (tokens, heads, dim), over what was kept and what the step brings."""
    _, heads, dim = queries.shape
    keys, values = kept["k"], kept["v"]
    group = heads // keys.shape[1]
    longest = max(rows.end - rows.start for rows in run.sequences)
    tokens = 1 if longest == 1 else max(1, ROWS // group)
    step = _sequences(run, place.anchor, tokens)
    view = run.step.view(place.pool.name, place.layer)
    parts = _parts(run, len(step.blocks) * keys.shape[1], how)
    mixed = queries.new_empty((parts, *queries.shape), dtype=torch.float32 if parts > 1 else None)
    # Of each part, the highest score and the sum of shares relative to it.
    weights = mixed.new_empty((parts, len(queries), heads, 2), dtype=torch.float32)
    rows = max(_LEAST_ROWS, triton.next_power_of_2(tokens * group))
    _attend[(len(step.blocks), keys.shape[1], parts)](
        *(queries, keys, values, view["k"], view["v"], mixed, weights),
        queries if how.sinks is None else how.sinks,
        *(step.rows, step.pages, step.blocks),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *view["k"].stride()[:3],
        *view["v"].stride()[:3],
        *mixed.stride()[:1],
        *weights.stride()[:3],
        how.scale,
        how.cap or 0.0,
        PAGE=run.step.page_tokens,
        WINDOW=how.window or 0,
        SINKS=how.sinks is not None,
        CAPPED=how.cap is not None,
        PARTS=parts,
        GROUP=group,
        TOKENS=tokens,
        M=rows,
        N=KEYS,
        DIM=dim,
        D=max(_LEAST_ROWS, triton.next_power_of_2(dim)),
        num_warps=8 if rows > 64 else 4,
        num_stages=2,
    )
    return mixed[0] if parts == 1 else _joined(mixed, weights).to(queries.dtype)


def _parts(run: ForwardPass, programs: int, how: Attending) -> int:
    """In how many parts keys are taken, so that there is work for the whole device."""
    longest = max(rows.past - how.first_seen(rows.past) for rows in run.sequences)
    return max(1, min(PROGRAMS // programs, longest // LEAST_KEYS, MOST_PARTS))


def _joined(mixed: Tensor, weights: Tensor) -> Tensor:
    """One result of those of several parts, each with its share of the whole."""
    peaks, totals = weights[..., 0], weights[..., 1]
    shares = totals * torch.exp(peaks - peaks.amax(0))
    shares = shares / shares.sum(0)
    return (mixed * shares[..., None]).sum(0)


def _sequences(run: ForwardPass, anchor: str, tokens: int) -> Sequences:
    key = ("paged", anchor, tokens)
    return run.shared(key, lambda: _laid_out(run, anchor, tokens))


def _laid_out(run: ForwardPass, anchor: str, tokens: int) -> Sequences:
    rows, blocks, pages, offset = [], [], [], 0
    for number, one in enumerate(run.sequences):
        slots = one.slots[anchor]
        rows.append((one.start, one.end, one.past, offset))
        blocks += [(number, first) for first in range(one.start, one.end, tokens)]
        pages.append(slots)
        offset += len(slots)
    device = run.positions.device
    made = (torch.tensor(table, dtype=torch.int32).to(device) for table in (rows, blocks))
    return Sequences(next(made), torch.cat(pages), next(made))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    seen,
    peak,
    total,
    sums,
    scale,
    cap,
    CAPPED: tl.constexpr,  # noqa: N803
):
    """One more tile of keys: the highest score, the sum of shares, and the shares of values."""
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if CAPPED:
        # tanh, from what every device has.
        folded = tl.exp(-2.0 * tl.abs(scores / cap))
        size = cap * (1.0 - folded) / (1.0 + folded)
        scores = tl.where(scores < 0, -size, size)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # Where nothing was seen yet, anything but an infinity will do.
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp(scores - safe[:, None])
    before = tl.exp(peak - safe)
    sums = sums * before[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
    return higher, total * before + tl.sum(shares, 1), sums


@triton.jit
def _loaded(  # type: ignore[no-untyped-def]
    keys, values, key_at, value_at, there, dim, inside, like
):
    """A tile of keys, by column, and of values, by row."""
    mask = there[None, :] & inside[:, None]
    key = tl.load(keys + key_at[None, :] + dim[:, None], mask=mask, other=0.0)
    mask = there[:, None] & inside[None, :]
    value = tl.load(values + value_at[:, None] + dim[None, :], mask=mask, other=0.0)
    return key.to(like.dtype), value.to(like.dtype)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, new_keys, new_values, old_keys, old_values, mixed, weights, sinks, rows, pages, blocks,
    query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head,
    key_slot, key_entry, key_head, value_slot, value_entry, value_head,
    mixed_part, weight_part, weight_token, weight_head, scale, cap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    block, kv_head, part = blocks + 2 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, one = tl.load(block + 1), rows + 4 * tl.load(block)
    start, end, past = tl.load(one), tl.load(one + 1), tl.load(one + 2)
    table = pages + tl.load(one + 3)
    row, dim, column = tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live, inside = (row < TOKENS * GROUP) & (token < end), dim < DIM
    here = live[:, None] & inside[None, :]
    where = token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    query = tl.load(queries + where, mask=here, other=0.0)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if SINKS and part == PARTS - 1:
        peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total += 1.0
    sums = tl.zeros([M, D], tl.float32)
    # What was kept before the step: this part of it.
    begin = tl.maximum(0, past + first - start + 1 - WINDOW) if WINDOW > 0 else 0
    each = tl.cdiv(tl.maximum(past - begin, 0), PARTS * N) * N
    high = tl.minimum(past, begin + part * each + each)
    for at in range(begin + part * each, high, N):
        number = at + column
        slot = tl.load(table + number // PAGE, mask=number < high, other=0)
        entry = (number % PAGE).to(tl.int64)
        key_at = slot * key_slot + entry * key_entry + kv_head * key_head
        value_at = slot * value_slot + entry * value_entry + kv_head * value_head
        at_hand = number < high
        key, value = _loaded(old_keys, old_values, key_at, value_at, at_hand, dim, inside, query)
        seen = at_hand[None, :] & live[:, None]
        if WINDOW > 0:
            seen = seen & (number[None, :] > (past + token - start)[:, None] - WINDOW)
        peak, total, sums = _tile(query, key, value, seen, peak, total, sums, scale, cap, CAPPED)
    # The step's own tokens up to the last query, with the last part.
    origin = tl.maximum(start, first + 1 - WINDOW) if WINDOW > 0 else start
    last = tl.minimum(first + TOKENS, end) if part == PARTS - 1 else origin
    for at in range(origin, last, N):
        number = at + column
        key_at = number * new_key_token + kv_head * new_key_head
        value_at = number * new_value_token + kv_head * new_value_head
        at_hand = number < end
        key, value = _loaded(new_keys, new_values, key_at, value_at, at_hand, dim, inside, query)
        seen = (number[None, :] <= token[:, None]) & live[:, None]
        if WINDOW > 0:
            seen = seen & (number[None, :] > token[:, None] - WINDOW)
        peak, total, sums = _tile(query, key, value, seen, peak, total, sums, scale, cap, CAPPED)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(mixed + part * mixed_part + where, result.to(mixed.dtype.element_ty), mask=here)
    if PARTS > 1:
        weights += part * weight_part + token * weight_token + head * weight_head
        tl.store(weights, peak, mask=live)
        tl.store(weights + 1, total, mask=live)
# fmt: on
