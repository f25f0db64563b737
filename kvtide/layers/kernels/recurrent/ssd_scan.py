"""Mamba2's selective scan (SSD), chunked, for all sequences of a step.

Torch reference: `layers/reference/ssd_scan.py`, `ssd_scan`.

`_scan_token`   grid (sequences, heads, channel blocks): one decode token
`_scan_chunks`  the same grid: over the chunks of a sequence, with the state in registers, in fp32

No other CTA touches a CTA's part of the state. GEMMs accumulate in fp32. In a bf16 model they take
the convolution's output as it is, and intermediates (scores, state, updates) in tf32: the error is
a third of rounding the result to bf16. With bf16 intermediates (`WIDE` off) it is as large as that.
In an fp32 model GEMMs are exact to about 21 bits.

Decays are differences of cumulative sums. Log decays are clamped at -25 per token, so that the sums
stay small enough for their differences.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import ScanParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.elementwise import softplus
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel

CHUNK_TOKENS = 64
CHANNEL_BLOCK = 32
"""Channels of a head per CTA (BLOCK_D), at most."""
WIDE = True
"""Whether GEMMs of a bf16 model take intermediates in tf32, not in bf16."""
_MAX_TF32_STATE = 128
"""State columns up to which registers suffice for tf32."""


def ssd_scan(
    run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
) -> Tensor:
    """The output (tokens, heads · dim) in fp32, skip included, from and to the recurrent states.

    `convolved` has x, B and C side by side; `dt` (tokens, heads) is before its bias.
    """
    batch = run.batch
    read, write = run.state_slots(place)
    states = run.step.view(place.pool.name, place.layer)["ssm"][:, -1]
    heads, dim, state_dim = states.shape[1:]
    bc_dim = (convolved.shape[1] - heads * dim) // 2
    out = torch.empty((len(convolved), heads * dim), dtype=torch.float32, device=convolved.device)
    block_d = max(MIN_ROWS, min(CHANNEL_BLOCK, power_of_two(dim)))
    block_n = max(MIN_ROWS, power_of_two(state_dim))
    grid = (len(batch.rows), heads, divided_up(dim, block_d))
    launch = _scan_token if batch.bounds.longest == 1 else _scan_chunks
    launch[grid](
        *(convolved, dt, how.dt_bias, how.decay, how.skip, out, states, batch.rows, read, write),
        *(convolved.stride(0), dt.stride(0), states.stride()[:3], *how.dt_limits),
        HEADS=heads,
        HEADS_PER_GROUP=heads * state_dim // bc_dim,
        BC_DIM=bc_dim,
        HEAD_DIM=dim,
        STATE_DIM=state_dim,
        WIDE=WIDE and block_n <= _MAX_TF32_STATE,
        BLOCK_T=CHUNK_TOKENS,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=1
        if convolved.dtype is torch.float32
        else 3
        if block_n <= _MAX_TF32_STATE
        else 2,
    )
    return out


# fmt: off
@kernel("rows")  # type: ignore[untyped-decorator]
def _scan_chunks(  # type: ignore[no-untyped-def]
    convolved, dts, biases, decays, skips, out, states, rows, read, write, stride_row, stride_dt,
    states_strides, min_dt, max_dt,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, BC_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    bias, decay, skip = tl.load(biases + head), tl.load(decays + head), tl.load(skips + head)
    offs_t, offs_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    d_mask, n_mask = (offs_d < HEAD_DIM)[None, :], (offs_n < STATE_DIM)[None, :]
    # The state is transposed, as the GEMMs need it.
    state_mask = (offs_n < STATE_DIM)[:, None] & d_mask
    state_offsets = head * states_strides[1] + offs_d[None, :] * states_strides[2] + offs_n[:, None]
    old_state = states + source * states_strides[0] + state_offsets
    state = tl.load(old_state, mask=state_mask & (source >= 0), other=0.0).to(tl.float32)
    bc_offsets = HEADS * HEAD_DIM + (head // HEADS_PER_GROUP) * STATE_DIM + offs_n[None, :]
    EXACT: tl.constexpr = convolved.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"
    DTYPE: tl.constexpr = tl.float32 if WIDE else convolved.dtype.element_ty
    for first in range(start, end, BLOCK_T):
        token, valid = (first + offs_t).to(tl.int64), first + offs_t < end
        dt = tl.load(dts + token * stride_dt + head, mask=valid, other=0.0).to(tl.float32)
        dt = tl.minimum(tl.maximum(softplus(dt + bias), min_dt), max_dt)
        dt = tl.where(valid, dt, 0.0)
        log_decay = tl.maximum(dt * decay, -25.0)
        cum_decay, total_decay = tl.cumsum(log_decay), tl.sum(log_decay)
        ptrs = convolved + token[:, None] * stride_row
        b = tl.load(ptrs + bc_offsets, mask=valid[:, None] & n_mask, other=0.0)
        c = tl.load(ptrs + BC_DIM + bc_offsets, mask=valid[:, None] & n_mask, other=0.0)
        y = tl.dot(c.to(DTYPE), state.to(DTYPE), input_precision=PRECISION)
        y *= tl.exp(cum_decay)[:, None]
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * dt[None, :]
        scores *= tl.exp(tl.minimum(cum_decay[:, None] - cum_decay[None, :], 0.0))
        scores = tl.where(offs_t[:, None] >= offs_t[None, :], scores, 0.0).to(DTYPE)
        x = tl.load(
            ptrs + head * HEAD_DIM + offs_d[None, :], mask=valid[:, None] & d_mask, other=0.0)
        y += tl.dot(scores, x.to(DTYPE), input_precision=PRECISION)
        y += x.to(tl.float32) * skip
        ptrs = out + token[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + offs_d[None, :]
        tl.store(ptrs, y, mask=valid[:, None] & d_mask)
        update = x.to(tl.float32) * (dt * tl.exp(tl.minimum(total_decay - cum_decay, 0.0)))[:, None]
        state *= tl.exp(total_decay)
        state += tl.dot(tl.trans(b.to(DTYPE)), update.to(DTYPE), input_precision=PRECISION)
    tl.debug_barrier()
    state_offsets += target * states_strides[0]
    tl.store(
        states + state_offsets, state.to(states.dtype.element_ty), mask=state_mask & (target >= 0))


@kernel("rows")  # type: ignore[untyped-decorator]
def _scan_token(  # type: ignore[no-untyped-def]
    convolved, dts, biases, decays, skips, out, states, rows, read, write, stride_row, stride_dt,
    states_strides, min_dt, max_dt,
    HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, BC_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(rows + 3 * sequence).to(tl.int64)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    state_mask = (offs_d < HEAD_DIM)[:, None] & (offs_n < STATE_DIM)[None, :]
    state_offsets = head * states_strides[1] + offs_d[:, None] * states_strides[2] + offs_n[None, :]
    old_state = states + source * states_strides[0] + state_offsets
    state = tl.load(old_state, mask=state_mask & (source >= 0), other=0.0)
    ptrs = convolved + token * stride_row
    x = tl.load(ptrs + head * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32)
    ptrs += HEADS * HEAD_DIM + (head // HEADS_PER_GROUP) * STATE_DIM + offs_n
    b = tl.load(ptrs, mask=offs_n < STATE_DIM, other=0.0).to(tl.float32)
    c = tl.load(ptrs + BC_DIM, mask=offs_n < STATE_DIM, other=0.0).to(tl.float32)
    dt = softplus(tl.load(dts + token * stride_dt + head).to(tl.float32) + tl.load(biases + head))
    dt = tl.minimum(tl.maximum(dt, min_dt), max_dt)
    state = state.to(tl.float32) * tl.exp(dt * tl.load(decays + head))
    state += (dt * x)[:, None] * b[None, :]
    y = tl.sum(state * c[None, :], 1) + x * tl.load(skips + head)
    ptrs = out + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + offs_d
    tl.store(ptrs, y, mask=offs_d < HEAD_DIM)
    tl.debug_barrier()
    state_offsets += target * states_strides[0]
    tl.store(
        states + state_offsets, state.to(states.dtype.element_ty), mask=state_mask & (target >= 0))
# fmt: on
