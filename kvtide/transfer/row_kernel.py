"""A kernel that copies rows from addresses to addresses, however short they are.

`_copy_rows`  grid (CTAS,): a CTA copies several rows at a time, 2 KB of each, so that enough bytes
are in flight on the link. Rows of one length should be neighbours in the list.

Torch reference: `peer.cpu_copies.copies`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvtide.transfer.strided import Addresses

STEP_BYTES = 2048
ROWS_AT_ONCE = 16
CTAS = 8
"""CTAs that saturate the link."""
WARPS = 16
LIST_ROWS = 1 << 14
"""Rows of one launch, at the most."""


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    rows,  # int64 (3, LIST): sources, targets, words
    row_count,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    column = tl.arange(0, WORDS)
    first = tl.program_id(0) * BLOCK_ROWS
    for start in range(first, row_count, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        valid = row < row_count
        source = tl.multiple_of(tl.load(rows + row, mask=valid, other=0), [ALIGN])
        target = tl.multiple_of(tl.load(rows + LIST + row, mask=valid, other=0), [ALIGN])
        words = tl.load(rows + 2 * LIST + row, mask=valid, other=0)
        source = source.to(tl.pointer_type(WORD))
        target = target.to(tl.pointer_type(WORD))
        for offset in range(0, tl.max(words, 0).to(tl.int32), WORDS):
            mask = offset + column[None, :] < words[:, None]
            data = tl.load(source[:, None] + offset + column[None, :], mask=mask)
            tl.store(target[:, None] + offset + column[None, :], data, mask=mask)


_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class _RowList(NamedTuple):
    """A list in pinned memory and its copy on the device; free when the event has passed."""

    host: torch.Tensor
    device: torch.Tensor
    done: torch.cuda.Event | None


class RowKernel:
    """Launches on the current stream of `device`, and never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lists: deque[_RowList] = deque()

    def warm_up(self) -> None:
        """Compile for the alignments that pages have, so that no page waits for it."""
        given = torch.zeros(32, dtype=torch.uint8, device=self._device)
        there = torch.empty(32, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for size in (8, 16):
            places = np.array([0], np.int64)
            self.copy(given.data_ptr() + places, there.data_ptr() + places, places + size)

    def copy(self, source: Addresses, target: Addresses, sizes: Addresses) -> None:
        for first in range(0, len(sizes), LIST_ROWS):
            some = slice(first, first + LIST_ROWS)
            self._launch(source[some], target[some], sizes[some])

    def _launch(self, source: Addresses, target: Addresses, sizes: Addresses) -> None:
        align = _alignment(source, target, sizes)
        word = _WORDS[align]
        word_bytes = word.primitive_bitwidth // 8
        rows, count = self._free_list(), len(sizes)
        listed = rows.host.numpy()
        listed[0, :count], listed[1, :count] = source, target
        listed[2, :count] = sizes // word_bytes
        rows.device.copy_(rows.host, non_blocking=True)
        _copy_rows[(CTAS,)](
            *(rows.device, count),
            WORD=word,
            ALIGN=align,
            WORDS=STEP_BYTES // word_bytes,
            LIST=LIST_ROWS,
            BLOCK_ROWS=ROWS_AT_ONCE,
            num_warps=WARPS,
        )
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._lists.append(rows._replace(done=done))

    def _free_list(self) -> _RowList:
        """The oldest list, or another one while the device has yet to read that."""
        if self._lists and (self._lists[0].done is None or self._lists[0].done.query()):
            return self._lists.popleft()
        pinned = self._device.type == "cuda"
        host = torch.empty((3, LIST_ROWS), dtype=torch.int64, pin_memory=pinned)
        return _RowList(host, torch.empty_like(host, device=self._device), None)


def _alignment(*columns: Addresses) -> int:
    """The largest power of two up to 16 that divides all of these numbers."""
    bits = 16
    for column in columns:
        bits |= int(np.bitwise_or.reduce(column))
    return bits & -bits
