"""A sender's transport that writes pages straight to the peer's host, or stages them first.

    straight      source ──▶ the peer's host
    without tail  the same but for the tail, of which nothing is written
    chunked       source ──▶ staging ──▶ the peer's host, write by write
    staged        source ──▶ staging; behind the last page, all of staging ──▶ the peer's host

The staging memory is on the sender's device: with one GPU for both sides it is the peer's too.
*staged* is what a server does whose transport writes to device memory and whose pages live on the
host: when a prompt is there, it is copied to the host, and the request goes on.

Pages are reported as landed when they are in staging. The first token is reported behind the tail,
and so behind all copies; nothing may read the pages before. One prompt is staged at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch

from kvtide.tiers import device_arena
from kvtide.transfer.copy_engine import MAX_COPIES, BatchedCopies
from kvtide.transfer.peer.transport import (
    Column,
    Descriptor,
    HostOrDevice,
    Landed,
    PeerLink,
    PendingWrite,
    Region,
    Transport,
    TransportError,
    WriteBatch,
)

TAIL_REGION = 1
"""Of a decode side: its tail rows, which are written last (`own_memory.target_memory`)."""


class WriteWay(Enum):
    STRAIGHT = "straight"
    CHUNKED = "chunked"
    STAGED = "staged"
    WITHOUT_TAIL = "without tail"


WHOLE_WAYS = (WriteWay.STRAIGHT, WriteWay.CHUNKED, WriteWay.STAGED)
"""The ways that bring all bytes."""


class SwitchedTransport:
    """Sender's end over another transport.

    way       how the next prompt is written; changed while nothing is
    recorded  the rows of the last batches, while it is not None
    """

    def __init__(self, inner: Transport, device: torch.device, staging_bytes: int) -> None:
        self.name = inner.name
        self.way = WriteWay.STRAIGHT
        self.recorded: list[WriteBatch] | None = None
        self.descriptor: Descriptor = {}
        self._inner, self._device, self._bytes = inner, device, staging_bytes
        self._staging: HostStaging | None = None

    @property
    def staging(self) -> HostStaging:
        if self._staging is None:
            self._staging = HostStaging(self._device, self._bytes)
        return self._staging

    def expose(self, regions: Sequence[Region]) -> Descriptor:
        return self._inner.expose(regions)

    def revoke(self) -> Descriptor | None:
        return self._inner.revoke()

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def connect(self, descriptor: Descriptor) -> PeerLink:
        self.descriptor = descriptor
        return _SwitchedLink(self, self._inner.connect(descriptor))

    def close(self) -> None:
        self._inner.close()
        if self._staging is not None:
            self._staging.close()


class _SwitchedLink:
    def __init__(self, owner: SwitchedTransport, inner: PeerLink) -> None:
        self._owner, self._inner, self.poll_s = owner, inner, inner.poll_s
        self._held: list[WriteBatch] = []
        self._was_last = False

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        owner = self._owner
        if owner.recorded is not None:
            owner.recorded.append(batch)
        if owner.way is WriteWay.STRAIGHT:
            return self._inner.begin(batch, timeout_s)
        is_last = bool((batch.region == TAIL_REGION).any())
        if owner.way is WriteWay.WITHOUT_TAIL:
            return Landed() if is_last else self._inner.begin(batch, timeout_s)
        if self._was_last and not is_last:
            owner.staging.free()  # The prompt before has ended.
        self._was_last = is_last
        staged, is_there = owner.staging.take(batch)
        self._held.append(staged)
        if owner.way is WriteWay.STAGED and not is_last:
            return _Staged(is_there, None)
        batches, self._held = self._held, []
        return _Staged(is_there, lambda: self._inner.begin(_joined(batches), timeout_s))

    def alive(self) -> bool:
        return self._inner.alive()

    def close(self) -> None:
        self._inner.close()


class _Staged:
    """Rows on their way to staging; then `forward` writes them to the peer, if it is given."""

    def __init__(
        self, is_there: Callable[[], bool], forward: Callable[[], PendingWrite] | None
    ) -> None:
        self._is_there, self._forward = is_there, forward
        self._forwarded: PendingWrite | None = None

    def poll(self) -> bool:
        if self._forwarded is None:
            if not self._is_there():
                return False
            if self._forward is None:
                return True
            self._forwarded = self._forward()
        return self._forwarded.poll()


def _joined(batches: Sequence[WriteBatch]) -> WriteBatch:
    columns = zip(*((b.source, b.region, b.target, b.bytes) for b in batches), strict=True)
    source, region, target, sizes = (np.concatenate(column) for column in columns)
    return WriteBatch(source, region, target, sizes, batches[0].source_kind)


class HostStaging:
    """Memory on the device in which rows lie one behind another."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._arena = device_arena(size, device)
        self._size, self._used = size, 0
        self._on_gpu = device.type == "cuda"
        self._kind: HostOrDevice = "device" if self._on_gpu else "host"
        if self._on_gpu:
            self._batched, self._stream = BatchedCopies(), torch.cuda.Stream(device)

    def take(self, batch: WriteBatch) -> tuple[WriteBatch, Callable[[], bool]]:
        """Copy rows here: the batch that writes them on, and whether they have come."""
        if self._used + batch.total_bytes > self._size:
            raise TransportError(f"a staging of {self._size:,} B is full", silent=True)
        places = np.cumsum(batch.bytes) - batch.bytes + self._used + self._arena.data.data_ptr()
        self._used += batch.total_bytes
        staged = WriteBatch(places, batch.region, batch.target, batch.bytes, self._kind)
        if self._on_gpu:
            return staged, self._copy_on_gpu(batch.source, places, batch.bytes)
        for row in zip(places.tolist(), batch.source.tolist(), batch.bytes.tolist(), strict=True):
            ctypes.memmove(*row)
        return staged, lambda: True

    def free(self) -> None:
        """Rows that come from now on lie at the beginning."""
        self._used = 0

    def _copy_on_gpu(self, source: Column, places: Column, sizes: Column) -> Callable[[], bool]:
        rows = [np.ascontiguousarray(column) for column in (places, source, sizes)]
        for first in range(0, len(sizes), MAX_COPIES):
            columns = [column.ctypes.data + 8 * first for column in rows]
            count = min(MAX_COPIES, len(sizes) - first)
            self._batched.submit(columns, count, self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)

        def is_there() -> bool:
            return bool(event.query()) and len(rows) == 3  # The driver reads the arrays until then.

        return is_there

    def close(self) -> None:
        self._arena.close()
