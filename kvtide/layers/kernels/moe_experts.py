"""Mixtures of experts as device programs: what `Crew.mix` gives, for all experts at once.

A pair is a token and one of its experts. Pairs are put in order by expert, those of experts that
other ranks have left out, and every expert's pairs are cut into blocks of a few rows. A program
multiplies one block by some columns of its expert's weight. How many blocks there are is known
on the device alone, so there are programs for the most that could be, and the others end at once.

    arrange      pairs in order, and their blocks
    project      gate and up, with the gating; then down, back to where the pairs stood
    gather       a token's pairs by their shares, one after another: no order is left to chance

Nothing waits for the device and nothing depends on what tensors hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtide.layers.kernel_args import ExpertActivation, ExpertStack, ExpertWeights, Routing
from kvtide.layers.kernels.elementwise import activated
from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import program

PROGRAMS = 264
"""As many keep a large device busy: where there are fewer, each takes fewer columns."""
COUNTED = 4096
"""Up to so many pairs, blocks lie one after another; with more there may be gaps."""
_LOOKED_AT = (64, 512, COUNTED)
"""Pairs that are looked at together, if there are no more."""
_GROUP = 16
"""Blocks that are taken together, so that a weight is read once for all of them."""
_SUMMED = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a program takes: rows of a block, columns of the weight (of gate and up each), and how
    much of a row at a time, so many of them on their way. `described` tiles the device fetches by
    their numbers, and no thread reckons where they lie."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    described: bool = False

    def deep(self, inputs: int) -> Tiles:
        """As deep as divides the inputs, if anything does; rows are described whose bytes are a
        multiple of 16."""
        fitting = (d for d in (self.depth, 64, 32) if d <= self.depth and inputs % d == 0)
        described = self.described and inputs % 8 == 0
        return replace(self, depth=next(fitting, 32), described=described)


_EXACT = Tiles(rows=16, columns=32, depth=32, warps=4, stages=2)
"""Of fp32, whose products no matrix unit takes."""
_HALF = {
    8: Tiles(16, 64, 128, warps=4, stages=4),
    20: Tiles(32, 64, 128, warps=4, stages=3),
    48: Tiles(64, 64, 64, warps=4, stages=4, described=True),
}
"""By the most rows that an expert has if all have the same. Few have more than a block then, and
would have their weights read twice."""
_MANY = Tiles(128, 128, 64, warps=8, stages=4, described=True)


@dataclass(frozen=True, slots=True)
class Arranged:
    """order   (pairs,) of this rank: the numbers of those in it, by expert
    blocks  (most, 3): expert, first and end place in `order`; first = end where there is none
    """

    order: Tensor
    blocks: Tensor


def mix_experts(experts: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
    """Σ share · expert(x) over this rank's experts; in fp32 where ranks have still to add up."""
    x, k = x.contiguous(), routing.experts.shape[1]
    own, ranks = experts.group.own, experts.group.ranks
    # Those that every token goes to say nothing of how often the others are chosen.
    pairs, count = len(x) * (k - experts.beside), len(own) * ranks.count - experts.beside
    tiles = tiles_for(pairs, count, x.dtype)
    arranged = arrange(routing.experts, own, tiles.rows)
    inner = project(x, experts.gate_up, arranged, tiles, k, experts.gating)
    given = project(inner, experts.down, arranged, tiles)
    return gather(given, routing, own, torch.float32 if ranks.count > 1 else x.dtype)


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """What suits so many pairs, if experts are chosen about equally often."""
    if dtype == torch.float32:
        return _EXACT
    return next((tiles for rows, tiles in _HALF.items() if pairs <= rows * experts), _MANY)


def arrange(chosen: Tensor, own: range, rows: int) -> Arranged:
    """Pairs by expert, of equals the first one first, and their blocks of so many rows."""
    pairs, count = chosen.numel(), len(own)
    counted = pairs <= COUNTED
    tile = next((tile for tile in _LOOKED_AT if pairs <= tile), COUNTED)
    most = pairs // rows + (min(pairs, count) if counted else count)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    blocks = torch.empty((most, 3), dtype=torch.int32, device=chosen.device)
    _arrange[(count,)](
        *(chosen.contiguous(), order, blocks, own.start, pairs, most),
        COUNTED=counted,
        OWN=count,
        BINS=max(16, power_of_two(count)),
        M=rows,
        TILE=tile,
        num_warps=4 if tile < COUNTED else 8,
    )
    return Arranged(order, blocks)


