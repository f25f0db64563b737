"""Registered memory, for objects whose own memory is not.

The library moves bytes only from and into memory it knows. Blocks that were lent to the store are
registered as a whole; an object that lies elsewhere is copied through a loan from
`RegisteredBuffers`.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALIGN = 64


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory by address."""

    start: int
    bytes: int

    def holds(self, other: MemoryRange) -> bool:
        return self.start <= other.start and other.end <= self.end

    @property
    def end(self) -> int:
        return self.start + self.bytes


def where(memory: memoryview) -> MemoryRange:
    """Where memory lies; writable or not."""
    if not len(memory):
        return MemoryRange(0, 0)
    return MemoryRange(
        int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]), memory.nbytes
    )


class RegisteredBuffers:
    """Memory lent out in pieces, first fit. `all` is what there is to register."""

    def __init__(self, size: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, size))
        self.all = where(self._memory)
        self._lock = threading.Condition()
        self._free = [MemoryRange(0, size)]
        """Sorted, and no two of them touch."""

    def borrow(self, sizes: Sequence[int], deadline: float) -> Loan | None:
        """Memory for the first of these objects, and for as many more as fit now.

        Waits for loans to come back; None: the deadline passed.
        """
        assert 0 < sizes[0] <= self.all.bytes
        with self._lock:
            while not (pieces := self._take(sizes)):
                if not self._lock.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return Loan(self, pieces)

    def _take(self, sizes: Sequence[int]) -> list[MemoryRange]:
        pieces: list[MemoryRange] = []
        for size in sizes:
            need = -(-size // ALIGN) * ALIGN
            place = next((n for n, free in enumerate(self._free) if free.bytes >= size), None)
            if place is None:
                break
            free = self._free.pop(place)
            taken = min(need, free.bytes)
            if free.bytes > taken:
                self._free.insert(place, MemoryRange(free.start + taken, free.bytes - taken))
            pieces.append(MemoryRange(free.start, taken))
        return pieces

    def give_back(self, pieces: Sequence[MemoryRange]) -> None:
        with self._lock:
            whole: list[MemoryRange] = []
            for piece in sorted([*self._free, *pieces], key=lambda piece: piece.start):
                if whole and whole[-1].end == piece.start:
                    piece = MemoryRange(whole[-1].start, whole.pop().bytes + piece.bytes)
                whole.append(piece)
            self._free = whole
            self._lock.notify_all()

    def memory(self, piece: MemoryRange) -> memoryview:
        return self._memory[piece.start : piece.end]


class Loan:
    """Pieces of staging memory. They return when all holders have dropped the loan."""

    def __init__(self, staging: RegisteredBuffers, pieces: list[MemoryRange]) -> None:
        self.pieces = pieces
        self._staging = staging
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            assert self._holders > 0
            self._holders += 1

    def drop(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._staging.give_back(self.pieces)

    def memory(self, number: int) -> memoryview:
        return self._staging.memory(self.pieces[number])

    def address(self, number: int) -> int:
        return self._staging.all.start + self.pieces[number].start
