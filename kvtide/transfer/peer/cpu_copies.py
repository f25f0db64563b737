"""Copies of many rows by the CPU: large ones one by one, small ones of one size together.

A call per row costs half a microsecond in Python, more than the copy of a small row. So small rows
of one size are items of one array over all sources and one over all targets, and numpy copies them
by index. The interpreter's lock is free during both kinds of copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from kvtide.transfer.peer.transport import Column

SMALL_BYTES = 8 << 10
"""Rows below this are copied together."""
AT_A_TIME_BYTES = 256 << 10
"""Small rows are copied through memory of this size, which stays in the CPU's cache."""
LARGE_BYTES = 32 << 20
"""A larger row is copied in pieces, so that the caller looks at its deadline between them. Much
smaller pieces would not be written past the CPU's cache, which costs a tenth."""


def copies(source: Column, target: Column, sizes: Column) -> Iterator[None]:
    """Copy rows from addresses to addresses; yields often. Targets do not overlap."""
    source, target, sizes = joined(source, target, sizes)
    small = sizes < SMALL_BYTES
    large = np.flatnonzero(~small)
    for row in zip(
        target[large].tolist(), source[large].tolist(), sizes[large].tolist(), strict=True
    ):
        yield from _copy_large(*row)
    for size in np.unique(sizes[small]).tolist():
        rows = np.flatnonzero(sizes == size)
        if size:
            yield from _copy_small(source[rows], target[rows], size)


def joined(source: Column, target: Column, sizes: Column) -> tuple[Column, Column, Column]:
    """The same copies, with rows that follow each other on both sides as one."""
    if len(sizes) < 2:
        return source, target, sizes
    follows = (source[:-1] + sizes[:-1] == source[1:]) & (target[:-1] + sizes[:-1] == target[1:])
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return source[starts], target[starts], np.add.reduceat(sizes, starts)


def _copy_large(target: int, source: int, size: int) -> Iterator[None]:
    for done in range(0, size, LARGE_BYTES):
        ctypes.memmove(target + done, source + done, min(LARGE_BYTES, size - done))
        yield


def _copy_small(source: Column, target: Column, size: int) -> Iterator[None]:
    sources, source_items = _items(source, size)
    targets, target_items = _items(target, size)
    count = AT_A_TIME_BYTES // size + 1
    for first in range(0, len(source), count):
        some = slice(first, first + count)
        target_items[targets[some]] = source_items[sources[some]]
        yield


def _items(addresses: Column, size: int) -> tuple[Column, np.ndarray]:
    """An array over all memory between these addresses, and the number of each of its items.

    Its items overlap, at the largest distance that meets every address.
    """
    base = int(addresses.min())
    offsets = addresses - base
    step = int(np.gcd.reduce(offsets)) or 1
    span = int(offsets.max()) + size
    memory = memoryview((ctypes.c_char * span).from_address(base))
    shape = ((span - size) // step + 1,)
    return offsets // step, np.ndarray(shape, np.dtype((np.void, size)), memory, 0, (step,))
