"""The gated delta rule as device programs, for all sequences of a step: `delta`.

Of single tokens a program takes a sequence, a head and a block of its values, and does what
`delta.delta_tokens` does. Else there are these, for chunks as in `delta.delta_chunks`:

    pairs      where every channel forgets by itself: a few tokens and a head, pair by pair.
    prepare    a chunk and a head: what has nothing to do with the state. How much of each token's
               write the later ones see, the triangular system of that solved, and how much of the
               state is left at each token. All chunks at once.
    associate  a sequence, a head and a block of its values: over its chunks with the state in
               registers, in fp32. Nobody else reads or writes this part of the state.

The system is inverted by blocks, of one token, then two, four and so on: each of these is the
inverse of a part of the system, and as bounded as what the rule itself does. (A series of powers
would not be: where keys are alike, they grow before they vanish.)

Where a head forgets evenly, lengths and decays are factors of whole rows, and the products
take keys and queries as they come. Where every channel forgets by itself, `prepare` writes down
keys and queries with what is left of them.

Matrix products are as in `scanning`: with tf32 on the way off by half of what rounding the result
to bf16 would be, with bf16 by twice as much as that. The system is inverted in fp32. A token that
forgets more than e⁻²⁵ counts as that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import DeltaGates
from kvtide.layers.kernels import ssd_scan
from kvtide.layers.kernels.elementwise import sigmoid, softplus
from kvtide.layers.kernels.grid import MIN_ROWS, divided_up, power_of_two
from kvtide.layers.kernels.jit import program
from kvtide.layers.kernels.query_blocks import Spans, spans

CHUNK = 64
BLOCK = 16
"""Tokens of a chunk that are taken pair by pair where every channel forgets by itself."""
VALUES = 32
"""Of a head, that a program takes."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """By chunk and head, with c tokens in a chunk.

    inverse  (c, c): from what was missed to what is written, strengths included
    shares   (c, c): of what was written, in the results
    left     (3, c), where a head forgets evenly: of the state in keys' and in queries' products,
             and of what is written in the state at the end, lengths included; else (2, tokens,
             heads, b), products of keys and of queries with the keys of a block of b tokens
    kept     (keys) or (1): of the state before the chunk in that after it
    rows     where every channel forgets by itself, (3, tokens, heads, keys): keys, queries, and
             keys as they write, with what is left of them
    """

    inverse: Tensor
    shares: Tensor
    left: Tensor
    kept: Tensor
    rows: Tensor


def gated_delta(
    run: ForwardPass, place: Place, convolved: Tensor, forgetting: DeltaGates
) -> Tensor:
    """(tokens, heads, values) in fp32, of queries, keys and values side by side, from and to the
    running states."""
    batch = run.batch
    read, write = run.state_slots(place)
    states = run.step.view(place.pool.name, place.layer)["delta"][:, -1]
    heads, keys, values = states.shape[1:]
    mixed = torch.empty(
        (len(convolved), heads, values), dtype=torch.float32, device=convolved.device
    )
    key_heads = (convolved.shape[1] // keys - heads * values // keys) // 2
    block = max(MIN_ROWS, min(VALUES, power_of_two(values)))
    grid = (len(batch.rows), heads, divided_up(values, block))
    where = (mixed, states, batch.rows, read, write)
    shape = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEYS": keys,
        "VALUES": values,
        "EVEN": forgetting.dt.shape[1] == heads,
        "K": max(MIN_ROWS, power_of_two(keys)),
    }
    if batch.bounds.longest == 1:
        _associate_token[grid](
            *(*where, *states.stride()[:3], convolved, convolved.stride(0)),
            *_all_of(forgetting),
            **shape,
            V=block,
        )
        return mixed
    chunks = spans(run, CHUNK)
    exact = convolved.dtype is torch.float32
    done = _prepared(chunks, convolved, forgetting, shape | {"EXACT": exact})
    _associate_chunks[grid](
        *(*where, *states.stride()[:3], convolved, convolved.stride(0), len(convolved)),
        *(chunks.firsts, done.inverse, done.shares, done.left, done.kept, done.rows),
        **shape,
        T=CHUNK,
        V=block,
        EXACT=exact,
        WIDE=ssd_scan.WIDE,
        num_warps=4,
        num_stages=2 if convolved.itemsize == 2 else 1,
    )
    return mixed


def _all_of(forgetting: DeltaGates) -> tuple[Tensor | int, ...]:
    dt, strength = forgetting.dt, forgetting.strength
    return dt, dt.stride(0), forgetting.dt_bias, forgetting.decay, strength, strength.stride(0)


def _prepared(
    chunks: Spans, convolved: Tensor, forgetting: DeltaGates, shape: dict[str, int]
) -> Prepared:
    heads, keys, even = shape["HEADS"], shape["KEYS"], shape["EVEN"]
    count = len(chunks.table)

    def empty(*of: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(of, dtype=dtype, device=convolved.device)

    # None of it is larger than a few: of two bytes, those with more digits.
    kind = torch.float32 if shape["EXACT"] else torch.float16
    tokens = len(convolved)
    rows = (1,) if even else (3, tokens, heads, keys)
    left = (count, heads, 3, CHUNK) if even else (2, tokens, heads, BLOCK)
    done = Prepared(
        inverse=empty(count, heads, CHUNK, CHUNK, dtype=kind),
        shares=empty(count, heads, CHUNK, CHUNK, dtype=kind),
        left=empty(*left),
        kept=empty(count, heads, 1 if even else keys),
        rows=empty(*rows, dtype=kind),
    )
    if not even:
        given = _all_of(forgetting)[:4]
        _pairs[(count * CHUNK // BLOCK, heads)](
            *(convolved, convolved.stride(0), tokens, *given, chunks.table, done.left),
            **{name: shape[name] for name in ("HEADS", "GROUP", "KEYS", "K")},
            T=CHUNK,
            B=BLOCK,
            num_warps=4,
        )
    prepare = _prepare if even else _prepare_by_channel
    prepare[(count, heads)](
        *(convolved, convolved.stride(0), len(convolved), *_all_of(forgetting), chunks.table),
        *(done.inverse, done.shares, done.left, done.kept, done.rows),
        **shape,
        T=CHUNK,
        B=BLOCK,
        num_warps=4 if even else 8,
        num_stages=1,
    )
    return done


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(  # type: ignore[no-untyped-def]
    system,
    T: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Of the system with ones on its diagonal; what is given has zeros there and above.

    Of twice as many rows a time: [[A, 0], [B, C]] has [[A', 0], [-C' B A', C']].
    """
    row, column = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    solved = tl.where(row == column, 1.0, 0.0)
    solved -= tl.where((row // 2 == column // 2), system, 0.0)
    for level in tl.static_range(1, 6):
        if (2 << level) <= T:
            joins = (row >> level != column >> level) & (row >> level + 1 == column >> level + 1)
            part = tl.dot(tl.where(joins, system, 0.0), solved, input_precision=PRECISION)
            solved -= tl.dot(solved, part, input_precision=PRECISION)
    return solved


@triton.jit
def _length(x):  # type: ignore[no-untyped-def]
    """What makes rows as long as one."""
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _strength(strengths, strength_row, token, head, live):  # type: ignore[no-untyped-def]
    given = tl.load(strengths + token * strength_row + head, mask=live, other=0.0)
    return tl.where(live, sigmoid(given.to(tl.float32)), 0.0)


# fmt: off
@program("count")  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    convolved, row, count, dts, dt_row, biases, decays, strengths, strength_row, spans,
    inverses, shares, lefts, kepts, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr, K: tl.constexpr, T: tl.constexpr, B: tl.constexpr,  # noqa: N803
    EXACT: tl.constexpr,  # noqa: N803
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(spans + 3 * chunk + 1), tl.load(spans + 3 * chunk + 2)
    if first >= end:
        return
    step, key = tl.arange(0, T), tl.arange(0, K)
    token, live = (first + step).to(tl.int64), first + step < end
    inside = live[:, None] & (key < KEYS)[None, :]
    at = convolved + token[:, None] * row + (head // GROUP) * KEYS + key[None, :]
    q = tl.load(at, mask=inside, other=0.0)
    k = tl.load(at + HEADS // GROUP * KEYS, mask=inside, other=0.0)
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"  # noqa: N806
    SCALE: tl.constexpr = KEYS ** -0.5  # noqa: N806
    q_length = _length(q.to(tl.float32)) * SCALE
    k_length = _length(k.to(tl.float32))
    dt = tl.load(dts + token * dt_row + head, mask=live, other=0.0).to(tl.float32)
    logs = tl.load(decays + head) * softplus(dt + tl.load(biases + head))
    logs = tl.where(live, tl.maximum(logs, -25.0), 0.0)
    strength = _strength(strengths, strength_row, token, head, live)
    sums, total = tl.cumsum(logs), tl.sum(logs)
    between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * k_length[None, :]
    share = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * q_length[:, None]
    share = tl.where(step[:, None] >= step[None, :], share, 0.0)
    kind = shares.dtype.element_ty
    place = (chunk * HEADS + head).to(tl.int64)
    at = place * T * T + step[:, None] * T + step[None, :]
    tl.store(shares + at, share.to(kind))
    seen = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
    seen = tl.where(step[:, None] > step[None, :], seen * (strength * k_length)[:, None], 0.0)
    lefts += place * 3 * T + step
    tl.store(lefts, k_length * tl.exp(sums))
    tl.store(lefts + T, q_length * tl.exp(sums))
    tl.store(lefts + 2 * T, k_length * tl.exp(tl.minimum(total - sums, 0.0)))
    tl.store(kepts + place, tl.exp(total))
    inverse = _inverse(seen, T, PRECISION) * strength[None, :]
    tl.store(inverses + at, inverse.to(kind))


@triton.jit  # type: ignore[untyped-decorator]
def _forgetful(  # type: ignore[no-untyped-def]
    convolved, row, dts, dt_row, biases, decays, head, token, live,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    """Some tokens' queries and keys as long as they count, and the logarithms of decays."""
    key = tl.arange(0, K)
    inside = live[:, None] & (key < KEYS)[None, :]
    at = convolved + token[:, None] * row + (head // GROUP) * KEYS + key[None, :]
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(at + HEADS // GROUP * KEYS, mask=inside, other=0.0).to(tl.float32)
    at = token[:, None] * dt_row + head * KEYS + key[None, :]
    dt = tl.load(dts + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(biases + head * KEYS + key, mask=key < KEYS, other=0.0)
    logs = tl.load(decays + head) * softplus(dt + bias[None, :])
    logs = tl.where(inside, tl.maximum(logs, -25.0), 0.0)
    return q * (_length(q) * KEYS ** -0.5)[:, None], k * _length(k)[:, None], logs


@program("count")  # type: ignore[untyped-decorator]
def _pairs(  # type: ignore[no-untyped-def]
    convolved, row, count, dts, dt_row, biases, decays, spans, pairs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr,  # noqa: N803
    T: tl.constexpr, B: tl.constexpr,  # noqa: N803
):
    """Of a block, key by key: the products with it of later keys, and of queries from its own on,
    with what is left of it there."""
    chunk, head = tl.program_id(0) // (T // B), tl.program_id(1)
    first = tl.load(spans + 3 * chunk + 1) + tl.program_id(0) % (T // B) * B
    end = tl.load(spans + 3 * chunk + 2)
    if first >= end:
        return
    step, column = tl.arange(0, B), tl.arange(0, B)[None, :]
    token, live = (first + step).to(tl.int64), first + step < end
    q, k, logs = _forgetful(convolved, row, dts, dt_row, biases, decays, head, token, live,
                            HEADS, GROUP, KEYS, K)
    sums, until = tl.cumsum(logs, 0), tl.zeros([1, K], tl.float32)
    seen, share = tl.zeros([B, B], tl.float32), tl.zeros([B, B], tl.float32)
    for j in range(tl.minimum(end - first, B)):
        one = (first + j + tl.arange(0, 1)).to(tl.int64)
        _, other, more = _forgetful(convolved, row, dts, dt_row, biases, decays, head, one,
                                    one < end, HEADS, GROUP, KEYS, K)
        until += more
        other = other * tl.exp(tl.minimum(sums - until, 0.0))
        here = column == j
        seen = tl.where(here & (step > j)[:, None], tl.sum(k * other, 1)[:, None], seen)
        share = tl.where(here & (step >= j)[:, None], tl.sum(q * other, 1)[:, None], share)
    at = pairs + (token[:, None] * HEADS + head) * B + column
    there = live[:, None] & (column < B)
    tl.store(at, seen, mask=there)
    tl.store(at + count.to(tl.int64) * HEADS * B, share, mask=there)


@program("count")  # type: ignore[untyped-decorator]
def _prepare_by_channel(  # type: ignore[no-untyped-def]
    convolved, row, count, dts, dt_row, biases, decays, strengths, strength_row, spans,
    inverses, shares, lefts, kepts, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr, K: tl.constexpr, T: tl.constexpr, B: tl.constexpr,  # noqa: N803
    EXACT: tl.constexpr,  # noqa: N803
):
    """Block by block of a few tokens. Keys of earlier blocks are at hand with what is left of
    them where the block begins, so no exponent is positive."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(spans + 3 * chunk + 1), tl.load(spans + 3 * chunk + 2)
    if first >= end:
        return
    step, key, column = tl.arange(0, B), tl.arange(0, K), tl.arange(0, T)
    number, in_keys = tl.arange(0, T // B)[:, None, None], (key < KEYS)[None, :]
    place, size = (chunk * HEADS + head).to(tl.int64), count.to(tl.int64) * HEADS * KEYS
    kind = rows.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"  # noqa: N806
    earlier, system = tl.zeros([T // B, B, K], tl.float32), tl.zeros([T // B, B, T], tl.float32)
    past = tl.zeros([K], tl.float32)
    for block in range(tl.cdiv(tl.minimum(end - first, T), B)):
        begin = block * B
        token, live = (first + begin + step).to(tl.int64), first + begin + step < end
        q, k, logs = _forgetful(convolved, row, dts, dt_row, biases, decays, head, token, live,
                                HEADS, GROUP, KEYS, K)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
        left, old = tl.exp(sums), tl.trans(tl.reshape(earlier, [T, K]))
        seen = tl.dot(k * left, old, input_precision=PRECISION)
        share = tl.dot(q * left, old, input_precision=PRECISION)
        # Within the block, from `_pairs`.
        other = column - begin
        here = live[:, None] & ((other >= 0) & (other < B))[None, :]
        at = lefts + (token[:, None] * HEADS + head) * B + other[None, :]
        seen = tl.where(here, tl.load(at, mask=here, other=0.0), seen)
        at += count.to(tl.int64) * HEADS * B
        share = tl.where(here, tl.load(at, mask=here, other=0.0), share)
        at = shares + place * T * T + (begin + step)[:, None] * T + column[None, :]
        tl.store(at, share.to(kind))
        at = rows + (token[:, None] * HEADS + head) * KEYS + key[None, :]
        left *= tl.exp(past)[None, :]
        tl.store(at, (k * left).to(kind), mask=live[:, None] & in_keys)
        tl.store(at + size, (q * left).to(kind), mask=live[:, None] & in_keys)
        seen *= _strength(strengths, strength_row, token, head, live)[:, None]
        system = tl.where(number == block, seen[None, :, :], system)
        k *= tl.exp(tl.minimum(total[None, :] - sums, 0.0))
        earlier = tl.where(number == block, k[None, :, :], earlier * tl.exp(total)[None, None, :])
        past += total
    token, live = (first + column).to(tl.int64), first + column < end
    at = rows + 2 * size + (token[:, None] * HEADS + head) * KEYS + key[None, :]
    tl.store(at, tl.reshape(earlier, [T, K]).to(kind), mask=live[:, None] & in_keys)
    tl.store(kepts + place * KEYS + key, tl.exp(past), mask=key < KEYS)
    strength = _strength(strengths, strength_row, token, head, live)
    inverse = _inverse(tl.reshape(system, [T, T]), T, PRECISION) * strength[None, :]
    at = place * T * T + column[:, None] * T + column[None, :]
    tl.store(inverses + at, inverse.to(kind))


@program("spans", "count")  # type: ignore[untyped-decorator]
def _associate_chunks(  # type: ignore[no-untyped-def]
    mixed, states, spans, read, write, state_slot, state_head, state_key,
    convolved, row, count, firsts, inverses, shares, lefts, kepts, rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr, K: tl.constexpr, T: tl.constexpr, V: tl.constexpr,  # noqa: N803
    EXACT: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(spans + 3 * sequence), tl.load(spans + 3 * sequence + 1)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    step, key, value = tl.arange(0, T), tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    in_keys, in_values = (key < KEYS)[None, :], (value < VALUES)[None, :]
    inside = (key < KEYS)[:, None] & in_values
    at_state = head * state_head + key[:, None] * state_key + value[None, :]
    state = tl.load(states + source * state_slot + at_state, mask=inside & (source >= 0), other=0.0)
    state = state.to(tl.float32)
    place = (tl.load(firsts + sequence) * HEADS + head).to(tl.int64)
    values = convolved + 2 * (HEADS // GROUP) * KEYS + head * VALUES + value[None, :]
    keys = convolved + (head // GROUP) * KEYS + key[None, :]
    size = count.to(tl.int64) * HEADS * KEYS
    PRECISION: tl.constexpr = "tf32x3" if EXACT else "tf32"  # noqa: N806
    KIND: tl.constexpr = tl.float32 if WIDE else convolved.dtype.element_ty  # noqa: N806
    for first in range(start, end, T):
        token, live = (first + step).to(tl.int64)[:, None], (first + step < end)[:, None]
        if EVEN:
            query = keys + token * row
            at = query + HEADS // GROUP * KEYS
        else:
            at = rows + (token * HEADS + head) * KEYS + key[None, :]
            query = at + size
        rounded, left = state.to(KIND), lefts + place * 3 * T + step
        k = tl.load(at, mask=live & in_keys, other=0.0)
        missed = tl.dot(k.to(KIND), rounded, input_precision=PRECISION)
        if EVEN:
            missed *= tl.load(left)[:, None]
        v = tl.load(values + token * row, mask=live & in_values, other=0.0)
        missed = v.to(tl.float32) - missed
        within = place * T * T + step[:, None] * T + step[None, :]
        inverse = tl.load(inverses + within)
        written = tl.dot(inverse.to(KIND), missed.to(KIND), input_precision=PRECISION)
        q = tl.load(query, mask=live & in_keys, other=0.0)
        output = tl.dot(q.to(KIND), rounded, input_precision=PRECISION)
        if EVEN:
            output *= tl.load(left + T)[:, None]
        share = tl.load(shares + within, mask=live, other=0.0)
        output += tl.dot(share.to(KIND), written.to(KIND), input_precision=PRECISION)
        tl.store(mixed + (token * HEADS + head) * VALUES + value[None, :], output,
                 mask=live & in_values)
        if EVEN:
            written *= tl.load(left + 2 * T)[:, None]
            state *= tl.load(kepts + place)
        else:
            k = tl.load(at + 2 * size, mask=live & in_keys, other=0.0)
            state *= tl.load(kepts + place * KEYS + key, mask=key < KEYS, other=0.0)[:, None]
        state += tl.dot(tl.trans(k.to(KIND)), written.to(KIND), input_precision=PRECISION)
        place += HEADS
    tl.debug_barrier()
    at_state += target * state_slot
    tl.store(states + at_state, state.to(states.dtype.element_ty), mask=inside & (target >= 0))


@program("spans")  # type: ignore[untyped-decorator]
def _associate_token(  # type: ignore[no-untyped-def]
    mixed, states, spans, read, write, state_slot, state_head, state_key, convolved, row,
    dts, dt_row, biases, decays, strengths, strength_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,  # noqa: N803
    EVEN: tl.constexpr, K: tl.constexpr, V: tl.constexpr,  # noqa: N803
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(spans + 3 * sequence).to(tl.int64)
    source = tl.load(read + sequence).to(tl.int64)
    target = tl.load(write + sequence).to(tl.int64)
    key, value = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
    at_state = head * state_head + key[:, None] * state_key + value[None, :]
    state = tl.load(states + source * state_slot + at_state, mask=inside & (source >= 0), other=0.0)
    at = convolved + token * row + (head // GROUP) * KEYS + key
    q = tl.load(at, mask=key < KEYS, other=0.0).to(tl.float32)
    k = tl.load(at + HEADS // GROUP * KEYS, mask=key < KEYS, other=0.0).to(tl.float32)
    at = convolved + token * row + 2 * (HEADS // GROUP) * KEYS + head * VALUES + value
    v = tl.load(at, mask=value < VALUES, other=0.0).to(tl.float32)
    SCALE: tl.constexpr = KEYS ** -0.5  # noqa: N806
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * SCALE
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    each = head + key * 0 if EVEN else head * KEYS + key
    dt = tl.load(dts + token * dt_row + each, mask=key < KEYS, other=0.0).to(tl.float32)
    dt += tl.load(biases + each, mask=key < KEYS, other=0.0)
    strength = sigmoid(tl.load(strengths + token * strength_row + head).to(tl.float32))
    state = state.to(tl.float32) * tl.exp(tl.load(decays + head) * softplus(dt))[:, None]
    missed = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (missed * strength)[None, :]
    output = tl.sum(state * q[:, None], 0)
    at = mixed + (token * HEADS + head) * VALUES + value
    tl.store(at, output, mask=value < VALUES)
    tl.debug_barrier()
    at_state += target * state_slot
    tl.store(states + at_state, state.to(states.dtype.element_ty), mask=inside & (target >= 0))
# fmt: on
