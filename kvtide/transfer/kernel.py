"""A device program that copies straight between device memory and pinned host memory.

Few persistent programs walk over the work: each takes a handful of chunks at a time, so that
enough bytes are on the link however small the rows are, and the rest of the device stays free for
the model. Chunks are listed once per kind of copy; a submission brings only the slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from kvtide.transfer.strided import Addresses, PieceTable, Strided

CHUNK_BYTES = 2048
CHUNKS_AT_ONCE = 16
PROGRAMS = 8
WARPS = 16


# Compiled once, and not for every number of pages.
@triton.jit(do_not_specialize=["chunk_count", "work_count"])  # type: ignore[untyped-decorator]
def _copy_chunks(  # type: ignore[no-untyped-def]
    chunks,  # int64 (n, 5): source, source stride, target, target stride, words
    source_index,
    target_index,
    chunk_count,
    work_count,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    column = tl.arange(0, WORDS)
    first = tl.program_id(0) * AT_ONCE
    for start in range(first, work_count, tl.num_programs(0) * AT_ONCE):
        work = start + tl.arange(0, AT_ONCE)
        live = work < work_count
        page = work // chunk_count
        chunk = chunks + (work % chunk_count) * 5
        here = tl.load(source_index + page, mask=live, other=0)
        there = tl.load(target_index + page, mask=live, other=0)
        source = tl.load(chunk, mask=live, other=0)
        source += here * tl.load(chunk + 1, mask=live, other=0)
        target = tl.load(chunk + 2, mask=live, other=0)
        target += there * tl.load(chunk + 3, mask=live, other=0)
        words = tl.load(chunk + 4, mask=live, other=0)
        source = tl.multiple_of(source, [ALIGN]).to(tl.pointer_type(WORD))
        target = tl.multiple_of(target, [ALIGN]).to(tl.pointer_type(WORD))
        mask = column[None, :] < words[:, None]
        data = tl.load(source[:, None] + column[None, :], mask=mask)
        tl.store(target[:, None] + column[None, :], data, mask=mask)


_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Kernel:
    """Copies on the current stream of `device`."""

    name = "kernel"

    def __init__(self, device: torch.device, programs: int = PROGRAMS) -> None:
        self._device = device
        self._programs = programs
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
        word = _WORDS[table.word_bytes]
        _copy_chunks[(self._programs,)](
            chunks,
            sources,
            targets,
            len(chunks),
            len(chunks) * len(sources),
            WORD=word,
            ALIGN=table.word_bytes,
            WORDS=CHUNK_BYTES // (word.primitive_bitwidth // 8),
            AT_ONCE=CHUNKS_AT_ONCE,
            num_warps=WARPS,
        )

    def _chunk_legs(self, table: PieceTable) -> list[torch.Tensor]:
        """The chunks of every leg, on the device; listed once per table."""
        chunks = self._chunks.get(table)
        if chunks is None:
            lists = [_chunk_list(table, a, b) for a, b in pairwise(table.legs)]
            chunks = self._chunks[table] = [self._on_device(one) for one in lists]
        return chunks

    def _on_device(self, array: Addresses) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _chunk_list(table: PieceTable, first: int, end: int) -> Addresses:
    """Some of the table's pieces cut into chunks: addresses and strides, and their words."""
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
