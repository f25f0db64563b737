"""Blocks of new tokens: neighbouring rows of one sequence that one CTA takes together.

`_divide_rows`  grid (tiles of blocks,): the table of blocks, from the lengths in `Batch.rows`

The table is made on the device, since a CUDA graph is replayed with other sequences. It has room
for the most blocks there can be: blocks are in the order of their rows, and the rest of the table
has no sequence. Torch reference: none; its test has it in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels.grid import SEQUENCES_AT_ONCE, divided_up
from kvtide.layers.kernels.jit import kernel
from kvtide.layers.step import Batch

_BLOCKS_PER_CTA = 16
"""Rows of the table that a CTA fills."""


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """table         (blocks, 3) int32: sequence or -1, first row, end row
    first_blocks  (sequences,) int32: the index of each sequence's first block
    busy          the blocks if all rows were of one sequence: sizes of grids depend on this
    """

    table: Tensor
    first_blocks: Tensor
    busy: int


def query_blocks(
    run: ForwardPass, block_tokens: int, *, rows: tuple[int, int] | None = None
) -> QueryBlocks:
    """Blocks of up to `block_tokens` tokens, of these rows of the step, or of all."""
    return _blocks(run, block_tokens, rows, min_tokens=1)


def prefill_blocks(
    run: ForwardPass, block_tokens: int, *, rows: tuple[int, int] | None = None
) -> QueryBlocks:
    """The same, of sequences with several new tokens alone."""
    return _blocks(run, block_tokens, rows, min_tokens=2)


def _blocks(
    run: ForwardPass, block_tokens: int, rows: tuple[int, int] | None, min_tokens: int
) -> QueryBlocks:
    lo, hi = rows or (0, len(run.positions))
    key = ("query_blocks", block_tokens, lo, hi, min_tokens)
    return run.shared(key, lambda: _divide(run.batch, block_tokens, lo, hi, min_tokens))


def _divide(batch: Batch, block_tokens: int, lo: int, hi: int, min_tokens: int) -> QueryBlocks:
    sequences = len(batch.rows)
    # The last block of every sequence may be smaller.
    last_blocks = sequences if min_tokens == 1 else batch.bounds.prompts
    max_blocks = (hi - lo) // block_tokens + last_blocks
    table, first_blocks = batch.rows.new_empty((max_blocks, 3)), batch.rows.new_empty(sequences)
    _divide_rows[(divided_up(max_blocks, _BLOCKS_PER_CTA),)](
        *(batch.rows, table, first_blocks, sequences, max_blocks, lo, hi),
        MIN_TOKENS=min_tokens,
        BLOCK_TOKENS=block_tokens,
        BLOCK_SEQUENCES=SEQUENCES_AT_ONCE,
        BLOCK=_BLOCKS_PER_CTA,
    )
    return QueryBlocks(table, first_blocks, divided_up(hi - lo, block_tokens))


@triton.jit
def longest_first(index, count):  # type: ignore[no-untyped-def]
    """The block that CTA `index` takes: those with the longest context, the last ones, first."""
    return count - 1 - index


# fmt: off
@kernel("rows", "count", "max_blocks", "lo", "hi")  # type: ignore[untyped-decorator]
def _divide_rows(  # type: ignore[no-untyped-def]
    rows, table, first_blocks, count, max_blocks, lo, hi,
    MIN_TOKENS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, blocks_before = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.full([], 0, tl.int32)
    sequence, seq_offset = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK_SEQUENCES):
        offs = start + tl.arange(0, BLOCK_SEQUENCES)
        row_start = tl.load(rows + 3 * offs, mask=offs < count, other=0)
        row_end = tl.load(rows + 3 * offs + 1, mask=offs < count, other=0)
        new_tokens = tl.minimum(row_end, hi) - tl.maximum(row_start, lo)
        excluded = row_end - row_start < MIN_TOKENS
        seq_blocks = (tl.maximum(new_tokens, 0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        seq_blocks = tl.where(excluded, 0, seq_blocks)
        block_ends = blocks_before + tl.cumsum(seq_blocks, 0)
        writes = (offs < count) & (tl.program_id(0) == 0)
        tl.store(first_blocks + offs, block_ends - seq_blocks, mask=writes)
        earlier = (offs < count)[None, :] & (block_ends[None, :] <= block[:, None])
        sequence += tl.sum(earlier.to(tl.int32), 1)
        seq_offset += tl.sum(tl.where(earlier, seq_blocks[None, :], 0), 1)
        blocks_before += tl.sum(seq_blocks, 0)
    valid = (block < max_blocks) & (sequence < count)
    row_start = tl.load(rows + 3 * sequence, mask=valid, other=0)
    row_end = tl.load(rows + 3 * sequence + 1, mask=valid, other=0)
    block_start = tl.maximum(row_start, lo) + (block - seq_offset) * BLOCK_TOKENS
    tl.store(table + 3 * block, tl.where(valid, sequence, -1), mask=block < max_blocks)
    tl.store(table + 3 * block + 1, block_start, mask=block < max_blocks)
    row_end = tl.minimum(tl.minimum(row_end, hi), block_start + BLOCK_TOKENS)
    tl.store(table + 3 * block + 2, row_end, mask=block < max_blocks)
# fmt: on
