"""Causal convolutions as device programs, for all sequences of a step: `recurrent.CausalConv`.

A program takes a few tokens, of whatever sequences, and a block of channels. What stands before
a sequence's first token it reads where the running state lies, by tap. Sums are fp32, and leave in
the inputs' dtype.

A state may lie in the page that it is written back to. Of single tokens each program reads what it
needs of the state before it writes, and nobody else reads that. Else another program writes,
when all have read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import ConvWeights
from kvtide.layers.kernels.elementwise import activated
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import program

CHANNELS = 128
TOKENS = 16
"""Of a prompt, that a program takes; of single tokens, one."""
_MAX_PARTS = 3


def causal_conv(
    run: ForwardPass, place: Place, conv: ConvWeights, inputs: Tensor, *, swished: bool
) -> Tensor:
    """Of inputs (tokens, channels), from and to the running states of their sequences.

    Swished if asked for.
    """
    inputs = conv.rounded(run, place, inputs)
    batch, count = run.batch, len(inputs)
    single = batch.bounds.longest == 1
    read, write = run.state_slots(place)
    view = run.step.view(place.pool.name, place.layer)
    # Without a tail, nothing is kept.
    fields = [view[field.name][:, -1] for field in conv.kept] or [inputs[:, :, None]]
    widths = [field.shape[1] for field in fields]
    assert len(fields) <= _MAX_PARTS and all(field.stride(2) == 1 for field in fields)
    more = _MAX_PARTS - len(fields)
    parts = [*fields, *fields[:1] * more]
    widths += [0] * more
    mixed = torch.empty((count, inputs.shape[1]), dtype=inputs.dtype, device=inputs.device)
    taps, bias = conv.taps, conv.bias
    blocks = sum(divided_up(width, CHANNELS) for width in widths)
    tokens = 1 if single else TOKENS
    state = (*parts, *(part.stride(0) for part in parts), batch.rows, read, write)
    shape = dict(zip(("W0", "W1", "W2"), widths, strict=True))
    shape |= {"TAIL": len(taps) - 1, "TAILS": power_of_two(len(taps)), "C": CHANNELS}
    _convolve[(divided_up(count, tokens), blocks)](
        *(inputs, inputs.stride(0), *state),
        *(taps, taps if bias is None else bias, mixed, batch.owners, count),
        **shape,
        BIAS=bias is not None,
        SWISHED=swished,
        KEEPS=single and len(taps) > 1,
        T=tokens,
        num_warps=1 if single else 4,
    )
    if not single and len(taps) > 1:
        _keep_tails[(len(batch.rows), blocks)](inputs, inputs.stride(0), *state, **shape)
    return mixed


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _channels(  # type: ignore[no-untyped-def]
    block, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, C: tl.constexpr,  # noqa: N803
):
    """A block's channels: of all, of its part, and which of them there are; and the part.

    No block reaches from one part into the next.
    """
    second: tl.constexpr = (W0 + C - 1) // C
    third: tl.constexpr = second + (W1 + C - 1) // C
    part = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    before = tl.where(part == 0, 0, tl.where(part == 1, W0, W0 + W1))
    width = tl.where(part == 0, W0, tl.where(part == 1, W1, W2))
    channel = (block - first) * C + tl.arange(0, C)
    return before + channel, channel, channel < width, part


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    kept0, kept1, kept2, slot0, slot1, slot2, slot, within, mask, part,
):
    """From the part's field, at these places of these slots; zeros elsewhere."""
    if part == 0:
        found = tl.load(kept0 + slot * slot0 + within, mask=mask, other=0.0)
    elif part == 1:
        found = tl.load(kept1 + slot * slot1 + within, mask=mask, other=0.0)
    else:
        found = tl.load(kept2 + slot * slot2 + within, mask=mask, other=0.0)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _keep_tail(  # type: ignore[no-untyped-def]
    inputs, input_row, kept0, kept1, kept2, slot0, slot1, slot2, rows, read, write, sequence, block,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,  # noqa: N803
    TAIL: tl.constexpr, TAILS: tl.constexpr, C: tl.constexpr,  # noqa: N803
):
    """A sequence's last inputs, older ones among them where it brings fewer."""
    column, channel, inside, part = _channels(block, W0, W1, W2, C)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    place = tl.arange(0, TAILS)
    there = inside[:, None] & (place < TAIL)[None, :] & (target >= 0)
    # Counted from the sequence's first new token; what is older has negative numbers.
    number = end - start - TAIL + place
    at = (start + number).to(tl.int64)[None, :] * input_row + column[:, None]
    new = tl.load(inputs + at, mask=there & (number >= 0)[None, :], other=0.0)
    older = there & (number < 0)[None, :] & (source >= 0)
    within = channel[:, None] * TAIL + (TAIL + number)[None, :]
    old = _kept(kept0, kept1, kept2, slot0, slot1, slot2, source, within, older, part)
    tail = tl.where((number >= 0)[None, :], new.to(old.dtype), old)
    tl.debug_barrier()
    within = channel[:, None] * TAIL + place[None, :]
    if part == 0:
        tl.store(kept0 + target * slot0 + within, tail, mask=there)
    elif part == 1:
        tl.store(kept1 + target * slot1 + within, tail, mask=there)
    else:
        tl.store(kept2 + target * slot2 + within, tail, mask=there)


