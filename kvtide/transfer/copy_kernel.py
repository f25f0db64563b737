"""A copy kernel between device memory and pinned host memory.

`_copy_chunks`  grid (CTAS,): few persistent CTAs walk over chunks of pages. A CTA copies several
chunks at a time, so that enough bytes are in flight on the link however small rows are. The other
SMs stay free for the model, so the grid does not depend on the SM count.
`_copy_page`    the same for one page, whose slots are arguments

The chunk list of a kind of copy is made once; a submission brings only slots.
Reference: `strided.Reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtide.transfer.strided import Addresses, PieceTable, Strided

CHUNK_BYTES = 2048
CHUNKS_AT_ONCE = 16
CTAS = 8
"""CTAs that saturate the link."""
WARPS = 16
# Counts and slots are not specialized on: one compilation serves any number of pages.
_ANY_COUNTS = ["chunk_count", "work_count"]
_ANY_SLOTS = ["source_slot", "target_slot", "chunk_count"]


@triton.jit(do_not_specialize=_ANY_COUNTS)  # type: ignore[untyped-decorator]
def _copy_chunks(  # type: ignore[no-untyped-def]
    chunks,  # int64 (n, 5): source, source stride, target, target stride, words
    source_index,
    target_index,
    chunk_count,
    work_count,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    column = tl.arange(0, WORDS)
    first = tl.program_id(0) * BLOCK_CHUNKS
    for start in range(first, work_count, tl.num_programs(0) * BLOCK_CHUNKS):
        work = start + tl.arange(0, BLOCK_CHUNKS)
        valid = work < work_count
        page = work // chunk_count
        chunk = chunks + (work % chunk_count) * 5
        source_slot = tl.load(source_index + page, mask=valid, other=0)
        target_slot = tl.load(target_index + page, mask=valid, other=0)
        _copy_rows(chunk, source_slot, target_slot, valid, column, WORD, ALIGN)


@triton.jit(do_not_specialize=_ANY_SLOTS)  # type: ignore[untyped-decorator]
def _copy_page(  # type: ignore[no-untyped-def]
    chunks,
    source_slot,
    target_slot,
    chunk_count,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    column = tl.arange(0, WORDS)
    first = tl.program_id(0) * BLOCK_CHUNKS
    for start in range(first, chunk_count, tl.num_programs(0) * BLOCK_CHUNKS):
        work = start + tl.arange(0, BLOCK_CHUNKS)
        valid = work < chunk_count
        _copy_rows(chunks + work * 5, source_slot, target_slot, valid, column, WORD, ALIGN)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    chunk, source_slot, target_slot, valid, column, WORD: tl.constexpr, ALIGN: tl.constexpr
):
    """Several chunks of `chunks`, each at its slot."""
    source = tl.load(chunk, mask=valid, other=0)
    source += source_slot * tl.load(chunk + 1, mask=valid, other=0)
    target = tl.load(chunk + 2, mask=valid, other=0)
    target += target_slot * tl.load(chunk + 3, mask=valid, other=0)
    words = tl.load(chunk + 4, mask=valid, other=0)
    source = tl.multiple_of(source, [ALIGN]).to(tl.pointer_type(WORD))
    target = tl.multiple_of(target, [ALIGN]).to(tl.pointer_type(WORD))
    mask = column[None, :] < words[:, None]
    data = tl.load(source[:, None] + column[None, :], mask=mask)
    tl.store(target[:, None] + column[None, :], data, mask=mask)


_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Kernel:
    """Copies on the current stream of `device`."""

    name = "kernel"

    def __init__(self, device: torch.device, ctas: int = CTAS) -> None:
        self._device = device
        self._ctas = ctas
        self._chunks: dict[PieceTable, list[torch.Tensor]] = {}

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        prepared = [
            (
                work.table,
                self._chunk_legs(work.table),
                self._on_device(work.source_index),
                self._on_device(work.target_index),
            )
            for work in works
        ]
        for leg in range(legs):
            for table, chunks, sources, targets in prepared:
                self._launch(table, chunks[leg], sources, targets)
            yield

    def _launch(
        self,
        table: PieceTable,
        chunks: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        if not len(chunks) or not len(sources):
            return
        _copy_chunks[(self._ctas,)](
            *(chunks, sources, targets, len(chunks), len(chunks) * len(sources)),
            **_constants(table),
        )

    def _chunk_legs(self, table: PieceTable) -> list[torch.Tensor]:
        """The chunks of every leg, on the device; made once per table."""
        chunks = self._chunks.get(table)
        if chunks is None:
            lists = [_chunk_list(table, a, b) for a, b in pairwise(table.legs)]
            chunks = self._chunks[table] = [self._on_device(one) for one in lists]
        return chunks

    def _on_device(self, array: Addresses) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def page_copy(table: PieceTable, device: torch.device) -> Callable[[int, int], None]:
    """Copies single pages by this table, from a slot to a slot, on the current stream.

    A copy brings two numbers: nothing of it goes through a copy engine, where it would wait for the
    copies of others.
    """
    chunks = torch.from_numpy(_chunk_list(table, 0, len(table))).to(device)

    def copy(source_slot: int, target_slot: int) -> None:
        if len(chunks):
            _copy_page[(CTAS,)](chunks, source_slot, target_slot, len(chunks), **_constants(table))

    return copy


def _constants(table: PieceTable) -> dict[str, Any]:
    """Compile-time constants of the kernels."""
    word = _WORDS[table.word_bytes]
    return {
        "WORD": word,
        "ALIGN": table.word_bytes,
        "WORDS": CHUNK_BYTES // (word.primitive_bitwidth // 8),
        "BLOCK_CHUNKS": CHUNKS_AT_ONCE,
        "num_warps": WARPS,
    }


def _chunk_list(table: PieceTable, first: int, end: int) -> Addresses:
    """Pieces [first, end) of the table as chunks: addresses, strides, and counts of words."""
    word_bytes = _WORDS[table.word_bytes].primitive_bitwidth // 8
    counts = -(-table.bytes[first:end] // CHUNK_BYTES)
    piece = np.repeat(np.arange(first, end), counts)
    offset = (np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
    size = np.minimum(CHUNK_BYTES, table.bytes[piece] - offset)
    return np.stack(
        [
            table.source[piece] + offset,
            table.source_stride[piece],
            table.target[piece] + offset,
            table.target_stride[piece],
            size // word_bytes,
        ],
        axis=1,
    )
