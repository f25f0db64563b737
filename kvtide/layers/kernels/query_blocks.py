"""Spans: neighbouring new tokens of one sequence, so many that one program takes them.

Which there are is worked out on the device from `Batch.rows`: a recorded step is played with other
sequences. The table has room for as many as there can be. They stand in the order of their rows,
and what is left of the room has no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers.forward import ForwardPass
from kvtide.layers.kernels.grid import SEQUENCES_AT_ONCE, divided_up
from kvtide.layers.kernels.jit import program
from kvtide.layers.step import Batch

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Spans:
    """table   (spans, 3) int32: sequence or -1, first row, end row
    firsts  (sequences,) int32: the number of each sequence's first span
    busy    as many as there would be of one sequence: by this, work is divided
    """

    table: Tensor
    firsts: Tensor
    busy: int


def spans(
    run: ForwardPass, tokens: int, *, within: tuple[int, int] | None = None, singles: bool = True
) -> Spans:
    """Of up to so many tokens; of those rows of the step, or all; of sequences with one token too,
    or not."""
    low, high = within or (0, len(run.positions))
    key = ("spans", tokens, low, high, singles)
    return run.shared(key, lambda: _cut(run.batch, tokens, low, high, singles))


def _cut(batch: Batch, tokens: int, low: int, high: int, singles: bool) -> Spans:
    count = len(batch.rows)
    # The last one of every sequence may be smaller.
    most = (high - low) // tokens + (count if singles else batch.bounds.prompts)
    table, firsts = batch.rows.new_empty((most, 3)), batch.rows.new_empty(count)
    _cut_rows[(divided_up(most, _AT_ONCE),)](
        *(batch.rows, table, firsts, count, most, low, high),
        LEAST=1 if singles else 2,
        TOKENS=tokens,
        SEQUENCES=SEQUENCES_AT_ONCE,
        B=_AT_ONCE,
    )
    return Spans(table, firsts, divided_up(high - low, tokens))


@triton.jit
def backwards(number, count):  # type: ignore[no-untyped-def]
    """Which span a program takes, so that those with the most to see come first: of a prompt, the
    last ones."""
    return count - 1 - number


# fmt: off
@program("rows", "count", "most", "low", "high")  # type: ignore[untyped-decorator]
def _cut_rows(  # type: ignore[no-untyped-def]
    rows, table, firsts, count, most, low, high,
    LEAST: tl.constexpr, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr,
    B: tl.constexpr,
):
    place, total = tl.program_id(0) * B + tl.arange(0, B), tl.full([], 0, tl.int32)
    sequence, before = tl.zeros([B], tl.int32), tl.zeros([B], tl.int32)
    for at in range(0, count, SEQUENCES):
        number = at + tl.arange(0, SEQUENCES)
        start = tl.load(rows + 3 * number, mask=number < count, other=0)
        end = tl.load(rows + 3 * number + 1, mask=number < count, other=0)
        inside = tl.minimum(end, high) - tl.maximum(start, low)
        spans = tl.where(end - start < LEAST, 0, (tl.maximum(inside, 0) + TOKENS - 1) // TOKENS)
        ends = total + tl.cumsum(spans, 0)
        tl.store(firsts + number, ends - spans, mask=(number < count) & (tl.program_id(0) == 0))
        done = (number < count)[None, :] & (ends[None, :] <= place[:, None])
        sequence += tl.sum(done.to(tl.int32), 1)
        before += tl.sum(tl.where(done, spans[None, :], 0), 1)
        total += tl.sum(spans, 0)
    there = (place < most) & (sequence < count)
    start = tl.load(rows + 3 * sequence, mask=there, other=0)
    end = tl.load(rows + 3 * sequence + 1, mask=there, other=0)
    first = tl.maximum(start, low) + (place - before) * TOKENS
    tl.store(table + 3 * place, tl.where(there, sequence, -1), mask=place < most)
    tl.store(table + 3 * place + 1, first, mask=place < most)
    end = tl.minimum(tl.minimum(end, high), first + TOKENS)
    tl.store(table + 3 * place + 2, end, mask=place < most)
# fmt: on
