"""Copies from a GPU into mapped host memory, without a wait.

Long rows go through its copy engine. Few of them are in flight at a time: a driver whose queue is
full blocks the calling thread, and with it all others that use the device (`copy_engine`).
A copy costs the engine about as much as 64 KB, so one kernel copies all short rows of a batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import torch

from kvtide.transfer.copy_engine import MAX_COPIES, BatchedCopies, DirectUnavailableError
from kvtide.transfer.peer.cpu_copies import joined
from kvtide.transfer.peer.transport import Column, TransportError, TransportUnavailableError
from kvtide.transfer.triton_copies import row_kernel

MAX_IN_FLIGHT = 512
"""Copies handed over and not done, of all writes together: enough for the time between polls."""
KERNEL_BYTES = 64 << 10
"""Rows below this are copied by the kernel."""
IDLE_S = 10.0
"""A GPU that does not finish copies of a closed target in this time never does."""


class CopyTarget(Protocol):
    """The mapped memory of a write.

    lock     held while copies are submitted
    closing  no more are submitted from now on
    """

    lock: threading.Lock
    closing: bool

    def stuck(self) -> None:
        """A copy did not end: the memory may be written to for ever."""


class DeviceCopies:
    """A stream of its own, for all links of a sender; its kernels go before those of a model."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._batched = BatchedCopies()
        except DirectUnavailableError as error:
            raise TransportUnavailableError(f"transport shm: {error}") from error
        self.in_flight = 0
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._row_kernel = row_kernel(device)
        with torch.cuda.stream(self._stream):
            self._row_kernel.warm_up()
        self._stream.synchronize()

    def begin(
        self, source: Column, target: Column, sizes: Column, timeout_s: float, owner: CopyTarget
    ) -> DeviceWrite:
        rows = joined(source, target, sizes)
        short = rows[2] < KERNEL_BYTES
        long, by_kernel = ([column[some] for column in rows] for some in (~short, short))
        write = DeviceWrite(self, long, by_kernel, timeout_s, owner)
        write.poll()
        return write

    def drain(self) -> bool:
        """Wait for all copies that were submitted; False if they do not end."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record(self._stream)
        deadline = time.monotonic() + IDLE_S
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        return True

    def submit_short(self, rows: list[Column]) -> torch.cuda.Event:
        """All of these rows, by one kernel."""
        with torch.cuda.stream(self._stream):
            source, target, sizes = rows
            self._row_kernel.copy(source, target, sizes)
            event = torch.cuda.Event()
            event.record()
        return event

    def submit(self, rows: list[Column], first: int, count: int) -> torch.cuda.Event:
        source, target, sizes = (column.ctypes.data + 8 * first for column in rows)
        with torch.cuda.device(self._device):
            self._batched.submit([target, source, sizes], count, self._stream.cuda_stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event


class DeviceWrite:
    """Copies of one batch: short rows at once, long ones little by little as it is polled."""

    def __init__(
        self,
        copies: DeviceCopies,
        rows: list[Column],
        short: list[Column],
        timeout_s: float,
        owner: CopyTarget,
    ) -> None:
        self._copies = copies
        self._rows, self._short = rows, short
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._owner = owner
        self._next = 0
        self._in_flight: deque[tuple[int, torch.cuda.Event]] = deque()

    def poll(self) -> bool:
        try:
            with self._owner.lock:
                return self._step()
        except TransportError:
            raise
        except RuntimeError as error:  # Whatever CUDA reports: its copies may still run.
            self._owner.stuck()
            raise TransportError(f"shm: the copy failed: {error}", silent=False) from error

    def _step(self) -> bool:
        while self._in_flight and self._in_flight[0][1].query():
            self._copies.in_flight -= self._in_flight.popleft()[0]
        late = time.monotonic() - self._deadline
        left, short = len(self._rows[0]) - self._next, len(self._short[0])
        if (left or short) and not self._in_flight and (late > 0 or self._owner.closing):
            closed, slow = "the link is closed", f"not written within {self._timeout_s:g} s"
            raise TransportError(f"shm: {closed if self._owner.closing else slow}", silent=True)
        if late > self._timeout_s:
            self._owner.stuck()
            raise TransportError("shm: the GPU does not finish a copy", silent=False)
        if short and late <= 0 and not self._owner.closing:
            self._in_flight.append((0, self._copies.submit_short(self._short)))
            self._short, short = [column[:0] for column in self._short], 0
        while late <= 0 and left and self._room() > 0 and not self._owner.closing:
            count = min(MAX_COPIES, left, self._room())
            event = self._copies.submit(self._rows, self._next, count)
            self._in_flight.append((count, event))
            self._copies.in_flight += count
            self._next += count
            left -= count
        return not (left or short or self._in_flight)

    def _room(self) -> int:
        return MAX_IN_FLIGHT - self._copies.in_flight