@program("rows")  # type: ignore[untyped-decorator]
def _keep_tails(  # type: ignore[no-untyped-def]
    inputs, input_row, kept0, kept1, kept2, slot0, slot1, slot2, rows, read, write,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,  # noqa: N803
    TAIL: tl.constexpr, TAILS: tl.constexpr, C: tl.constexpr,  # noqa: N803
):
    sequence, block = tl.program_id(0), tl.program_id(1)
    _keep_tail(inputs, input_row, kept0, kept1, kept2, slot0, slot1, slot2, rows, read, write,
               sequence, block, W0, W1, W2, TAIL, TAILS, C)


@program("rows", "owners", "count")  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    inputs, input_row, kept0, kept1, kept2, slot0, slot1, slot2, rows, read, write,
    taps, bias, mixed, owners, count,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,  # noqa: N803
    TAIL: tl.constexpr, TAILS: tl.constexpr, C: tl.constexpr, T: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr, SWISHED: tl.constexpr, KEEPS: tl.constexpr,  # noqa: N803
):
    block, token = tl.program_id(1), tl.program_id(0) * T + tl.arange(0, T)
    column, channel, inside, part = _channels(block, W0, W1, W2, C)
    live = token < count
    owner = tl.load(owners + token, mask=live, other=0)
    start = tl.load(rows + 3 * owner, mask=live, other=0)
    slot = tl.load(read + owner, mask=live, other=-1).to(tl.int64)
    there = live[:, None] & inside[None, :]
    begins = tl.min(token - start) < TAIL
    sums = tl.zeros([T, C], tl.float32)
    if BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    for tap in tl.static_range(TAIL + 1):
        number = token - TAIL + tap
        new = there & (number >= start)[:, None]
        at = number.to(tl.int64)[:, None] * input_row + column[None, :]
        value = tl.load(inputs + at, mask=new, other=0.0).to(tl.float32)
        if tap < TAIL and begins:
            old = there & (number < start)[:, None] & (slot >= 0)[:, None]
            within = channel[None, :] * TAIL + (TAIL + number - start)[:, None]
            value += _kept(kept0, kept1, kept2, slot0, slot1, slot2, slot[:, None], within, old,
                           part).to(tl.float32)
        weight = tl.load(taps + tap * (W0 + W1 + W2) + column, mask=inside, other=0.0)
        sums += value * weight[None, :]
    if SWISHED:
        sums = activated(sums, 1.0, "swish")
    where = token.to(tl.int64)[:, None] * (W0 + W1 + W2) + column[None, :]
    tl.store(mixed + where, sums.to(mixed.dtype.element_ty), mask=there)
    if KEEPS:
        _keep_tail(inputs, input_row, kept0, kept1, kept2, slot0, slot1, slot2, rows, read, write,
                   tl.sum(owner), block, W0, W1, W2, TAIL, TAILS, C)
# fmt: on
