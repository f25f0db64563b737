"""The gated delta rule (gated delta net, and KDA with a gate per channel), chunked.

Torch reference: `layers/reference/gated_delta.py`, `gated_delta`.

`_delta_token`     grid (sequences, heads, value blocks): one decode token, state in registers
`_score_pairs`     grid (blocks of tokens, heads): with a gate per channel, q·k and k·k pair by pair
`_prepare_chunks`  grid (chunks, heads): all that does not depend on the state. The scores within a
                   chunk, and the inverse of the triangular system of writes (UT transform).
                   `_prepare_chunks_by_channel` is the same with a gate per channel.
`_delta_chunks`    grid (sequences, heads, value blocks): over the chunks of a sequence, with the
                   state in registers, in fp32. No other CTA touches this part of the state.

The triangular system is inverted by blocks of 1, 2, 4 … tokens. Each block is the inverse of a part
of the system, so it is as bounded as the rule itself. (A power series is not: where keys are alike,
its terms grow before they vanish.)

With a gate per head, norms and decays are factors of whole rows, and GEMMs take keys and queries as
they are. With a gate per channel, `_prepare_chunks_by_channel` stores keys and queries decayed.

Precision is that of `ssd_scan`: with tf32 intermediates the error is half of rounding the result to
bf16, with bf16 twice that. The inverse is in fp32. Log decays are clamped at -25 per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.backend.kernel_args import DeltaGates
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.elementwise import sigmoid, softplus
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.kernels.query_blocks import QueryBlocks, query_blocks
from kvtide.layers.kernels.recurrent import ssd_scan

CHUNK_TOKENS = 64
PAIR_TOKENS = 16
"""Tokens of a block that are scored pair by pair with a gate per channel."""
VALUE_DIM = 32
"""Value channels of a head per CTA (BLOCK_V), at most."""


@dataclass(frozen=True, slots=True)
class _PreparedChunks:
    """What `_delta_chunks` needs, by chunk and head, with c tokens in a chunk.

    inverse      (c, c): from residuals to updates, beta included
    attn         (c, c): causal scores within the chunk
    decay        with a gate per head (3, c): factors of k · state, of q · state, and of updates in
                 the final state, norms included; else (2, tokens, heads, b), k · k and q · k within
                 a block of b tokens
    chunk_decay  (1) or (keys): decay of the state over the chunk
    gated        with a gate per channel (3, tokens, heads, keys): decayed keys and queries, and
                 keys decayed to the end of the chunk
    """

    inverse: Tensor
    attn: Tensor
    decay: Tensor
    chunk_decay: Tensor
    gated: Tensor


def gated_delta(run: ForwardPass, place: Place, convolved: Tensor, gates: DeltaGates) -> Tensor:
    """The output (tokens, heads, values) in fp32, from and to the recurrent states.

    `convolved` has queries, keys and values side by side.
    """
    batch = run.batch
    read, write = run.state_slots(place)
    states = run.step.view(place.pool.name, place.layer)["delta"][:, -1]
    heads, keys, values = states.shape[1:]
    out = torch.empty((len(convolved), heads, values), dtype=torch.float32, device=convolved.device)
    key_heads = (convolved.shape[1] // keys - heads * values // keys) // 2
    block_v = max(MIN_ROWS, min(VALUE_DIM, power_of_two(values)))
    grid = (len(batch.rows), heads, divided_up(values, block_v))
    state_args = (out, states, batch.rows, read, write)
    constants = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": keys,
        "VALUE_DIM": values,
        "PER_HEAD": gates.dt.shape[1] == heads,
        "BLOCK_K": max(MIN_ROWS, power_of_two(keys)),
    }
    if batch.bounds.longest == 1:
        _delta_token[grid](
            *(*state_args, states.stride()[:3], convolved, convolved.stride(0)),
            *_gate_arguments(gates),
            **constants,
            BLOCK_V=block_v,
        )
        return out
    chunks = query_blocks(run, CHUNK_TOKENS)
    exact = convolved.dtype is torch.float32
    prepared = _launch_prepare(chunks, convolved, gates, constants | {"EXACT": exact})
    _delta_chunks[grid](
        *(*state_args, states.stride()[:3], convolved, convolved.stride(0), len(convolved)),
        *(
            chunks.first_blocks,
            prepared.inverse,
            prepared.attn,
            prepared.decay,
            prepared.chunk_decay,
            prepared.gated,
        ),
        **constants,
        BLOCK_T=CHUNK_TOKENS,
        BLOCK_V=block_v,
        EXACT=exact,
        TF32=ssd_scan.WIDE,
        num_warps=4,
        num_stages=2 if convolved.itemsize == 2 else 1,
    )
    return out


def _gate_arguments(gates: DeltaGates) -> tuple[Tensor | int, ...]:
    dt, beta = gates.dt, gates.beta
    return dt, dt.stride(0), gates.dt_bias, gates.decay, beta, beta.stride(0)


def _launch_prepare(
    chunks: QueryBlocks, convolved: Tensor, gates: DeltaGates, constants: dict[str, int]
) -> _PreparedChunks:
    heads, keys, per_head = constants["HEADS"], constants["KEY_DIM"], constants["PER_HEAD"]
    chunk_count = len(chunks.table)

    def empty(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(of, dtype=dtype, device=convolved.device)

    # Magnitudes are small, so fp16 is the more precise 16-bit format.
    dtype = torch.float32 if constants["EXACT"] else torch.float16
    tokens = len(convolved)
    gated_shape = (1,) if per_head else (3, tokens, heads, keys)
    decay_shape = (
        (chunk_count, heads, 3, CHUNK_TOKENS) if per_head else (2, tokens, heads, PAIR_TOKENS)
    )
    prepared = _PreparedChunks(
        inverse=empty(chunk_count, heads, CHUNK_TOKENS, CHUNK_TOKENS, dtype=dtype),
        attn=empty(chunk_count, heads, CHUNK_TOKENS, CHUNK_TOKENS, dtype=dtype),
        decay=empty(*decay_shape),
        chunk_decay=empty(chunk_count, heads, 1 if per_head else keys),
        gated=empty(*gated_shape, dtype=dtype),
    )
    if not per_head:
        gate_args = _gate_arguments(gates)[:4]
        _score_pairs[(chunk_count * CHUNK_TOKENS // PAIR_TOKENS, heads)](
            *(convolved, convolved.stride(0), tokens, *gate_args, chunks.table, prepared.decay),
            **{name: constants[name] for name in ("HEADS", "GROUP", "KEY_DIM", "BLOCK_K")},
            BLOCK_T=CHUNK_TOKENS,
            BLOCK_B=PAIR_TOKENS,
            num_warps=4,
        )
    prepare = _prepare_chunks if per_head else _prepare_chunks_by_channel
    prepare[(chunk_count, heads)](
        *(
            convolved,
            convolved.stride(0),
            len(convolved),
            *_gate_arguments(gates),
            chunks.table,
        ),
        *(prepared.inverse, prepared.attn, prepared.decay, prepared.chunk_decay, prepared.gated),
        **constants,
        BLOCK_T=CHUNK_TOKENS,
        BLOCK_B=PAIR_TOKENS,
        num_warps=4 if per_head else 8,
        num_stages=1,
    )
    return prepared


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(  # type: ignore[no-untyped-def]
    system,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The inverse of 1 + system, for a strictly lower triangular system.

    Blocks double in size: [[A, 0], [B, C]] has the inverse [[A', 0], [-C' B A', C']].
    """
    row, column = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    solved = tl.where(row == column, 1.0, 0.0)
    solved -= tl.where((row // 2 == column // 2), system, 0.0)
    for level in tl.static_range(1, 6):
        if (2 << level) <= BLOCK_T:
            couples = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
            coupled = tl.dot(tl.where(couples, system, 0.0), solved, input_precision=PRECISION)
            solved -= tl.dot(solved, coupled, input_precision=PRECISION)
    return solved


@triton.jit
def _inverse_norm(x):  # type: ignore[no-untyped-def]
    """Factors that L2-normalize rows."""
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _load_beta(betas, stride_beta, token, head, valid):  # type: ignore[no-untyped-def]
    beta = tl.load(betas + token * stride_beta + head, mask=valid, other=0.0)
    return tl.where(valid, sigmoid(beta.to(tl.float32)), 0.0)


# fmt: off
@kernel("count")  # type: ignore[untyped-decorator]
def _prepare_chunks(  # type: ignore[no-untyped-def]
    convolved, stride_row, count, gates, stride_gate, gate_biases, decays, betas, stride_beta,
    chunks,
    inverse_ptr, attn_ptr, decay_ptr, chunk_decay_ptr, gated_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
    EXACT: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if first >= end:
        return
    offs_t, offs_k = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    token, valid = (first + offs_t).to(tl.int64), first + offs_t < end
    mask = valid[:, None] & (offs_k < KEY_DIM)[None, :]
    ptrs = convolved + token[:, None] * stride_row + (head // GROUP) * KEY_DIM + offs_k[None, :]
    q = tl.load(ptrs, mask=mask, other=0.0)
    k = tl.load(ptrs + HEADS // GROUP * KEY_DIM, mask=mask, other=0.0)
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"
    SCALE: tl.constexpr = KEY_DIM ** -0.5
    q_scale = _inverse_norm(q.to(tl.float32)) * SCALE
    k_scale = _inverse_norm(k.to(tl.float32))
    gate = tl.load(gates + token * stride_gate + head, mask=valid, other=0.0).to(tl.float32)
    log_decay = tl.load(decays + head) * softplus(gate + tl.load(gate_biases + head))
    log_decay = tl.where(valid, tl.maximum(log_decay, -25.0), 0.0)
    beta = _load_beta(betas, stride_beta, token, head, valid)
    cum_decay, total_decay = tl.cumsum(log_decay), tl.sum(log_decay)
    relative_decay = tl.exp(
        tl.minimum(cum_decay[:, None] - cum_decay[None, :], 0.0)) * k_scale[None, :]
    attn = tl.dot(q, tl.trans(k), input_precision=PRECISION) * relative_decay * q_scale[:, None]
    attn = tl.where(offs_t[:, None] >= offs_t[None, :], attn, 0.0)
    dtype = attn_ptr.dtype.element_ty
    chunk_head = (chunk * HEADS + head).to(tl.int64)
    ptrs = chunk_head * BLOCK_T * BLOCK_T + offs_t[:, None] * BLOCK_T + offs_t[None, :]
    tl.store(attn_ptr + ptrs, attn.to(dtype))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * relative_decay
    system = tl.where(offs_t[:, None] > offs_t[None, :], system * (beta * k_scale)[:, None], 0.0)
    decay_ptr += chunk_head * 3 * BLOCK_T + offs_t
    tl.store(decay_ptr, k_scale * tl.exp(cum_decay))
    tl.store(decay_ptr + BLOCK_T, q_scale * tl.exp(cum_decay))
    tl.store(decay_ptr + 2 * BLOCK_T, k_scale * tl.exp(tl.minimum(total_decay - cum_decay, 0.0)))
    tl.store(chunk_decay_ptr + chunk_head, tl.exp(total_decay))
    inverse = _inverse(system, BLOCK_T, PRECISION) * beta[None, :]
    tl.store(inverse_ptr + ptrs, inverse.to(dtype))


@triton.jit  # type: ignore[untyped-decorator]
def _load_gated_qk(  # type: ignore[no-untyped-def]
    convolved, stride_row, gates, stride_gate, gate_biases, decays, head, token, valid,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """L2-normalized queries and keys of some tokens, and their log decays by channel."""
    offs_k = tl.arange(0, BLOCK_K)
    mask = valid[:, None] & (offs_k < KEY_DIM)[None, :]
    ptrs = convolved + token[:, None] * stride_row + (head // GROUP) * KEY_DIM + offs_k[None, :]
    q = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(ptrs + HEADS // GROUP * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
    ptrs = token[:, None] * stride_gate + head * KEY_DIM + offs_k[None, :]
    gate = tl.load(gates + ptrs, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(gate_biases + head * KEY_DIM + offs_k, mask=offs_k < KEY_DIM, other=0.0)
    log_decay = tl.load(decays + head) * softplus(gate + bias[None, :])
    log_decay = tl.where(mask, tl.maximum(log_decay, -25.0), 0.0)
    q = q * (_inverse_norm(q) * KEY_DIM ** -0.5)[:, None]
    return q, k * _inverse_norm(k)[:, None], log_decay


@kernel("count")  # type: ignore[untyped-decorator]
def _score_pairs(  # type: ignore[no-untyped-def]
    convolved, stride_row, count, gates, stride_gate, gate_biases, decays, chunks, pairs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """Within a block, key j by key j: k · k_j of later tokens, and q · k_j causally, decayed."""
    chunk, head = tl.program_id(0) // (BLOCK_T // BLOCK_B), tl.program_id(1)
    first = tl.load(chunks + 3 * chunk + 1) + tl.program_id(0) % (BLOCK_T // BLOCK_B) * BLOCK_B
    end = tl.load(chunks + 3 * chunk + 2)
    if first >= end:
        return
    offs_t, column = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_B)[None, :]
    token, valid = (first + offs_t).to(tl.int64), first + offs_t < end
    q, k, log_decay = _load_gated_qk(
        convolved, stride_row, gates, stride_gate, gate_biases, decays, head, token, valid, HEADS,
        GROUP, KEY_DIM, BLOCK_K)
    cum_decay, decay_to_j = tl.cumsum(log_decay, 0), tl.zeros([1, BLOCK_K], tl.float32)
    kk, qk = tl.zeros([BLOCK_B, BLOCK_B], tl.float32), tl.zeros([BLOCK_B, BLOCK_B], tl.float32)
    for j in range(tl.minimum(end - first, BLOCK_B)):
        token_j = (first + j + tl.arange(0, 1)).to(tl.int64)
        _, k_j, log_decay_j = _load_gated_qk(
            convolved, stride_row, gates, stride_gate, gate_biases, decays, head, token_j,
            token_j < end, HEADS, GROUP, KEY_DIM, BLOCK_K)
        decay_to_j += log_decay_j
        k_j = k_j * tl.exp(tl.minimum(cum_decay - decay_to_j, 0.0))
        is_j = column == j
        kk = tl.where(is_j & (offs_t > j)[:, None], tl.sum(k * k_j, 1)[:, None], kk)
        qk = tl.where(is_j & (offs_t >= j)[:, None], tl.sum(q * k_j, 1)[:, None], qk)
    ptrs = pairs + (token[:, None] * HEADS + head) * BLOCK_B + column
    mask = valid[:, None] & (column < BLOCK_B)
    tl.store(ptrs, kk, mask=mask)
    tl.store(ptrs + count.to(tl.int64) * HEADS * BLOCK_B, qk, mask=mask)


@kernel("count")  # type: ignore[untyped-decorator]
def _prepare_chunks_by_channel(  # type: ignore[no-untyped-def]
    convolved, stride_row, count, gates, stride_gate, gate_biases, decays, betas, stride_beta,
    chunks, inverse_ptr, attn_ptr, pair_ptr, chunk_decay_ptr, gated_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr,
    EXACT: tl.constexpr,
):
    """As `_prepare_chunks`, by blocks. Keys decay to the block's start: no exponent is positive."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if first >= end:
        return
    offs_b, offs_k, offs_t = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_T)
    offs_block = tl.arange(0, BLOCK_T // BLOCK_B)[:, None, None]
    k_mask = (offs_k < KEY_DIM)[None, :]
    chunk_head, plane = (chunk * HEADS + head).to(tl.int64), count.to(tl.int64) * HEADS * KEY_DIM
    dtype = gated_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"
    earlier_k = tl.zeros([BLOCK_T // BLOCK_B, BLOCK_B, BLOCK_K], tl.float32)
    system = tl.zeros([BLOCK_T // BLOCK_B, BLOCK_B, BLOCK_T], tl.float32)
    chunk_decay = tl.zeros([BLOCK_K], tl.float32)
    for block in range(tl.cdiv(tl.minimum(end - first, BLOCK_T), BLOCK_B)):
        begin = block * BLOCK_B
        token, valid = (first + begin + offs_b).to(tl.int64), first + begin + offs_b < end
        q, k, log_decay = _load_gated_qk(
            convolved, stride_row, gates, stride_gate, gate_biases, decays, head, token, valid,
            HEADS, GROUP, KEY_DIM, BLOCK_K)
        cum_decay, total_decay = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        decay, k_t = tl.exp(cum_decay), tl.trans(tl.reshape(earlier_k, [BLOCK_T, BLOCK_K]))
        kk = tl.dot(k * decay, k_t, input_precision=PRECISION)
        qk = tl.dot(q * decay, k_t, input_precision=PRECISION)
        pair = offs_t - begin  # Scores within the block come from `_score_pairs`.
        in_block = valid[:, None] & ((pair >= 0) & (pair < BLOCK_B))[None, :]
        ptrs = pair_ptr + (token[:, None] * HEADS + head) * BLOCK_B + pair[None, :]
        kk = tl.where(in_block, tl.load(ptrs, mask=in_block, other=0.0), kk)
        ptrs += count.to(tl.int64) * HEADS * BLOCK_B
        qk = tl.where(in_block, tl.load(ptrs, mask=in_block, other=0.0), qk)
        ptrs = attn_ptr + chunk_head * BLOCK_T * BLOCK_T
        ptrs = ptrs + (begin + offs_b)[:, None] * BLOCK_T + offs_t[None, :]
        tl.store(ptrs, qk.to(dtype))
        ptrs = gated_ptr + (token[:, None] * HEADS + head) * KEY_DIM + offs_k[None, :]
        decay *= tl.exp(chunk_decay)[None, :]
        tl.store(ptrs, (k * decay).to(dtype), mask=valid[:, None] & k_mask)
        tl.store(ptrs + plane, (q * decay).to(dtype), mask=valid[:, None] & k_mask)
        kk *= _load_beta(betas, stride_beta, token, head, valid)[:, None]
        system = tl.where(offs_block == block, kk[None, :, :], system)
        k *= tl.exp(tl.minimum(total_decay[None, :] - cum_decay, 0.0))
        earlier_k = tl.where(
            offs_block == block, k[None, :, :], earlier_k * tl.exp(total_decay)[None, None, :])
        chunk_decay += total_decay
    token, valid = (first + offs_t).to(tl.int64), first + offs_t < end
    ptrs = gated_ptr + 2 * plane + (token[:, None] * HEADS + head) * KEY_DIM + offs_k[None, :]
    tl.store(
        ptrs, tl.reshape(earlier_k, [BLOCK_T, BLOCK_K]).to(dtype), mask=valid[:, None] & k_mask)
    tl.store(
        chunk_decay_ptr + chunk_head * KEY_DIM + offs_k, tl.exp(chunk_decay), mask=offs_k < KEY_DIM)
    beta = _load_beta(betas, stride_beta, token, head, valid)
    inverse = _inverse(tl.reshape(system, [BLOCK_T, BLOCK_T]), BLOCK_T, PRECISION) * beta[None, :]
    ptrs = chunk_head * BLOCK_T * BLOCK_T + offs_t[:, None] * BLOCK_T + offs_t[None, :]
    tl.store(inverse_ptr + ptrs, inverse.to(dtype))


@kernel("rows", "count")  # type: ignore[untyped-decorator]
def _delta_chunks(  # type: ignore[no-untyped-def]
    out, states, rows, read, write, states_strides, convolved, stride_row, count, firsts,
    inverse_ptr, attn_ptr, decay_ptr, chunk_decay_ptr, gated_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
    EXACT: tl.constexpr, TF32: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(rows + 3 * sequence), tl.load(rows + 3 * sequence + 1)
    source, target = tl.load(read + sequence).to(tl.int64), tl.load(write + sequence).to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = (offs_k < KEY_DIM)[None, :], (offs_v < VALUE_DIM)[None, :]
    state_mask = (offs_k < KEY_DIM)[:, None] & v_mask
    state_offsets = head * states_strides[1] + offs_k[:, None] * states_strides[2] + offs_v[None, :]
    old_state = states + source * states_strides[0] + state_offsets
    state = tl.load(old_state, mask=state_mask & (source >= 0), other=0.0).to(tl.float32)
    chunk_head = (tl.load(firsts + sequence) * HEADS + head).to(tl.int64)
    v_base = convolved + 2 * (HEADS // GROUP) * KEY_DIM + head * VALUE_DIM + offs_v[None, :]
    k_base = convolved + (head // GROUP) * KEY_DIM + offs_k[None, :]
    plane = count.to(tl.int64) * HEADS * KEY_DIM
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"
    DTYPE: tl.constexpr = tl.float32 if TF32 else convolved.dtype.element_ty
    for first in range(start, end, BLOCK_T):
        token, valid = (first + offs_t).to(tl.int64)[:, None], (first + offs_t < end)[:, None]
        if PER_HEAD:
            q_ptrs = k_base + token * stride_row
            k_ptrs = q_ptrs + HEADS // GROUP * KEY_DIM
        else:
            k_ptrs = gated_ptr + (token * HEADS + head) * KEY_DIM + offs_k[None, :]
            q_ptrs = k_ptrs + plane
        state_tile, decay = state.to(DTYPE), decay_ptr + chunk_head * 3 * BLOCK_T + offs_t
        k = tl.load(k_ptrs, mask=valid & k_mask, other=0.0)
        residual = tl.dot(k.to(DTYPE), state_tile, input_precision=PRECISION)
        if PER_HEAD:
            residual *= tl.load(decay)[:, None]
        v = tl.load(v_base + token * stride_row, mask=valid & v_mask, other=0.0)
        residual = v.to(tl.float32) - residual
        tile_offsets = chunk_head * BLOCK_T * BLOCK_T + offs_t[:, None] * BLOCK_T + offs_t[None, :]
        inverse = tl.load(inverse_ptr + tile_offsets)
        update = tl.dot(inverse.to(DTYPE), residual.to(DTYPE), input_precision=PRECISION)
        q = tl.load(q_ptrs, mask=valid & k_mask, other=0.0)
        o = tl.dot(q.to(DTYPE), state_tile, input_precision=PRECISION)
        if PER_HEAD:
            o *= tl.load(decay + BLOCK_T)[:, None]
        attn = tl.load(attn_ptr + tile_offsets, mask=valid, other=0.0)
        o += tl.dot(attn.to(DTYPE), update.to(DTYPE), input_precision=PRECISION)
        tl.store(out + (token * HEADS + head) * VALUE_DIM + offs_v[None, :], o, mask=valid & v_mask)
        if PER_HEAD:
            update *= tl.load(decay + 2 * BLOCK_T)[:, None]
            state *= tl.load(chunk_decay_ptr + chunk_head)
        else:
            k = tl.load(k_ptrs + 2 * plane, mask=valid & k_mask, other=0.0)
            chunk_decay = chunk_decay_ptr + chunk_head * KEY_DIM + offs_k
            state *= tl.load(chunk_decay, mask=offs_k < KEY_DIM, other=0.0)[:, None]
        state += tl.dot(tl.trans(k.to(DTYPE)), update.to(DTYPE), input_precision=PRECISION)
        chunk_head += HEADS
    tl.debug_barrier()
    new_state = states + target * states_strides[0] + state_offsets
    tl.store(new_state, state.to(states.dtype.element_ty), mask=state_mask & (target >= 0))


@kernel("rows")  # type: ignore[untyped-decorator]
def _delta_token(  # type: ignore[no-untyped-def]
    out, states, rows, read, write, states_strides, convolved, stride_row, gates,
    stride_gate, gate_biases, decays, betas, stride_beta,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PER_HEAD: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(rows + 3 * sequence).to(tl.int64)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    state_mask = (offs_k < KEY_DIM)[:, None] & (offs_v < VALUE_DIM)[None, :]
    state_offsets = head * states_strides[1] + offs_k[:, None] * states_strides[2] + offs_v[None, :]
    old_state = states + source * states_strides[0] + state_offsets
    state = tl.load(old_state, mask=state_mask & (source >= 0), other=0.0)
    ptrs = convolved + token * stride_row + (head // GROUP) * KEY_DIM + offs_k
    q = tl.load(ptrs, mask=offs_k < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(ptrs + HEADS // GROUP * KEY_DIM, mask=offs_k < KEY_DIM, other=0.0).to(tl.float32)
    ptrs = convolved + token * stride_row + 2 * (HEADS // GROUP) * KEY_DIM
    ptrs = ptrs + head * VALUE_DIM + offs_v
    v = tl.load(ptrs, mask=offs_v < VALUE_DIM, other=0.0).to(tl.float32)
    SCALE: tl.constexpr = KEY_DIM ** -0.5
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * SCALE
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    gate_index = head + offs_k * 0 if PER_HEAD else head * KEY_DIM + offs_k
    gate = tl.load(
        gates + token * stride_gate + gate_index, mask=offs_k < KEY_DIM, other=0.0).to(tl.float32)
    gate += tl.load(gate_biases + gate_index, mask=offs_k < KEY_DIM, other=0.0)
    beta = sigmoid(tl.load(betas + token * stride_beta + head).to(tl.float32))
    state = state.to(tl.float32) * tl.exp(tl.load(decays + head) * softplus(gate))[:, None]
    residual = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (residual * beta)[None, :]
    o = tl.sum(state * q[:, None], 0)
    ptrs = out + (token * HEADS + head) * VALUE_DIM + offs_v
    tl.store(ptrs, o, mask=offs_v < VALUE_DIM)
    tl.debug_barrier()
    state_offsets += target * states_strides[0]
    tl.store(
        states + state_offsets, state.to(states.dtype.element_ty), mask=state_mask & (target >= 0))
# fmt: on
