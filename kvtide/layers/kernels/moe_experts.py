"""Mixture-of-experts layers: a grouped GEMM over all experts of this rank at once.

Torch reference: `layers/reference/moe_experts.py`, `mix_experts`. A pair is a token and one of its
experts. Pairs are sorted by expert (those of other ranks left out), and each expert's pairs are cut
into blocks of rows. A CTA multiplies one block by some columns of its expert's weight.

`_sort_pairs`       grid (experts,): pairs in order of expert, and their blocks
`_grouped_gemm`     grid (blocks * column tiles,): gate and up with the activation; then down, back
                    to the order of pairs
`_combine_experts`  grid (tokens, column tiles): the sum of a token's pairs by expert weight, in a
                    fixed order, so that results are deterministic

Surprising: the count of blocks is known on the device alone. The grid has room for the most there
can be, and CTAs without a block exit at once. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtide.layers.backend.kernel_args import ExpertActivation, ExpertStack, ExpertWeights, Routing
from kvtide.layers.kernels.elementwise import activated
from kvtide.layers.kernels.grid import divided_up, power_of_two, sm_count
from kvtide.layers.kernels.jit import kernel

CTAS_PER_SM = 2
"""CTAs per SM, at least: with fewer, CTAs take fewer columns."""
COUNTED = 4096
"""Pairs up to which blocks are dense; with more there may be gaps between experts."""
_PAIR_TILES = (64, 512, COUNTED)
"""Tile sizes of the sort: the first one that holds all pairs, or the last."""
_BLOCKS_PER_GROUP = 16
"""Blocks whose CTAs run together, so that they share a weight tile in L2."""
_GATHER_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """GEMM tile sizes (BLOCK_M, BLOCK_N of gate and up each, BLOCK_K), warps and pipeline stages.

    `described` tiles are loaded by TMA through tensor descriptors.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    described: bool = False

    def deep(self, inputs: int) -> Tiles:
        """With a depth that divides the inputs, if any does; TMA needs rows of 16-byte units."""
        fitting = (d for d in (self.depth, 64, 32) if d <= self.depth and inputs % d == 0)
        described = self.described and inputs % 8 == 0
        return replace(self, depth=next(fitting, 32), described=described)


_EXACT = Tiles(rows=16, columns=32, depth=32, warps=4, stages=2)
"""For fp32, which tensor cores do not take."""
_HALF = {
    8: Tiles(16, 64, 128, warps=4, stages=4),
    20: Tiles(32, 64, 128, warps=4, stages=3),
    56: Tiles(64, 128, 64, warps=8, stages=4, described=True),
}
"""By the rows per expert if all have equally many: few experts then need a second block, which
reads their weights twice."""
_MANY = Tiles(128, 128, 64, warps=8, stages=4, described=True)


@dataclass(frozen=True, slots=True)
class Arranged:
    """order   (pairs,): indices of this rank's pairs, sorted by expert
    blocks  (max blocks, 3): expert, first and end index into `order`; first = end for none
    """

    order: Tensor
    blocks: Tensor


