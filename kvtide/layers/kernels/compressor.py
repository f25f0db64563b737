"""Compressed KV entries (DeepSeek-V4): gated means over blocks of tokens, for a whole step.

Torch reference: `layers/reference/compressor.py`, `compress`. A token that completes a block writes
the block's entry: normed, rotated, packed. The last token of a sequence or of a page saves the
incomplete means. Positions alone decide this.

`_compress`  grid (tokens,): most CTAs exit at once

A mean is an online softmax over the gates of a block: m_i, l_i and acc, as in attention, one per
channel. Where blocks overlap, a token also contributes to the next block's mean ("next" below).
Surprising: prefill takes two launches, since saving a mean may overwrite one that is still read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import CompressedStream
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.grid import power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.kv_write import bits, entry_fields, entry_shape, store_entry
from kvtide.layers.kernels.rope import ROUNDED, norm_and_rotate, rounded

MAX_BLOCK_TOKENS = 16
"""Tokens of a block that are reduced at a time."""


def compress(
    run: ForwardPass, stream: CompressedStream, values_gates: Tensor, cos_sin: Tensor
) -> None:
    """Writes the entries that the step completes, and saves the incomplete means.

    values_gates  (tokens, values and gates), fp32: the projection
    cos_sin       (tokens, 2, pairs), fp32: of the first position of every token's block
    """
    args = (run, stream, values_gates, cos_sin)
    if run.batch.bounds.longest == 1:
        _launch(*args, writes_entries=True, writes_state=True)
        return
    # A sequence's last token may overwrite a mean that its first tokens still read.
    _launch(*args, writes_entries=True, writes_state=False)
    _launch(*args, writes_entries=False, writes_state=True)


def _launch(
    run: ForwardPass,
    stream: CompressedStream,
    projected: Tensor,
    rotations: Tensor,
    *,
    writes_entries: bool,
    writes_state: bool,
) -> None:
    batch, view = run.batch, run.step.view(stream.entries.pool.name, stream.entries.layer)
    ratio, channels = stream.position.shape
    slots, states = batch.slots[stream.entries.anchor], batch.slots[stream.own.anchor]
    weight, eps = stream.norm
    block_tokens = min(MAX_BLOCK_TOKENS, power_of_two(ratio)) if batch.bounds.longest > 1 else 1
    _compress[(len(projected),)](
        *(projected, projected.stride(0), stream.position, bits(weight), rotations, eps),
        *(batch.rows, batch.owners, slots, slots.stride(0), states, states.stride(0)),
        *_mean_fields(run, stream.own),
        *_mean_fields(run, stream.overlap or stream.own),
        *entry_fields(stream.entries, view),
        PAGE=run.step.page_tokens,
        RATIO=ratio,
        CHANNELS=channels,
        WIDTH=len(weight),
        PAIRS=rotations.shape[-1],
        BLOCK_TOKENS=block_tokens,
        OVERLAPS=stream.overlap is not None,
        ROUNDED=ROUNDED[stream.dtype],
        WRITES_ENTRIES=writes_entries,
        WRITES_STATE=writes_state,
        **entry_shape(stream.entries, view),
        num_warps=8 if block_tokens * len(weight) > 4096 else 4,
    )


def _mean_fields(run: ForwardPass, place: Place) -> tuple[Tensor | int, ...]:
    """A pool's fields of means (m, l and acc), and the stride of its slots."""
    view = run.step.view(place.pool.name, place.layer)
    fields = [view[name][:, -1] for name in ("peak", "total", "mixed")]
    slot_strides = {field.stride(0) for field in fields}
    assert len(slot_strides) == 1, (
        f"pool {place.pool.name}: fields of a mean have different slot strides"
    )
    return (*fields, *slot_strides)