def project(
    x: Tensor,
    stack: ExpertWeights,
    arranged: Arranged,
    tiles: Tiles,
    spread: int = 0,
    gating: ExpertActivation | None = None,
) -> Tensor:
    """Every block by its expert.

    With a gating, x has a row for each token, which is `spread` over so many pairs, and results
    stand in the order of the blocks. Without, x stands so, and results are put back to their pairs.
    """
    gated = gating is not None and gating.gated
    outputs, inputs = stack.weight.shape[1] // (2 if gated else 1), stack.weight.shape[2]
    tiles, most = tiles.deep(inputs), len(arranged.blocks)
    columns = tiles.columns if gated else min(2 * tiles.columns, 256)
    while columns > 32 and min(most, len(arranged.order)) * divided_up(outputs, columns) < PROGRAMS:
        columns //= 2
    out = x.new_empty((len(arranged.order), outputs))
    across = divided_up(outputs, columns)
    left, right = x, stack.weight
    if tiles.described:
        right = TensorDescriptor.from_tensor(stack.weight.flatten(0, 1), [columns, tiles.depth])
        if spread == 0:
            left = TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth])
    _project[(most * across,)](
        *(left, right, x if stack.bias is None else stack.bias, out),
        *(arranged.order, arranged.blocks, most),
        *((gating.limit or 0.0, gating.gain, gating.offset) if gating else (0.0, 1.0, 0.0)),
        INPUTS=inputs,
        OUTPUTS=outputs,
        SPREAD=spread,
        GATED=gated,
        KIND="" if gating is None else gating.activation.__name__,
        LIMITED=gating is not None and gating.limit is not None,
        BIASED=stack.bias is not None,
        DESCRIBED=tiles.described,
        ACROSS=across,
        GROUP=_GROUP,
        M=tiles.rows,
        N=columns,
        K=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def gather(given: Tensor, routing: Routing, own: range, dtype: torch.dtype) -> Tensor:
    """For every token the sum of its pairs by their shares; of other ranks' pairs nothing."""
    (tokens, k), width = routing.experts.shape, given.shape[1]
    out = given.new_empty((tokens, width), dtype=dtype)
    _gather[(tokens, divided_up(width, _SUMMED))](
        *(given, routing.experts.contiguous(), routing.weights.contiguous(), out),
        *(own.start, own.stop),
        WIDTH=width,
        COUNT=k,
        N=_SUMMED,
        num_warps=4,
    )
    return out


# fmt: off
@program("pairs", "most")  # type: ignore[untyped-decorator]
def _arrange(  # type: ignore[no-untyped-def]
    chosen, order, blocks, offset, pairs, most,
    COUNTED: tl.constexpr, OWN: tl.constexpr, BINS: tl.constexpr,  # noqa: N803
    M: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):
    """One expert: where its pairs begin, which they are, and its blocks."""
    expert, lane = tl.program_id(0), tl.arange(0, TILE)
    before, ours = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for at in range(0, pairs, TILE):
        number = at + lane
        one = tl.load(chosen + number, mask=number < pairs, other=-1).to(tl.int32) - offset
        before += ((number < pairs) & (one >= 0) & (one < expert)).to(tl.int32)
        ours += ((number < pairs) & (one == expert)).to(tl.int32)
    start, count = tl.sum(before, 0), tl.sum(ours, 0)
    placed = start
    for at in range(0, pairs, TILE):
        number = at + lane
        one = tl.load(chosen + number, mask=number < pairs, other=-1).to(tl.int32) - offset
        mine = (number < pairs) & (one == expert)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + placed + rank - 1, number, mask=mine)
        placed += tl.max(rank, 0)
    if COUNTED:
        one = tl.load(chosen + lane, mask=lane < pairs, other=-1).to(tl.int32) - offset
        inside = (lane < pairs) & (one >= 0) & (one < OWN)
        counts = tl.histogram(tl.where(inside, one, 0), BINS, mask=inside)
        earlier = tl.where(tl.arange(0, BINS) < expert, (counts + M - 1) // M, 0)
        first = tl.sum(earlier, 0)
        past = first + tl.cdiv(count, M)
    else:
        # Never fewer than an expert needs, whatever the others have.
        first = start // M + expert
        past = (start + count) // M + expert + 1
    past = tl.where(expert == OWN - 1, most, past)
    for at in range(first, past, 64):
        block = at + tl.arange(0, 64)
        low = tl.minimum(start + (block - first) * M, start + count)
        high = tl.minimum(low + M, start + count)
        entry = blocks + 3 * block
        tl.store(entry, low * 0 + expert, mask=block < past)
        tl.store(entry + 1, low, mask=block < past)
        tl.store(entry + 2, high, mask=block < past)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    matrix, first, rows, at,
    WIDTH: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr,  # noqa: N803
):
    """Some columns of these rows; where it is described, of those that follow the first."""
    if DESCRIBED:
        return matrix.load([first, at])
    else:
        column = at + tl.arange(0, K)
        where = matrix + rows[:, None].to(tl.int64) * WIDTH + column[None, :]
        if WIDTH % K == 0:
            return tl.load(where)
        else:
            return tl.load(where, mask=(column < WIDTH)[None, :], other=0.0)


