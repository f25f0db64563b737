"""Compressed streams as a device program: the means of all sequences' blocks at once.

What `compressing.Compressor` does, from its projection on. A token that closes a block makes the
block's entry, normed, turned, packed and written. A token that is the last of its sequence or of
its page leaves the means under way behind. Everything is known from the token's position alone, so
there is one program for every token, most of which have nothing to do.

A block's tokens are taken together and not one by one. A mean under way stays what it is: the
highest gate, and the sums relative to it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import CompressedStream
from kvtide.layers.kernels.grid import power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.kv_write import bits, entry_fields, entry_shape, store_entry
from kvtide.layers.kernels.rope import ROUNDED, normed_and_turned, rounded

MAX_TOKENS = 16
"""Of a block, that are taken together."""


def compress(run: ForwardPass, stream: CompressedStream, products: Tensor, turns: Tensor) -> None:
    """Writes the entries that the step closes, and the means that it leaves under way.

    products  (tokens, values and gates), fp32
    turns     (tokens, 2, pairs), fp32: of the first position of every token's block
    """
    given = (run, stream, products, turns)
    if run.batch.bounds.longest == 1:
        _take(*given, closes=True, leaves=True)
        return
    # A sequence's last token may write over what its first ones still read.
    _take(*given, closes=True, leaves=False)
    _take(*given, closes=False, leaves=True)


def _take(
    run: ForwardPass,
    stream: CompressedStream,
    products: Tensor,
    turns: Tensor,
    *,
    closes: bool,
    leaves: bool,
) -> None:
    batch, view = run.batch, run.step.view(stream.entries.pool.name, stream.entries.layer)
    ratio, channels = stream.position.shape
    slots, states = batch.slots[stream.entries.anchor], batch.slots[stream.own.anchor]
    weight, eps = stream.norm
    together = min(MAX_TOKENS, power_of_two(ratio)) if batch.bounds.longest > 1 else 1
    _blocks[(len(products),)](
        *(products, products.stride(0), stream.position, bits(weight), turns, eps),
        *(batch.rows, batch.owners, slots, slots.stride(0), states, states.stride(0)),
        *_means(run, stream.own),
        *_means(run, stream.overlap or stream.own),
        *entry_fields(stream.entries, view),
        PAGE=run.step.page_tokens,
        RATIO=ratio,
        CHANNELS=channels,
        WIDTH=len(weight),
        PAIRS=turns.shape[-1],
        TOGETHER=together,
        OVERLAPS=stream.overlap is not None,
        ROUNDED=ROUNDED[stream.dtype],
        CLOSES=closes,
        LEAVES=leaves,
        **entry_shape(stream.entries, view),
        num_warps=8 if together * len(weight) > 4096 else 4,
    )


def _means(run: ForwardPass, place: Place) -> tuple[Tensor | int, ...]:
    """Where a pool keeps them, and how far its slots are apart."""
    view = run.step.view(place.pool.name, place.layer)
    fields = [view[name][:, -1] for name in ("peak", "total", "mixed")]
    apart = {field.stride(0) for field in fields}
    assert len(apart) == 1, f"pool {place.pool.name}: fields of a mean lie in pages of their own"
    return (*fields, *apart)


# fmt: off
@triton.jit
def _recalled(  # type: ignore[no-untyped-def]
    peaks, totals, mixes, apart, slot, there, channel, inside
):
    """A mean under way, where there is one."""
    at, mask = slot * apart + channel, inside & there & (slot >= 0)
    peak = tl.load(peaks + at, mask=mask, other=float("-inf"))
    total = tl.load(totals + at, mask=mask, other=0.0)
    return peak, total, tl.load(mixes + at, mask=mask, other=0.0)


@triton.jit
def _left(  # type: ignore[no-untyped-def]
    peak, total, mixed, peaks, totals, mixes, apart, slot, there, channel, inside
):
    at, mask = slot * apart + channel, inside & there
    tl.store(peaks + at, peak, mask=mask)
    tl.store(totals + at, total, mask=mask)
    tl.store(mixes + at, mixed, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _taken(  # type: ignore[no-untyped-def]
    peak, total, mixed, products, product_token, position, first, low, high, half, channel, inside,
    CHANNELS: tl.constexpr, TOGETHER: tl.constexpr,  # noqa: N803
):
    """With the rows [low, high) of a block that begins at row `first`."""
    column = half + channel
    for at in range(low, high, TOGETHER):
        row = at + tl.arange(0, TOGETHER)
        there = (row < high)[:, None] & inside[None, :]
        where = row.to(tl.int64)[:, None] * product_token + column[None, :]
        value = tl.load(products + where, mask=there, other=0.0)
        gate = tl.load(products + where + CHANNELS, mask=there, other=float("-inf"))
        where = (row - first)[:, None] * CHANNELS + column[None, :]
        gate += tl.load(position + where, mask=there, other=0.0)
        higher = tl.maximum(peak, tl.max(gate, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        share, before = tl.exp(gate - safe[None, :]), tl.exp(peak - safe)
        total = total * before + tl.sum(share, 0)
        mixed = mixed * before + tl.sum(share * value, 0)
        peak = higher
    return peak, total, mixed


@triton.jit  # type: ignore[untyped-decorator]
def _own(  # type: ignore[no-untyped-def]
    products, product_token, position, own_peak, own_total, own_mixed, own_slot,
    share_peak, share_total, share_mixed, share_slot, before, past, start, first, token,
    channel, inside, RATIO: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,  # noqa: N803
):
    """The mean of the block that begins at row `first`, up to a token."""
    begun = first < start
    if OVERLAPS:
        begun = (past > 0) & (first <= start)
    peak, total, mixed = _recalled(
        own_peak, own_total, own_mixed, own_slot, before, begun, channel, inside)
    if OVERLAPS:  # noqa: SIM102
        # A later block begins with what the one before it has put into it.
        if first > start:
            peak, total, mixed = _recalled(
                share_peak, share_total, share_mixed, share_slot, before, first - RATIO < start,
                channel, inside)
            peak, total, mixed = _taken(
                peak, total, mixed, products, product_token, position, first - RATIO,
                tl.maximum(first - RATIO, start), first, 0, channel, inside, CHANNELS, TOGETHER)
    return _taken(
        peak, total, mixed, products, product_token, position, first, tl.maximum(first, start),
        token + 1, CHANNELS - WIDTH, channel, inside, CHANNELS, TOGETHER)


@program("rows", "owners", "slots", "slots_sequence", "states", "states_sequence")  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    products, product_token, position, weight, turns, eps,
    rows, owners, slots, slots_sequence, states, states_sequence,
    own_peak, own_total, own_mixed, own_slot, share_peak, share_total, share_mixed, share_slot,
    field, rope, scale, pad,
    field_slot, field_entry, rope_slot, rope_entry, scale_slot, scale_entry, pad_slot, pad_entry,
    PAGE: tl.constexpr, RATIO: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr, ROUNDED: tl.constexpr, CLOSES: tl.constexpr,  # noqa: N803
    LEAVES: tl.constexpr, KIND: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,  # noqa: N803
    PAD: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0)
    owner = tl.load(owners + token)
    rows, states = rows + 3 * owner, states + owner * states_sequence
    start, end, past = tl.load(rows), tl.load(rows + 1), tl.load(rows + 2)
    at = past + token - start
    closes, stays_open = (at + 1) % RATIO == 0, (at + 1) % RATIO != 0
    slot = tl.load(slots + owner * slots_sequence + at // PAGE).to(tl.int64)
    after = tl.load(states + at // PAGE).to(tl.int64)
    leaves = ((token == end - 1) | ((at + 1) % PAGE == 0)) & (after >= 0)
    leaves = leaves & (stays_open | OVERLAPS)
    works = closes & (slot >= 0)
    if LEAVES:
        works = (works | leaves) if CLOSES else leaves
    if works == 0:
        return
    before = tl.load(states + tl.maximum(past - 1, 0) // PAGE).to(tl.int64)
    channel = tl.arange(0, GROUPS * GROUP)
    inside, first = channel < WIDTH, token - at % RATIO
    peak, total, mixed = _own(
        products, product_token, position, own_peak, own_total, own_mixed, own_slot,
        share_peak, share_total, share_mixed, share_slot, before, past, start, first, token,
        channel, inside, RATIO, CHANNELS, WIDTH, TOGETHER, OVERLAPS)
    if CLOSES:  # noqa: SIM102
        if closes:
            mean = rounded(mixed / tl.where(inside, total, 1.0), ROUNDED)
            vector = normed_and_turned(
                mean, weight, turns, token.to(tl.int64), eps, WIDTH, PAIRS, GROUPS * GROUP, ROUNDED)
            store_entry(
                tl.reshape(vector, [GROUPS, GROUP]), slot, at % PAGE // RATIO,
                field, rope, scale, pad, field_slot, field_entry, rope_slot, rope_entry,
                scale_slot, scale_entry, pad_slot, pad_entry, KIND, NOPE, ROPE, PAD, GROUP, GROUPS)
    if LEAVES:
        if OVERLAPS:
            next_peak, next_total, next_mixed = _recalled(
                share_peak, share_total, share_mixed, share_slot, before, first < start,
                channel, inside)
            next_peak, next_total, next_mixed = _taken(
                next_peak, next_total, next_mixed, products, product_token, position, first,
                tl.maximum(first, start), token + 1, 0, channel, inside, CHANNELS, TOGETHER)
            # Nobody may write before all have read.
            tl.debug_barrier()
            _left(next_peak, next_total, next_mixed, own_peak, own_total, own_mixed, own_slot,
                  after, leaves & closes, channel, inside)
            _left(next_peak, next_total, next_mixed, share_peak, share_total, share_mixed,
                  share_slot, after, leaves & stays_open, channel, inside)
        tl.debug_barrier()
        _left(peak, total, mixed, own_peak, own_total, own_mixed, own_slot, after,
              leaves & stays_open, channel, inside)
# fmt: on
