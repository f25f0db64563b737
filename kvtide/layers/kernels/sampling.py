"""Sampling: greedy argmax with log-sum-exp, and sampling from the top candidates of each row.

`_reduce_tile`  grid (rows, tiles of columns): argmax, maximum and sum of exponentials of a tile
`_reduce_row`   grid (rows,): the same of a row, from its tiles
`_sample_row`   grid (rows,): top-k, min-p and top-p over sorted candidates, then inverse CDF

Torch reference: `engine/sampler.py`, `_greedy` and `_sample_candidates`.
Surprising: `sample_candidates` returns -1 where candidates after the given ones could matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.kernels.grid import divided_up, power_of_two
from kvtide.layers.kernels.jit import kernel

TILE_COLUMNS = 4096
"""Columns of a row of logits that a CTA takes."""


def greedy(logits: Tensor, scales: Tensor | None = None) -> Tensor:
    """Of each row: its argmax (the first of equals), the maximum, and log Σ exp(scale · row).

    (rows, 3) in fp64. Scales are per row and not negative; without them they are 1.
    """
    rows, columns = logits.shape
    tiles = divided_up(columns, TILE_COLUMNS)
    partial = torch.empty((rows, tiles, 3), dtype=torch.float32, device=logits.device)
    result = torch.empty((rows, 3), dtype=torch.float64, device=logits.device)
    scale_input, scaled = (logits if scales is None else scales.float()), scales is not None
    _reduce_tile[(rows, tiles)](
        *(logits, scale_input, partial, columns, tiles, *logits.stride()),
        SCALED=scaled,
        BLOCK=TILE_COLUMNS,
    )
    block_tiles = power_of_two(tiles)
    _reduce_row[(rows,)](
        partial,
        scale_input,
        result,
        columns,
        tiles,
        SCALED=scaled,
        BLOCK_TILES=block_tiles,
        num_warps=1,
    )
    return result


def sample_candidates(values: Tensor, facts: Tensor, limits: Tensor) -> Tensor:
    """The index of each row's sampled candidate, (rows, 1), or -1 if the candidates do not decide.

    values  (rows, candidates): the highest logits in descending order, fewer than the vocabulary
    facts   what `greedy` gave with the same scales
    limits  (5, rows): scale, top_k, top_p, min_p and a uniform number, as `engine.sampler.Limits`
    """
    rows, count = values.shape
    places = torch.empty((rows, 1), dtype=torch.int64, device=values.device)
    _sample_row[(rows,)](
        *(values.contiguous(), facts, limits, places, rows),
        COUNT=count,
        BLOCK=power_of_two(count),
        num_warps=4,
    )
    return places


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _reduce_tile(  # type: ignore[no-untyped-def]
    logits, scales, partial, columns, tiles, stride_row, stride_column,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Maximum, sum of exponentials and argmax of one tile of a row."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * stride_row + column * stride_column
    x = tl.load(logits + offsets, mask=column < columns, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    token = tl.min(tl.where(x == maximum, column, columns - 1), 0)
    # A tile of -inf alone has no finite maximum; any finite value avoids a NaN.
    x -= tl.where(maximum == float("-inf"), 0.0, maximum)
    if SCALED:
        x *= tl.load(scales + row)
    partial += (row * tiles + tile) * 3
    tl.store(partial, maximum)
    tl.store(partial + 1, tl.sum(tl.exp(x), 0))
    tl.store(partial + 2, token.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_row(  # type: ignore[no-untyped-def]
    partial, scales, result, columns, tiles,
    SCALED: tl.constexpr, BLOCK_TILES: tl.constexpr,
):
    """Combines the tiles of a row."""
    row, tile = tl.program_id(0), tl.arange(0, BLOCK_TILES)
    mask = tile < tiles
    partial += row * tiles * 3 + tile * 3
    maxima = tl.load(partial, mask=mask, other=float("-inf"))
    sums = tl.load(partial + 1, mask=mask, other=0.0)
    tokens = tl.load(partial + 2, mask=mask, other=0.0).to(tl.int32)
    scale = tl.load(scales + row).to(tl.float32) if SCALED else 1.0
    maximum = tl.max(maxima, 0)
    token = tl.min(tl.where(maxima == maximum, tokens, columns - 1), 0)
    log_sum = tl.log(tl.sum(sums * tl.exp((maxima - maximum) * scale), 0))
    result += row * 3
    tl.store(result, token.to(tl.float64))
    tl.store(result + 1, maximum.to(tl.float64))
    tl.store(result + 2, maximum.to(tl.float64) * scale + log_sum.to(tl.float64))


@kernel("rows")  # type: ignore[untyped-decorator]
def _sample_row(  # type: ignore[no-untyped-def]
    logits, facts, limits, chosen, rows,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Samples one row; `beyond` says whether tokens after the candidates are allowed too."""
    row, candidate = tl.program_id(0), tl.arange(0, BLOCK)
    mask, limits = candidate < COUNT, limits + row
    scale, top_k = tl.load(limits), tl.load(limits + rows).to(tl.int32)
    top_p, min_p = tl.load(limits + 2 * rows), tl.load(limits + 3 * rows)
    uniform, total = tl.load(limits + 4 * rows), tl.load(facts + 3 * row + 2)
    logit = tl.load(logits + row * COUNT + candidate, mask=mask, other=float("-inf"))
    maximum = tl.max(logit, 0)
    total = tl.exp((total - maximum.to(tl.float64) * scale).to(tl.float32)).to(tl.float64)
    probability = tl.exp((logit - maximum) * scale.to(tl.float32)).to(tl.float64)
    last_k = tl.minimum(tl.maximum(top_k - 1, 0), COUNT - 1)
    threshold = tl.sum(tl.where(candidate == last_k, logit, 0.0), 0)
    allowed = mask & ((logit >= threshold) | (top_k == 0)) & (probability >= min_p)
    beyond = tl.sum(tl.where(allowed & (candidate == COUNT - 1), 1, 0), 0)
    probability = tl.where(allowed, probability, 0.0)
    cumulative = tl.cumsum(probability, 0)
    candidate_mass = tl.max(cumulative, 0)
    mass = tl.where(beyond > 0, total, candidate_mass)
    undecided = (beyond > 0) & ((top_k > 0) | (min_p > 0))
    allowed = mask & ((cumulative - probability < top_p * mass) | (candidate == 0))
    beyond = beyond * tl.sum(tl.where(allowed & (candidate == COUNT - 1), 1, 0), 0)
    target = uniform * tl.where(beyond > 0, mass, tl.max(tl.where(allowed, cumulative, 0.0), 0))
    undecided = undecided | ((beyond > 0) & ((top_p < 1.0) | (target >= candidate_mass)))
    index = tl.sum(tl.where(allowed & (cumulative <= target), 1, 0), 0)
    tl.store(chosen + row, tl.where(undecided, -1, tl.minimum(index, COUNT - 1)).to(tl.int64))
# fmt: on