@program("most")  # type: ignore[untyped-decorator]
def _project(  # type: ignore[no-untyped-def]
    x, weights, biases, out, order, blocks, most, limit, gain, plus,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SPREAD: tl.constexpr,  # noqa: N803
    GATED: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,  # noqa: N803
    BIASED: tl.constexpr, DESCRIBED: tl.constexpr, ACROSS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    # Of a group of blocks all take the same columns before the next ones.
    program = tl.program_id(0)
    origin = program // (GROUP * ACROSS) * GROUP
    among = tl.minimum(most - origin, GROUP)
    within = program % (GROUP * ACROSS)
    entry = blocks + 3 * (origin + within % among)
    expert, first, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if first >= end:
        return
    height: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    row = first + tl.arange(0, M)
    # Rows and columns too many do what the last one does, and are not kept.
    place = tl.minimum(row, end - 1)
    pair = tl.load(order + place)
    source = pair // SPREAD if SPREAD > 0 else place
    begin = within // among * N
    column = begin + tl.arange(0, N)
    taken, top = tl.minimum(column, OUTPUTS - 1), expert * height
    sums, ups = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for at in range(0, INPUTS, K):
        given = _tile(x, first, source, at, INPUTS, K, DESCRIBED and SPREAD == 0)
        weight = _tile(weights, top + begin, top + taken, at, INPUTS, K, DESCRIBED)
        sums = tl.dot(given, weight.T, sums, input_precision="ieee")
        if GATED:
            below = top + OUTPUTS
            weight = _tile(weights, below + begin, below + taken, at, INPUTS, K, DESCRIBED)
            ups = tl.dot(given, weight.T, ups, input_precision="ieee")
    if BIASED:
        bias = biases + top + taken
        sums += tl.load(bias).to(tl.float32)[None, :]
        if GATED:
            ups += tl.load(bias + OUTPUTS).to(tl.float32)[None, :]
    if LIMITED:
        sums = tl.minimum(sums, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit)
    if KIND != "":
        sums = activated(sums, gain, KIND)
        if GATED:
            sums *= ups + plus
    target = row if SPREAD > 0 else pair
    where = target[:, None].to(tl.int64) * OUTPUTS + column[None, :]
    kept = (row < end)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(out + where, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    given, chosen, shares, out, start, stop,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < WIDTH
    sums = tl.zeros([N], tl.float32)
    for number in tl.static_range(COUNT):
        pair = token * COUNT + number
        expert = tl.load(chosen + pair)
        ours = (expert >= start) & (expert < stop)
        share = tl.load(shares + pair).to(tl.float32)
        value = tl.load(given + pair * WIDTH + column, mask=inside & ours, other=0.0)
        sums += tl.where(ours, share, 0.0) * value.to(tl.float32)
    tl.store(out + token * WIDTH + column, sums.to(out.dtype.element_ty), mask=inside)
# fmt: on
