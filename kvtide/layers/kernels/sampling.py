"""Sampling: greedy argmax with log-sum-exp, and Gumbel-max over a row or its top candidates.

`_reduce_tile`        grid (rows, tiles of columns): argmax, maximum, sum of exponentials of a tile
`_reduce_row`         grid (rows,): the same of a row, from its tiles
`_sample_tile`        grid (rows, tiles of columns): argmax of scaled logits plus noise in a tile
`_sample_row`         grid (rows,): the same of a row, from its tiles
`_sample_candidates`  grid (rows,): top-k, min-p and top-p over sorted candidates, then Gumbel-max
`_mask_tile`          grid (masks, tiles of columns): -inf where a row's mask has no bit

Torch reference: `engine/sampling/sampler.py`, `_greedy`, `_sample_rows` and `_sample_candidates`;
`engine/grammar/token_mask.py`, `mask_logits`.
Surprising: `sample_candidates` returns -1 where candidates after the given ones could matter.
Noise is computed in fp64: in fp32 improbable tokens would share few values.
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
NOISE_COLUMNS = 1024
"""The same where it computes noise."""


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
        *(logits, scale_input, partial, columns, tiles, logits.stride()),
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


def sample_rows(logits: Tensor, columns: Tensor, ids: Tensor | None = None) -> Tensor:
    """The sampled column of each row, (rows,): the argmax of scaled logit plus noise.

    columns  (6, rows): how each row is sampled, as `engine.sampler.Limits`
    ids      which token a column is of; None if the column's own number
    """
    rows, width = logits.shape
    tiles = divided_up(width, NOISE_COLUMNS)
    partial = torch.empty((rows, tiles, 2), dtype=torch.float64, device=logits.device)
    result = torch.empty(rows, dtype=torch.int64, device=logits.device)
    id_input, given = (logits if ids is None else ids), ids is not None
    _sample_tile[(rows, tiles)](
        *(logits, columns, id_input, partial, rows, width, tiles, logits.stride()),
        IDS=given,
        BLOCK=NOISE_COLUMNS,
    )
    block_tiles = power_of_two(tiles)
    _sample_row[(rows,)](partial, result, width, tiles, BLOCK_TILES=block_tiles, num_warps=1)
    return result


def sample_candidates(values: Tensor, tokens: Tensor, facts: Tensor, columns: Tensor) -> Tensor:
    """The index of each row's sampled candidate, (rows, 1), or -1 if more tokens may be left over.

    values   (rows, candidates): the highest logits in descending order, fewer than the vocabulary
    tokens   of these logits
    facts    what `greedy` gave with the same scales
    columns  (6, rows): how each row is sampled, as `engine.sampler.Limits`
    """
    rows, count = values.shape
    sampled = torch.empty((rows, 1), dtype=torch.int64, device=values.device)
    _sample_candidates[(rows,)](
        *(values.contiguous(), tokens.contiguous(), facts, columns, sampled, rows),
        COUNT=count,
        BLOCK=power_of_two(count),
        num_warps=4,
    )
    return sampled


def mask_logits(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """-inf where a token's bit is 0, in place.

    words  (masks, words) int32: a bit per column, the lowest first
    rows   (masks,): the row of each mask
    """
    width = logits.shape[1]
    _mask_tile[(len(rows), divided_up(width, TILE_COLUMNS))](
        *(logits, words, rows, width, words.shape[1], logits.stride()),
        BLOCK=TILE_COLUMNS,
    )


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _reduce_tile(  # type: ignore[no-untyped-def]
    logits, scales, partial, columns, tiles, logits_strides,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Maximum, sum of exponentials and argmax of one tile of a row."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * logits_strides[0] + column * logits_strides[1]
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


@triton.jit
def _gumbel_noise(word, tokens):  # type: ignore[no-untyped-def]
    """-log(-log u) with 52 bits of splitmix64 of word and token as u."""
    hashed = (word.to(tl.int64).to(tl.uint64) << 11) + tokens.to(tl.uint64)
    hashed += 0x9E3779B97F4A7C15
    hashed = (hashed ^ (hashed >> 30)) * 0xBF58476D1CE4E5B9
    hashed = (hashed ^ (hashed >> 27)) * 0x94D049BB133111EB
    hashed = hashed ^ (hashed >> 31)
    uniform = ((hashed >> 12).to(tl.float64) + 0.5) * (1.0 / 4503599627370496)
    return -tl.log(-tl.log(uniform))


@kernel("rows")  # type: ignore[untyped-decorator]
def _sample_tile(  # type: ignore[no-untyped-def]
    logits, settings, ids, partial, rows, width, tiles, logits_strides,
    IDS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Maximum and argmax of scaled logits plus noise in one tile of a row."""
    row, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    mask, settings = column < width, settings + row
    scale, word = tl.load(settings), tl.load(settings + 4 * rows)
    cold = tl.load(settings + 5 * rows) > 0
    offsets = row.to(tl.int64) * logits_strides[0] + column * logits_strides[1]
    x = tl.load(logits + offsets, mask=mask, other=float("-inf")).to(tl.float64)
    token = tl.load(ids + column, mask=mask, other=0) if IDS else column
    x = tl.where(cold, x, x * scale + _gumbel_noise(word, token))
    maximum = tl.max(x, 0)
    best = tl.min(tl.where(x == maximum, column, width - 1), 0)
    partial += (row * tiles + tile) * 2
    tl.store(partial, maximum)
    tl.store(partial + 1, best.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _sample_row(  # type: ignore[no-untyped-def]
    partial, result, width, tiles,
    BLOCK_TILES: tl.constexpr,
):
    """Combines the tiles of a row."""
    row, tile = tl.program_id(0), tl.arange(0, BLOCK_TILES)
    mask = tile < tiles
    partial += (row * tiles + tile) * 2
    maxima = tl.load(partial, mask=mask, other=float("-inf"))
    columns = tl.load(partial + 1, mask=mask, other=0.0).to(tl.int64)
    best = tl.min(tl.where(mask & (maxima == tl.max(maxima, 0)), columns, width - 1), 0)
    tl.store(result + row, best)


@kernel("rows")  # type: ignore[untyped-decorator]
def _sample_candidates(  # type: ignore[no-untyped-def]
    logits, tokens, facts, settings, sampled, rows,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Samples one row; `beyond` says whether tokens after the candidates are allowed too."""
    row, candidate = tl.program_id(0), tl.arange(0, BLOCK)
    mask, settings = candidate < COUNT, settings + row
    scale, top_k = tl.load(settings), tl.load(settings + rows).to(tl.int32)
    top_p, min_p = tl.load(settings + 2 * rows), tl.load(settings + 3 * rows)
    word, total = tl.load(settings + 4 * rows), tl.load(facts + 3 * row + 2)
    logit = tl.load(logits + row * COUNT + candidate, mask=mask, other=float("-inf"))
    maximum = tl.max(logit, 0)
    total = tl.exp((total - maximum.to(tl.float64) * scale).to(tl.float32)).to(tl.float64)
    probability = tl.exp((logit - maximum) * scale.to(tl.float32)).to(tl.float64)
    last_k = tl.minimum(tl.maximum(top_k - 1, 0), COUNT - 1)
    threshold = tl.sum(tl.where(candidate == last_k, logit, 0.0), 0)
    allowed = mask & ((logit >= threshold) | (top_k == 0)) & (probability >= min_p)
    allowed &= logit > float("-inf")
    beyond = tl.sum(tl.where(allowed & (candidate == COUNT - 1), 1, 0), 0)
    probability = tl.where(allowed, probability, 0.0)
    cumulative = tl.cumsum(probability, 0)
    mass = tl.where(beyond > 0, total, tl.max(cumulative, 0))
    undecided = (beyond > 0) & ((top_k > 0) | (min_p > 0))
    allowed = (allowed & (cumulative - probability < top_p * mass)) | (candidate == 0)
    beyond = beyond * tl.sum(tl.where(allowed & (candidate == COUNT - 1), 1, 0), 0)
    token = tl.load(tokens + row * COUNT + candidate, mask=mask, other=0)
    score = logit.to(tl.float64) * scale + _gumbel_noise(word, token)
    score = tl.where(allowed, score, float("-inf"))
    index = tl.min(tl.where(score == tl.max(score, 0), candidate, COUNT - 1), 0)
    tl.store(sampled + row, tl.where(undecided | (beyond > 0), -1, index).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _mask_tile(  # type: ignore[no-untyped-def]
    logits, words, rows, width, word_count, logits_strides,
    BLOCK: tl.constexpr,
):
    """Rules out columns of one tile of a row."""
    number, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    word = tl.load(words + number * word_count + column // 32, mask=inside, other=0)
    ruled_out = inside & (((word >> (column % 32)) & 1) == 0)
    offsets = tl.load(rows + number) * logits_strides[0] + column * logits_strides[1]
    tl.store(logits + offsets, float("-inf"), mask=ruled_out)
# fmt: on