# fmt: off
@triton.jit
def _load_mean(  # type: ignore[no-untyped-def]
    m_ptr, l_ptr, acc_ptr, stride_slot, slot, valid, channel, in_width,
):
    """The saved state of a mean, or an empty one."""
    offsets, mask = slot * stride_slot + channel, in_width & valid & (slot >= 0)
    m_i = tl.load(m_ptr + offsets, mask=mask, other=float("-inf"))
    l_i = tl.load(l_ptr + offsets, mask=mask, other=0.0)
    return m_i, l_i, tl.load(acc_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def _store_mean(  # type: ignore[no-untyped-def]
    m_i, l_i, acc, m_ptr, l_ptr, acc_ptr, stride_slot, slot, valid, channel, in_width,
):
    offsets, mask = slot * stride_slot + channel, in_width & valid
    tl.store(m_ptr + offsets, m_i, mask=mask)
    tl.store(l_ptr + offsets, l_i, mask=mask)
    tl.store(acc_ptr + offsets, acc, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    m_i, l_i, acc, projected, stride_token, position, first, lo, hi, first_channel, channel,
    in_width,
    CHANNELS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):
    """Accumulates rows [lo, hi) of a block that begins at row `first`."""
    column = first_channel + channel
    for start in range(lo, hi, BLOCK_TOKENS):
        row = start + tl.arange(0, BLOCK_TOKENS)
        mask = (row < hi)[:, None] & in_width[None, :]
        offsets = row.to(tl.int64)[:, None] * stride_token + column[None, :]
        value = tl.load(projected + offsets, mask=mask, other=0.0)
        gate = tl.load(projected + offsets + CHANNELS, mask=mask, other=float("-inf"))
        offsets = (row - first)[:, None] * CHANNELS + column[None, :]
        gate += tl.load(position + offsets, mask=mask, other=0.0)
        m_new = tl.maximum(m_i, tl.max(gate, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp(gate - m_safe[None, :]), tl.exp(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * value, 0)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit  # type: ignore[untyped-decorator]
def _block_mean(  # type: ignore[no-untyped-def]
    projected, stride_token, position, own_m, own_l, own_acc, stride_own, next_m, next_l, next_acc,
    stride_next, old_slot, past, start, first, token, channel, in_width,
    RATIO: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The mean (m_i, l_i, acc) of the block that begins at row `first`, up to a token."""
    has_state = first < start
    if OVERLAPS:
        has_state = (past > 0) & (first <= start)
    m_i, l_i, acc = _load_mean(
        own_m, own_l, own_acc, stride_own, old_slot, has_state, channel, in_width)
    if OVERLAPS:
        # A block after the first starts with the contribution of the block before it.
        if first > start:
            m_i, l_i, acc = _load_mean(
                next_m, next_l, next_acc, stride_next, old_slot, first - RATIO < start, channel,
                in_width)
            m_i, l_i, acc = _accumulate(
                m_i, l_i, acc, projected, stride_token, position, first - RATIO,
                tl.maximum(first - RATIO, start), first, 0, channel, in_width, CHANNELS,
                BLOCK_TOKENS)
    return _accumulate(
        m_i, l_i, acc, projected, stride_token, position, first, tl.maximum(first, start),
        token + 1, CHANNELS - WIDTH, channel, in_width, CHANNELS, BLOCK_TOKENS)


@kernel(  # type: ignore[untyped-decorator]
    "rows", "owners", "slots", "stride_slots", "states", "stride_states"
)
def _compress(  # type: ignore[no-untyped-def]
    projected, stride_token, ape, weight, rotations, eps, rows, owners, slots, stride_slots, states,
    stride_states, own_m, own_l, own_acc, stride_own, next_m, next_l, next_acc, stride_next, field,
    rope, scale, pad, field_strides, rope_strides, scale_strides, pad_strides,
    PAGE: tl.constexpr, RATIO: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, OVERLAPS: tl.constexpr, ROUNDED: tl.constexpr,
    WRITES_ENTRIES: tl.constexpr, WRITES_STATE: tl.constexpr, KIND: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0)
    owner = tl.load(owners + token)
    rows, states = rows + 3 * owner, states + owner * stride_states
    start, end, past = tl.load(rows), tl.load(rows + 1), tl.load(rows + 2)
    position = past + token - start
    completes, incomplete = (position + 1) % RATIO == 0, (position + 1) % RATIO != 0
    slot = tl.load(slots + owner * stride_slots + position // PAGE).to(tl.int64)
    new_slot = tl.load(states + position // PAGE).to(tl.int64)
    saves = ((token == end - 1) | ((position + 1) % PAGE == 0)) & (new_slot >= 0)
    saves = saves & (incomplete | OVERLAPS)
    has_work = completes & (slot >= 0)
    if WRITES_STATE:
        has_work = (has_work | saves) if WRITES_ENTRIES else saves
    if has_work == 0:
        return
    old_slot = tl.load(states + tl.maximum(past - 1, 0) // PAGE).to(tl.int64)
    channel = tl.arange(0, GROUPS * GROUP)
    in_width, first = channel < WIDTH, token - position % RATIO
    m_i, l_i, acc = _block_mean(
        projected, stride_token, ape, own_m, own_l, own_acc, stride_own, next_m, next_l, next_acc,
        stride_next, old_slot, past, start, first, token, channel, in_width, RATIO, CHANNELS, WIDTH,
        BLOCK_TOKENS, OVERLAPS)
    if WRITES_ENTRIES:
        if completes:
            entry = rounded(acc / tl.where(in_width, l_i, 1.0), ROUNDED)
            vector = norm_and_rotate(
                entry, weight, rotations, token.to(tl.int64), eps, WIDTH, PAIRS, GROUPS * GROUP,
                ROUNDED)
            store_entry(
                tl.reshape(vector, [GROUPS, GROUP]), slot, position % PAGE // RATIO, field, rope,
                scale, pad, field_strides, rope_strides, scale_strides, pad_strides, KIND, NOPE,
                ROPE, PAD, GROUP, GROUPS)
    if WRITES_STATE:
        if OVERLAPS:
            m_next, l_next, acc_next = _load_mean(
                next_m, next_l, next_acc, stride_next, old_slot, first < start, channel, in_width)
            m_next, l_next, acc_next = _accumulate(
                m_next, l_next, acc_next, projected, stride_token, ape, first,
                tl.maximum(first, start), token + 1, 0, channel, in_width, CHANNELS, BLOCK_TOKENS)
            # All threads read before any thread writes.
            tl.debug_barrier()
            _store_mean(m_next, l_next, acc_next, own_m, own_l, own_acc, stride_own,
                  new_slot, saves & completes, channel, in_width)
            _store_mean(m_next, l_next, acc_next, next_m, next_l, next_acc,
                  stride_next, new_slot, saves & incomplete, channel, in_width)
        tl.debug_barrier()
        _store_mean(m_i, l_i, acc, own_m, own_l, own_acc, stride_own, new_slot,
              saves & incomplete, channel, in_width)
# fmt: on
