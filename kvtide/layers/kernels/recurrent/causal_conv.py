"""Causal depthwise convolution, from and to the sequences' convolution states.

Torch reference: `layers/reference/causal_conv.py`, `causal_conv`. Sums are fp32, results in the
inputs' dtype.

`_convolve`      grid (token blocks, channel blocks): tokens of any sequences; taps before a
                 sequence's first new token come from its state
`_store_states`  grid (sequences, channel blocks): the new states of prefill chunks

Surprising: a state may be written back to the page it is read from. In a decode batch the CTA that
reads a state also writes it. Prefill needs a second kernel, after all CTAs have read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import ConvWeights
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.elementwise import activated
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel

CHANNEL_BLOCK = 128
TOKEN_BLOCK = 16
"""Tokens per CTA (BLOCK_T) with prefill chunks; in a decode batch, one."""
_MAX_FIELDS = 3


def causal_conv(
    run: ForwardPass, place: Place, conv: ConvWeights, inputs: Tensor, *, swished: bool
) -> Tensor:
    """The convolution of inputs (tokens, channels), followed by a swish if `swished`."""
    inputs = conv.rounded(run, place, inputs)
    batch, count = run.batch, len(inputs)
    decode = batch.bounds.longest == 1
    read, write = run.state_slots(place)
    view = run.step.view(place.pool.name, place.layer)
    # A convolution with one tap has no state.
    fields = [view[field.name][:, -1] for field in conv.kept] or [inputs[:, :, None]]
    widths = [field.shape[1] for field in fields]
    assert len(fields) <= _MAX_FIELDS and all(field.stride(2) == 1 for field in fields)
    missing = _MAX_FIELDS - len(fields)
    state_fields = [*fields, *fields[:1] * missing]
    widths += [0] * missing
    out = torch.empty((count, inputs.shape[1]), dtype=inputs.dtype, device=inputs.device)
    taps, bias = conv.taps, conv.bias
    blocks = sum(divided_up(width, CHANNEL_BLOCK) for width in widths)
    block_t = 1 if decode else TOKEN_BLOCK
    state_args = (
        *state_fields,
        *(field.stride(0) for field in state_fields),
        batch.rows,
        read,
        write,
    )
    constants = dict(zip(("W0", "W1", "W2"), widths, strict=True))
    constants |= {
        "STATE_TOKENS": len(taps) - 1,
        "BLOCK_STATE": power_of_two(len(taps)),
        "BLOCK_C": CHANNEL_BLOCK,
    }
    _convolve[(divided_up(count, block_t), blocks)](
        *(inputs, inputs.stride(0), *state_args),
        *(taps, taps if bias is None else bias, out, batch.owners, count),
        **constants,
        BIAS=bias is not None,
        SWISH=swished,
        STORES=decode and len(taps) > 1,
        BLOCK_T=block_t,
        num_warps=1 if decode else 4,
    )
    if not decode and len(taps) > 1:
        _store_states[(len(batch.rows), blocks)](inputs, inputs.stride(0), *state_args, **constants)
    return out


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _channel_block(  # type: ignore[no-untyped-def]
    block,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """A block's channels among all and within its state field, their mask, and the field.

    No block spans two fields.
    """
    second: tl.constexpr = (W0 + BLOCK_C - 1) // BLOCK_C
    third: tl.constexpr = second + (W1 + BLOCK_C - 1) // BLOCK_C
    field = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
    first_block = tl.where(field == 0, 0, tl.where(field == 1, second, third))
    fields_before = tl.where(field == 0, 0, tl.where(field == 1, W0, W0 + W1))
    width = tl.where(field == 0, W0, tl.where(field == 1, W1, W2))
    channel = (block - first_block) * BLOCK_C + tl.arange(0, BLOCK_C)
    return fields_before + channel, channel, channel < width, field


@triton.jit
def _load_state(  # type: ignore[no-untyped-def]
    state0, state1, state2, stride0, stride1, stride2, slot, offsets, mask, field,
):
    """State of a field at these offsets of a slot; zeros where masked."""
    if field == 0:
        value = tl.load(state0 + slot * stride0 + offsets, mask=mask, other=0.0)
    elif field == 1:
        value = tl.load(state1 + slot * stride1 + offsets, mask=mask, other=0.0)
    else:
        value = tl.load(state2 + slot * stride2 + offsets, mask=mask, other=0.0)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _store_state(  # type: ignore[no-untyped-def]
    inputs, stride_row, state0, state1, state2, stride0, stride1, stride2, rows, read, write,
    sequence, block,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, STATE_TOKENS: tl.constexpr,
    BLOCK_STATE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Stores a sequence's last inputs; with few new tokens, older ones come from its state."""
    column, channel, in_field, field = _channel_block(block, W0, W1, W2, BLOCK_C)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_STATE)
    mask = in_field[:, None] & (offs_s < STATE_TOKENS)[None, :] & (target >= 0)
    # Offsets from the sequence's first new token; older inputs have negative ones.
    offset = end - start - STATE_TOKENS + offs_s
    ptrs = (start + offset).to(tl.int64)[None, :] * stride_row + column[:, None]
    new = tl.load(inputs + ptrs, mask=mask & (offset >= 0)[None, :], other=0.0)
    old_mask = mask & (offset < 0)[None, :] & (source >= 0)
    state_offsets = channel[:, None] * STATE_TOKENS + (STATE_TOKENS + offset)[None, :]
    old = _load_state(
        state0, state1, state2, stride0, stride1, stride2, source, state_offsets, old_mask, field)
    tail = tl.where((offset >= 0)[None, :], new.to(old.dtype), old)
    tl.debug_barrier()
    state_offsets = channel[:, None] * STATE_TOKENS + offs_s[None, :]
    if field == 0:
        tl.store(state0 + target * stride0 + state_offsets, tail, mask=mask)
    elif field == 1:
        tl.store(state1 + target * stride1 + state_offsets, tail, mask=mask)
    else:
        tl.store(state2 + target * stride2 + state_offsets, tail, mask=mask)


