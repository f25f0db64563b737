"""Memory that rows are gathered in before a library sends them.

A library's request costs tens of microseconds, however short it is. Rows that lie apart in the
source and together in the target become one request when they are gathered first. Rows on a GPU are
gathered by its copy engine, as the network's libraries read host memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kvtide.tiers.arena import Arena, host_arena
from kvtide.transfer.peer.cpu_copies import copies, joined
from kvtide.transfer.peer.device_copies import DeviceCopies
from kvtide.transfer.peer.transport import Column, TransportError, WriteBatch

STAGING_BYTES = 16 << 20
GATHERED_ROW_BYTES = 64 << 10
"""Rows are gathered if they are shorter than this on average; a copy costs more than it saves for
longer ones."""
GATHERED_TO = 2
"""And if at most one request for so many rows is left."""


Register = Callable[[int, int], Callable[[], None]]


class Requests(NamedTuple):
    """Plain writes: so many bytes from each source address to the target address."""

    source: Column
    target: Column
    bytes: Column


class SendStaging:
    """One part at a time: the next one is gathered when the library has sent the last.

    `register` makes memory known to the library, and gives what undoes it.
    """

    def __init__(self, register: Register, device: torch.device | None) -> None:
        self._register = register
        self._on_gpu = device is not None and device.type == "cuda"
        self._copies = DeviceCopies(device) if device is not None and self._on_gpu else None
        self._arena: Arena | None = None
        self._unregister: Callable[[], None] = lambda: None
        self._stuck = False
        self.lock, self.closing = threading.Lock(), False

    def requests(self, batch: WriteBatch, target: Column) -> Requests | None:
        """The requests for rows that the library reads where they are; None: gather them."""
        if batch.source_kind == "device":
            return None
        rows = Requests(*joined(batch.source, target, batch.bytes))
        if not len(rows.bytes) or rows.bytes.mean() >= GATHERED_ROW_BYTES:
            return rows
        order = np.argsort(rows.target, kind="stable")
        ends = (rows.target + rows.bytes)[order]
        left = 1 + int((ends[:-1] != rows.target[order][1:]).sum())
        return None if left * GATHERED_TO <= len(rows.bytes) else rows

    def gathered(self, batch: WriteBatch, target: Column, deadline: float) -> Requests:
        """Copy the rows together, in the order of their targets; at most STAGING_BYTES."""
        order = np.argsort(target, kind="stable")
        source, target, sizes = batch.source[order], target[order], batch.bytes[order]
        places = self._address() + np.cumsum(sizes) - sizes
        if batch.source_kind == "device":
            self._copy_from_gpu(source, places, sizes, deadline)
        else:
            for _ in copies(source, places, sizes):
                if time.monotonic() > deadline:
                    raise TransportError("the rows were not gathered in time", silent=True)
        return Requests(*joined(places, target, sizes))

    def _copy_from_gpu(
        self, source: Column, places: Column, sizes: Column, deadline: float
    ) -> None:
        if self._copies is None:
            raise TransportError(
                "the sources are on a GPU, and the transport was opened without one", silent=True
            )
        write = self._copies.begin(source, places, sizes, deadline - time.monotonic(), self)
        while not write.poll():
            time.sleep(20e-6)

    def stuck(self) -> None:
        """A copy of the GPU did not end: it may still write here, so the memory stays."""
        self._stuck = True

    def _address(self) -> int:
        if self._arena is None:
            self._arena = host_arena(STAGING_BYTES, pinned=self._on_gpu)
            self._unregister = self._register(self._arena.data.data_ptr(), STAGING_BYTES)
        return self._arena.data.data_ptr()

    def close(self) -> None:
        if self._arena is not None and not self._stuck:
            self._unregister()
            self._arena.close()
