"""The link's own speed, measured in the process that sends.

| transport  | what is beside it                                                             |
|------------|-------------------------------------------------------------------------------|
| `shm`, GPU | one pinned copy of a block from device to host                                |
| `shm`, CPU | one memmove of a block into shared memory                                     |
| `mooncake` | the library's own batched call, with the rows that the handoff has written    |
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch

from kvtide.bench.link import Link
from kvtide.tiers import Arena, host_arena
from kvtide.transfer.peer.mooncake_engine import library_engine
from kvtide.transfer.peer.transport import Descriptor, WriteBatch
from kvtide.transfer.strided import Way

MAX_BLOCK_BYTES = 2 << 30
MOONCAKE_REQUESTS = 512
"""Per call; the library's queue of a peer holds twice as many."""


class PlainCopies:
    """Blocks of memory for plain copies of so many bytes, taken when they are first needed."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, min(size, MAX_BLOCK_BYTES)
        self._link: Link | None = None
        self._blocks: tuple[torch.Tensor, Arena] | None = None

    def bytes_s(self) -> float:
        if self._device.type == "cuda":
            if self._link is None:
                self._link = Link(self._device, self._size)
            return self._size / self._link.time(Way.BACKUP, self._size)
        if self._blocks is None:
            source = torch.ones(self._size, dtype=torch.uint8)
            self._blocks = source, host_arena(self._size, pinned=False, shared=True)
        source, target = self._blocks
        begun = time.perf_counter()
        ctypes.memmove(target.data.data_ptr(), source.data_ptr(), self._size)
        return self._size / (time.perf_counter() - begun)


class MooncakeCalls:
    """Writes recorded rows once more: the same bytes to the same places."""

    def __init__(self, descriptor: Descriptor, host: str = "127.0.0.1") -> None:
        self._engine = library_engine()()  # The transport has set its environment.
        protocol = str(descriptor["protocol"])
        assert not self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        self._session = str(descriptor["session"])
        self._bases = np.array([int(each["address"]) for each in descriptor["regions"]])
        self._registered: set[int] = set()

    def register(self, address: int, size: int) -> None:
        if address not in self._registered:
            assert not self._engine.register_memory(address, size)
            self._registered.add(address)

    def bytes_s(self, batches: Sequence[WriteBatch]) -> float:
        rows = [
            (batch.source.tolist(), (self._bases[batch.region] + batch.target).tolist(),
             batch.bytes.tolist())
            for batch in batches
        ]  # fmt: skip
        total, begun = 0, time.perf_counter()
        for sources, targets, sizes in rows:
            for first in range(0, len(sizes), MOONCAKE_REQUESTS):
                some = slice(first, first + MOONCAKE_REQUESTS)
                columns = sources[some], targets[some], sizes[some]
                assert not self._engine.batch_transfer_sync_write(self._session, *columns)
            total += sum(sizes)
        return total / (time.perf_counter() - begun)