@kernel("rows")  # type: ignore[untyped-decorator]
def _store_states(  # type: ignore[no-untyped-def]
    inputs, stride_row, state0, state1, state2, stride0, stride1, stride2, rows, read, write,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, STATE_TOKENS: tl.constexpr,
    BLOCK_STATE: tl.constexpr, BLOCK_C: tl.constexpr,
):
    sequence, block = tl.program_id(0), tl.program_id(1)
    _store_state(
        inputs, stride_row, state0, state1, state2, stride0, stride1, stride2, rows, read, write,
        sequence, block, W0, W1, W2, STATE_TOKENS, BLOCK_STATE, BLOCK_C)


@kernel("rows", "owners", "count")  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    inputs, stride_row, state0, state1, state2, stride0, stride1, stride2, rows, read, write, taps,
    bias, out, owners, count,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, STATE_TOKENS: tl.constexpr,
    BLOCK_STATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BIAS: tl.constexpr,
    SWISH: tl.constexpr, STORES: tl.constexpr,
):
    block, token = tl.program_id(1), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column, channel, in_field, field = _channel_block(block, W0, W1, W2, BLOCK_C)
    valid = token < count
    owner = tl.load(owners + token, mask=valid, other=0)
    start = tl.load(rows + 3 * owner, mask=valid, other=0)
    slot = tl.load(read + owner, mask=valid, other=-1).to(tl.int64)
    mask = valid[:, None] & in_field[None, :]
    needs_state = tl.min(token - start) < STATE_TOKENS
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        acc += tl.load(bias + column, mask=in_field, other=0.0)[None, :]
    for tap in tl.static_range(STATE_TOKENS + 1):
        source = token - STATE_TOKENS + tap
        new_mask = mask & (source >= start)[:, None]
        offsets = source.to(tl.int64)[:, None] * stride_row + column[None, :]
        value = tl.load(inputs + offsets, mask=new_mask, other=0.0).to(tl.float32)
        if tap < STATE_TOKENS and needs_state:
            old_mask = mask & (source < start)[:, None] & (slot >= 0)[:, None]
            state_offsets = channel[None, :] * STATE_TOKENS
            state_offsets = state_offsets + (STATE_TOKENS + source - start)[:, None]
            value += _load_state(
                state0, state1, state2, stride0, stride1, stride2, slot[:, None], state_offsets,
                old_mask, field).to(tl.float32)
        weight = tl.load(taps + tap * (W0 + W1 + W2) + column, mask=in_field, other=0.0)
        acc += value * weight[None, :]
    if SWISH:
        acc = activated(acc, 1.0, "swish")
    out_offsets = token.to(tl.int64)[:, None] * (W0 + W1 + W2) + column[None, :]
    tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=mask)
    if STORES:
        _store_state(
            inputs, stride_row, state0, state1, state2, stride0, stride1, stride2, rows, read,
            write, tl.sum(owner), block, W0, W1, W2, STATE_TOKENS, BLOCK_STATE, BLOCK_C)
# fmt: on
