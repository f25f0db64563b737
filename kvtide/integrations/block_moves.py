"""Blocks of an engine's cache to and from a store, on threads: a worker's half of a connector.

A block is one object: its bytes in every layer, one after the other (`BlockMemory`). Loads go into
blocks that the engine has set aside; saves read blocks that it no longer writes to, and that it
keeps until `ended` names the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtide.integrations.block_plan import Move
from kvtide.integrations.page_objects import MemoryRuns, PageObjects, PagePool
from kvtide.integrations.page_tasks import Page, PageTasks, Wakening, Work

T = TypeVar("T")

LOADING, SAVING = 2, 2
"""Threads. Loads have their own: a request waits for them."""
MAX_WAIT_S = 10.0
"""How long a save waits for a thread, before it is given up: meanwhile the engine lacks blocks."""


class BlockMemory:
    """The bytes of blocks in the tensors of layers, whose first dimension are the blocks.

    page_bytes  of a block in all layers
    layers      for each: dtype, shape of a block, order of its dimensions in memory
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], blocks: int) -> None:
        self.layers: dict[str, list[object]] = {}
        self.page_bytes = 0
        self._regions: list[_Region] = []
        seen = set()
        for name, tensor in tensors.items():
            assert tensor.shape[0] == blocks, (name, tensor.shape, blocks)
            if tensor.data_ptr() not in seen:  # Layers may share one.
                seen.add(tensor.data_ptr())
                region = _Region(tensor)
                self.layers[name] = region.described
                self.page_bytes += region.block_bytes
                self._regions.append(region)

    def runs(self, block: int) -> MemoryRuns:
        return [run for region in self._regions for run in region.runs(block)]


class _Region:
    """The blocks of one tensor, each as runs of bytes: dense dimensions together."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size, shape, strides = tensor.itemsize, tensor.shape[1:], tensor.stride()[1:]
        order = sorted(range(len(shape)), key=lambda dimension: strides[dimension])
        self.described: list[object] = [str(tensor.dtype), list(shape), order]
        self.block_bytes = size * shape.numel()
        self._memory = _bytes_of(tensor)
        self._stride = size * tensor.stride(0)
        self._length = size
        self._starts = [size * tensor.storage_offset()]
        for dimension in order:
            stride, count = size * strides[dimension], shape[dimension]
            if stride == self._length and len(self._starts) == 1:
                self._length *= count
            elif count > 1:
                assert stride >= self._length, "dimensions that overlap"
                self._starts = [at + n * stride for n in range(count) for at in self._starts]

    def runs(self, block: int) -> MemoryRuns:
        ahead = block * self._stride
        return [self._memory[ahead + at : ahead + at + self._length].data for at in self._starts]


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """All of the storage that a tensor lies in, and a reference to it."""
    array: npt.NDArray[np.uint8] = (
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    )
    return array


class BlockMoves:
    """The loads and saves of one worker, which calls it from one thread.

    failed_blocks  that could not be loaded, until they are taken
    """

    def __init__(self, objects: PageObjects, memory: BlockMemory, pool: PagePool) -> None:
        assert memory.page_bytes == pool.format.payload_bytes
        self.failed_blocks: set[int] = set()
        self._objects = objects
        self._memory = memory
        self._pool = pool
        self._wakening = Wakening()
        self._loads: PageTasks[list[bool]] = PageTasks("load", LOADING, objects, Wakening())
        self._saves: PageTasks[bool] = PageTasks(
            "save", SAVING, objects, self._wakening, max_wait_s=MAX_WAIT_S
        )
        self._loading: dict[int, Move] = {}
        self._saving: dict[int, str] = {}
        self._saves_of: Counter[str] = Counter()
        """Saves of a request that have not ended; 0 until the request has."""
        self._finished: set[str] = set()

    def load(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self._loading[self._submit(self._loads, move, self._read, list)] = move

    def save(self, moves: Iterable[Move]) -> None:
        """Save those blocks that are not there yet."""
        for move in moves:
            self._saving[self._submit(self._saves, move, self._write, all)] = move.request
            self._saves_of[move.request] += 1

    def ended(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """Of requests, `finished` ones now or earlier: those whose saves ended. And those whose
        loads ended; what failed is in `failed_blocks` then."""
        self._end_saves()
        self._finished |= {request for request in finished if request in self._saves_of}
        saved = {request for request in self._finished if not self._saves_of[request]}
        self._finished -= saved
        for request in saved:
            del self._saves_of[request]
        loaded = set()
        for task, there in self._loads.take_all().items():
            move = self._loading.pop(task)
            loaded.add(move.request)
            self.failed_blocks |= {n for n, ok in zip(move.blocks, there, strict=True) if not ok}
        return saved, loaded

    def drain(self) -> None:
        """Wait until no save reads a block any more."""
        self._end_saves()
        while self._saving:
            self._wakening.wait()
            self._end_saves()

    def close(self) -> None:
        self.drain()
        self._loads.close()
        self._saves.close()

    # -- on threads -------------------------------------------------------------------------

    def _read(self, pool: PagePool, pages: list[Page]) -> list[bool]:
        return self._objects.read(pool, [one.name for one in pages], [one.runs for one in pages])

    def _write(self, pool: PagePool, pages: list[Page]) -> list[bool]:
        names, memory = [one.name for one in pages], [one.runs for one in pages]
        return self._objects.add(pool, names, memory)[1]

    # -- the steps --------------------------------------------------------------------------

    def _submit(
        self,
        tasks: PageTasks[T],
        move: Move,
        work: Work,
        result: Callable[[list[bool]], T],
    ) -> int:
        pages = [
            Page(block, name, self._pool, self._memory.runs(block))
            for name, block in zip(move.names, move.blocks, strict=True)
        ]
        return tasks.submit(pages, work, result)

    def _end_saves(self) -> None:
        for task in self._saves.take_all():
            self._saves_of[self._saving.pop(task)] -= 1