def mix_experts(experts: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
    """Σ expert weight · expert(x) over this rank's experts; fp32 if ranks have yet to reduce."""
    x, k = x.contiguous(), routing.experts.shape[1]
    own, ranks = experts.group.own, experts.group.ranks
    # Shared experts take every token; they say nothing of the load of routed ones.
    pairs, count = len(x) * (k - experts.beside), len(own) * ranks.count - experts.beside
    tiles = tiles_for(pairs, count, x.dtype)
    arranged = arrange(routing.experts, own, tiles.rows)
    inner = project(x, experts.gate_up, arranged, tiles, k, experts.gating)
    given = project(inner, experts.down, arranged, tiles)
    return gather(given, routing, own, torch.float32 if ranks.count > 1 else x.dtype)


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """Tiles for so many pairs, assuming balanced experts."""
    if dtype == torch.float32:
        return _EXACT
    return next((tiles for rows, tiles in _HALF.items() if pairs <= rows * experts), _MANY)


def arrange(selected: Tensor, own: range, rows: int) -> Arranged:
    """Pairs sorted by expert (stable), and their blocks of so many rows."""
    pairs, count = selected.numel(), len(own)
    counted = pairs <= COUNTED
    tile = next((tile for tile in _PAIR_TILES if pairs <= tile), COUNTED)
    max_blocks = pairs // rows + (min(pairs, count) if counted else count)
    order = torch.empty(pairs, dtype=torch.int32, device=selected.device)
    blocks = torch.empty((max_blocks, 3), dtype=torch.int32, device=selected.device)
    _sort_pairs[(count,)](
        *(selected.contiguous(), order, blocks, own.start, pairs, max_blocks),
        COUNTED=counted,
        OWN=count,
        BINS=max(16, power_of_two(count)),
        BLOCK_M=rows,
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
    """The grouped GEMM of every block with its expert's weight.

    With a gating, x has a row per token, which `spread` pairs share, and results are in sorted
    order. Without, x is in sorted order, and results go back to the order of pairs.
    """
    gated = gating is not None and gating.gated
    outputs, inputs = stack.weight.shape[1] // (2 if gated else 1), stack.weight.shape[2]
    tiles, max_blocks = tiles.deep(inputs), len(arranged.blocks)
    columns = tiles.columns if gated else min(2 * tiles.columns, 256)
    blocks, ctas = min(max_blocks, len(arranged.order)), CTAS_PER_SM * sm_count(x.device)
    while columns > 32 and blocks * divided_up(outputs, columns) < ctas:
        columns //= 2
    out = x.new_empty((len(arranged.order), outputs))
    column_tiles = divided_up(outputs, columns)
    left, right = x, stack.weight
    if tiles.described:
        right = TensorDescriptor.from_tensor(stack.weight.flatten(0, 1), [columns, tiles.depth])
        if spread == 0:
            left = TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth])
    _grouped_gemm[(max_blocks * column_tiles,)](
        *(left, right, x if stack.bias is None else stack.bias, out),
        *(arranged.order, arranged.blocks, max_blocks),
        *((gating.limit or 0.0, gating.gain, gating.offset) if gating else (0.0, 1.0, 0.0)),
        INPUTS=inputs,
        OUTPUTS=outputs,
        PAIRS_PER_TOKEN=spread,
        GATED=gated,
        KIND="" if gating is None else gating.activation.__name__,
        LIMITED=gating is not None and gating.limit is not None,
        BIASED=stack.bias is not None,
        USE_DESCRIPTORS=tiles.described,
        COLUMN_TILES=column_tiles,
        GROUP=_BLOCKS_PER_GROUP,
        BLOCK_M=tiles.rows,
        BLOCK_N=columns,
        BLOCK_K=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def gather(given: Tensor, routing: Routing, own: range, dtype: torch.dtype) -> Tensor:
    """For every token the sum of its pairs by expert weight, without other ranks' pairs."""
    (tokens, k), width = routing.experts.shape, given.shape[1]
    out = given.new_empty((tokens, width), dtype=dtype)
    _combine_experts[(tokens, divided_up(width, _GATHER_COLUMNS))](
        *(given, routing.experts.contiguous(), routing.weights.contiguous(), out),
        *(own.start, own.stop),
        WIDTH=width,
        TOP_K=k,
        BLOCK_N=_GATHER_COLUMNS,
        num_warps=4,
    )
    return out


# fmt: off
@kernel("pairs", "max_blocks")  # type: ignore[untyped-decorator]
def _sort_pairs(  # type: ignore[no-untyped-def]
    selected, order, blocks, offset, pairs, max_blocks,
    COUNTED: tl.constexpr, OWN: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):
    """Sorts the pairs of one expert, and cuts them into blocks."""
    expert, lane = tl.program_id(0), tl.arange(0, TILE)
    earlier_count, own_count = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for first_pair in range(0, pairs, TILE):
        pair = first_pair + lane
        expert_of_pair = tl.load(selected + pair, mask=pair < pairs, other=-1).to(tl.int32) - offset
        is_earlier = (pair < pairs) & (expert_of_pair >= 0) & (expert_of_pair < expert)
        earlier_count += is_earlier.to(tl.int32)
        own_count += ((pair < pairs) & (expert_of_pair == expert)).to(tl.int32)
    start, count = tl.sum(earlier_count, 0), tl.sum(own_count, 0)
    placed = start
    for first_pair in range(0, pairs, TILE):
        pair = first_pair + lane
        expert_of_pair = tl.load(selected + pair, mask=pair < pairs, other=-1).to(tl.int32) - offset
        is_own = (pair < pairs) & (expert_of_pair == expert)
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + placed + rank - 1, pair, mask=is_own)
        placed += tl.max(rank, 0)
    if COUNTED:
        expert_of_pair = tl.load(selected + lane, mask=lane < pairs, other=-1).to(tl.int32) - offset
        inside = (lane < pairs) & (expert_of_pair >= 0) & (expert_of_pair < OWN)
        counts = tl.histogram(tl.where(inside, expert_of_pair, 0), BINS, mask=inside)
        earlier_blocks = tl.where(tl.arange(0, BINS) < expert, (counts + BLOCK_M - 1) // BLOCK_M, 0)
        first_block = tl.sum(earlier_blocks, 0)
        end_block = first_block + tl.cdiv(count, BLOCK_M)
    else:
        # An upper bound of the blocks of earlier experts, without counting them.
        first_block = start // BLOCK_M + expert
        end_block = (start + count) // BLOCK_M + expert + 1
    end_block = tl.where(expert == OWN - 1, max_blocks, end_block)
    for first_pair in range(first_block, end_block, 64):
        block = first_pair + tl.arange(0, 64)
        lo = tl.minimum(start + (block - first_block) * BLOCK_M, start + count)
        hi = tl.minimum(lo + BLOCK_M, start + count)
        record = blocks + 3 * block
        tl.store(record, lo * 0 + expert, mask=block < end_block)
        tl.store(record + 1, lo, mask=block < end_block)
        tl.store(record + 2, hi, mask=block < end_block)


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(  # type: ignore[no-untyped-def]
    matrix, first, rows, at,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, USE_DESCRIPTORS: tl.constexpr,
):
    """A tile of these rows; by TMA, of the rows that follow the first."""
    if USE_DESCRIPTORS:
        return matrix.load([first, at])
    else:
        column = at + tl.arange(0, BLOCK_K)
        where = matrix + rows[:, None].to(tl.int64) * WIDTH + column[None, :]
        if WIDTH % BLOCK_K == 0:
            return tl.load(where)
        else:
            return tl.load(where, mask=(column < WIDTH)[None, :], other=0.0)


@kernel("max_blocks")  # type: ignore[untyped-decorator]
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x, weights, biases, out, order, blocks, max_blocks, limit, gain, offset,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
    BIASED: tl.constexpr, USE_DESCRIPTORS: tl.constexpr, COLUMN_TILES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # CTAs of a group of blocks take the same columns, then the next ones (L2 reuse).
    cta = tl.program_id(0)
    first_block = cta // (GROUP * COLUMN_TILES) * GROUP
    group_blocks = tl.minimum(max_blocks - first_block, GROUP)
    index = cta % (GROUP * COLUMN_TILES)
    record = blocks + 3 * (first_block + index % group_blocks)
    expert, first, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if first >= end:
        return
    weight_rows: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    offs_m = first + tl.arange(0, BLOCK_M)
    # Rows and columns out of range repeat the last one, and are not stored.
    sorted_row = tl.minimum(offs_m, end - 1)
    pair = tl.load(order + sorted_row)
    x_row = pair // PAIRS_PER_TOKEN if PAIRS_PER_TOKEN > 0 else sorted_row
    first_column = index // group_blocks * BLOCK_N
    offs_n = first_column + tl.arange(0, BLOCK_N)
    weight_column, first_row = tl.minimum(offs_n, OUTPUTS - 1), expert * weight_rows
    acc, acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, INPUTS, BLOCK_K):
        x_tile = _load_tile(
            x, first, x_row, start_k, INPUTS, BLOCK_K, USE_DESCRIPTORS and PAIRS_PER_TOKEN == 0)
        w_tile = _load_tile(
            weights, first_row + first_column, first_row + weight_column, start_k, INPUTS, BLOCK_K,
            USE_DESCRIPTORS)
        acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
        if GATED:
            up_row = first_row + OUTPUTS
            w_tile = _load_tile(
                weights, up_row + first_column, up_row + weight_column, start_k, INPUTS, BLOCK_K,
                USE_DESCRIPTORS)
            acc_up = tl.dot(x_tile, w_tile.T, acc_up, input_precision="ieee")
    if BIASED:
        bias = biases + first_row + weight_column
        acc += tl.load(bias).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + OUTPUTS).to(tl.float32)[None, :]
    if LIMITED:
        acc = tl.minimum(acc, limit)
        acc_up = tl.minimum(tl.maximum(acc_up, -limit), limit)
    if KIND != "":
        acc = activated(acc, gain, KIND)
        if GATED:
            acc *= acc_up + offset
    out_row = offs_m if PAIRS_PER_TOKEN > 0 else pair
    offsets = out_row[:, None].to(tl.int64) * OUTPUTS + offs_n[None, :]
    mask = (offs_m < end)[:, None] & (offs_n < OUTPUTS)[None, :]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_experts(  # type: ignore[no-untyped-def]
    expert_out, selected, expert_weights, out, start, stop,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < WIDTH
    acc = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(selected + pair)
        is_own = (expert >= start) & (expert < stop)
        weight = tl.load(expert_weights + pair).to(tl.float32)
        value = tl.load(expert_out + pair * WIDTH + column, mask=mask & is_own, other=0.0)
        acc += tl.where(is_own, weight, 0.0) * value.to(tl.float32)
    tl.store(out + token * WIDTH + column, acc.to(out.dtype.element_ty), mask=mask)
# fmt: on
