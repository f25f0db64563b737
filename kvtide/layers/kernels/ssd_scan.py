"""Mamba2's recurrence as device programs, for all sequences of a step: `ssd_scan`.

A program takes a sequence, a head, and a block of the head's channels, and goes over the tokens
with the state in registers, in fp32: in chunks as `scan_chunks` does, or over a single token.
Nobody else reads or writes its part of the state.

Matrix products sum in fp32. Of a model in bf16 they take what comes out of the convolution as it
is, and what is computed on the way (shares, the state, what is fed into it) in tf32: off by a
third of what rounding the result to bf16 would be. With bf16 there (`WIDE`) it would be as
much as that. Of a model in fp32 they are exact to some 21 bits.

Decays are differences of sums over a chunk. A token that forgets more than e⁻²⁵ counts as that, so
that the sums stay small enough for their differences.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import ScanParams
from kvtide.layers.kernels.elementwise import softplus
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program

CHUNK = 64
CHANNELS = 32
"""Of a head, that a program takes."""
WIDE = True
"""Whether products in bf16 take what is computed on the way in tf32, not in bf16."""
_MAX_WIDE = 128
"""Columns of a state, in tf32: of more, there are not registers enough."""


def ssd_scan(
    run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
) -> Tensor:
    """(tokens, heads · dim) in fp32, the skip included, from and to the running states.

    Of x, B and C side by side, and time steps (tokens, heads) before their bias.
    """
    batch = run.batch
    read, write = run.state_slots(place)
    states = run.step.view(place.pool.name, place.layer)["ssm"][:, -1]
    heads, dim, width = states.shape[1:]
    shared = (convolved.shape[1] - heads * dim) // 2
    mixed = torch.empty((len(convolved), heads * dim), dtype=torch.float32, device=convolved.device)
    channels = max(MIN_ROWS, min(CHANNELS, power_of_two(dim)))
    columns = max(MIN_ROWS, power_of_two(width))
    grid = (len(batch.rows), heads, divided_up(dim, channels))
    scan = _scan_token if batch.bounds.longest == 1 else _scan_chunks
    scan[grid](
        *(convolved, dt, how.dt_bias, how.decay, how.skip, mixed, states, batch.rows, read, write),
        *(convolved.stride(0), dt.stride(0), *states.stride()[:3], *how.dt_limits),
        HEADS=heads,
        GROUP=heads * width // shared,
        SHARED=shared,
        DIM=dim,
        WIDTH=width,
        WIDE=WIDE and columns <= _MAX_WIDE,
        T=CHUNK,
        D=channels,
        N=columns,
        num_warps=4,
        num_stages=1 if convolved.dtype is torch.float32 else 3 if columns <= _MAX_WIDE else 2,
    )
    return mixed


# fmt: off
@program("rows")  # type: ignore[untyped-decorator]
def _scan_chunks(  # type: ignore[no-untyped-def]
    convolved, dts, biases, decays, skips, mixed, states, rows, read, write,
    row, dt_row, state_slot, state_head, state_channel, min_dt, max_dt,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    T: tl.constexpr, D: tl.constexpr, N: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    bias, decay, skip = tl.load(biases + head), tl.load(decays + head), tl.load(skips + head)
    step, width = tl.arange(0, T), tl.arange(0, N)
    channel = tl.program_id(2) * D + tl.arange(0, D)
    in_dim, in_width = (channel < DIM)[None, :], (width < WIDTH)[None, :]
    # By column, as the products need it.
    inside = (width < WIDTH)[:, None] & in_dim
    at_state = head * state_head + channel[None, :] * state_channel + width[:, None]
    state = tl.load(states + source * state_slot + at_state, mask=inside & (source >= 0), other=0.0)
    state = state.to(tl.float32)
    shared = HEADS * DIM + (head // GROUP) * WIDTH + width[None, :]
    EXACT: tl.constexpr = convolved.dtype.element_ty == tl.float32  # noqa: N806
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"  # noqa: N806
    KIND: tl.constexpr = tl.float32 if WIDE else convolved.dtype.element_ty  # noqa: N806
    for first in range(start, end, T):
        token, live = (first + step).to(tl.int64), first + step < end
        dt = tl.load(dts + token * dt_row + head, mask=live, other=0.0).to(tl.float32)
        dt = tl.minimum(tl.maximum(softplus(dt + bias), min_dt), max_dt)
        dt = tl.where(live, dt, 0.0)
        logs = tl.maximum(dt * decay, -25.0)
        sums, total = tl.cumsum(logs), tl.sum(logs)
        at = convolved + token[:, None] * row
        b = tl.load(at + shared, mask=live[:, None] & in_width, other=0.0)
        c = tl.load(at + SHARED + shared, mask=live[:, None] & in_width, other=0.0)
        output = tl.dot(c.to(KIND), state.to(KIND), input_precision=PRECISION)
        output *= tl.exp(sums)[:, None]
        shares = tl.dot(c, tl.trans(b), input_precision=PRECISION) * dt[None, :]
        shares *= tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        shares = tl.where(step[:, None] >= step[None, :], shares, 0.0).to(KIND)
        x = tl.load(at + head * DIM + channel[None, :], mask=live[:, None] & in_dim, other=0.0)
        output += tl.dot(shares, x.to(KIND), input_precision=PRECISION)
        output += x.to(tl.float32) * skip
        at = mixed + token[:, None] * (HEADS * DIM) + head * DIM + channel[None, :]
        tl.store(at, output, mask=live[:, None] & in_dim)
        fed = x.to(tl.float32) * (dt * tl.exp(tl.minimum(total - sums, 0.0)))[:, None]
        state *= tl.exp(total)
        state += tl.dot(tl.trans(b.to(KIND)), fed.to(KIND), input_precision=PRECISION)
    tl.debug_barrier()
    at_state += target * state_slot
    tl.store(states + at_state, state.to(states.dtype.element_ty), mask=inside & (target >= 0))


@program("rows")  # type: ignore[untyped-decorator]
def _scan_token(  # type: ignore[no-untyped-def]
    convolved, dts, biases, decays, skips, mixed, states, rows, read, write,
    row, dt_row, state_slot, state_head, state_channel, min_dt, max_dt,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    T: tl.constexpr, D: tl.constexpr, N: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(rows + 3 * sequence).to(tl.int64)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    width, channel = tl.arange(0, N), tl.program_id(2) * D + tl.arange(0, D)
    inside = (channel < DIM)[:, None] & (width < WIDTH)[None, :]
    at_state = head * state_head + channel[:, None] * state_channel + width[None, :]
    state = tl.load(states + source * state_slot + at_state, mask=inside & (source >= 0), other=0.0)
    at = convolved + token * row
    x = tl.load(at + head * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    at += HEADS * DIM + (head // GROUP) * WIDTH + width
    b = tl.load(at, mask=width < WIDTH, other=0.0).to(tl.float32)
    c = tl.load(at + SHARED, mask=width < WIDTH, other=0.0).to(tl.float32)
    dt = softplus(tl.load(dts + token * dt_row + head).to(tl.float32) + tl.load(biases + head))
    dt = tl.minimum(tl.maximum(dt, min_dt), max_dt)
    state = state.to(tl.float32) * tl.exp(dt * tl.load(decays + head))
    state += (dt * x)[:, None] * b[None, :]
    output = tl.sum(state * c[None, :], 1) + x * tl.load(skips + head)
    at = mixed + token * (HEADS * DIM) + head * DIM + channel
    tl.store(at, output, mask=channel < DIM)
    tl.debug_barrier()
    at_state += target * state_slot
    tl.store(states + at_state, state.to(states.dtype.element_ty), mask=inside & (target >= 0))
# fmt: on
