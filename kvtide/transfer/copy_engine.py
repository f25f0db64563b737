"""The copy engine: batches of asynchronous copies, without a kernel on the device.

The driver takes a list of copies in one call (`cuMemcpyBatchAsync`). Handing the list over costs
the calling thread half a microsecond per copy and some tens per call, and the engine starts only
when the call returns: so long lists are cut, and the first part is on its way while the next is
handed over. The arrays are passed as they are, by address, since making a Python object per
copy would cost more than the copy.

A driver whose queue is full blocks inside the call, and with it every other thread that uses the
device. So the lane waits here instead, before the queue is full.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from kvtide.transfer.strided import Strided, runs

MAX_COPIES = 128
"""Copies per call: enough to hide what a call costs, few enough for the engine to start early."""

MAX_IN_FLIGHT = 256
"""Copies handed over and not done, per stream: far more than keep the engine busy."""

_IN_STREAM_ORDER = 1
_BESIDE_COMPUTE = 1


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, two location hints of two integers each, flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class DirectUnavailableError(RuntimeError):
    """This machine cannot do batched copies. The message names the remedy."""


class BatchedCopies:
    """The driver's call. Columns are addresses of arrays: targets, sources, sizes."""

    def __init__(self) -> None:
        self._batch, self._make_context_current = _driver_calls()
        self._threads = threading.local()
        self._attributes = _Attributes(source_access_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def submit(self, columns: list[int], count: int, stream: int) -> None:
        """The copies are of torch's current device."""
        if not hasattr(self._threads, "has_context"):
            self._make_context_current()
            self._threads.has_context = True
        attributes, first = ctypes.addressof(self._attributes), ctypes.addressof(self._first)
        status = self._batch(*columns, count, attributes, first, 1, stream)
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {status}")


class Direct:
    """Copies on the current stream."""

    name = "direct"

    def __init__(self) -> None:
        self._batched = BatchedCopies()
        self._in_flight: dict[int, deque[tuple[int, torch.cuda.Event]]] = {}

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        source, target, sizes, bounds = runs(works, legs)
        columns = [np.ascontiguousarray(column) for column in (target, source, sizes)]
        addresses = [column.ctypes.data for column in columns]
        stream = torch.cuda.current_stream().cuda_stream
        for first, last in pairwise(bounds):
            for start in range(first, last, MAX_COPIES):
                count = min(MAX_COPIES, last - start)
                in_flight = self._in_flight.setdefault(stream, deque())
                while in_flight and sum(n for n, _ in in_flight) > MAX_IN_FLIGHT - count:
                    in_flight.popleft()[1].synchronize()
                self._batched.submit([address + 8 * start for address in addresses], count, stream)
                event = torch.cuda.Event(blocking=True)
                event.record()
                in_flight.append((count, event))
            yield


def _driver_calls() -> tuple[ctypes._CFunctionType, Callable[[], None]]:
    """The driver's batched copy, found through cuda-bindings and called without its conversions;
    and what gives the calling thread a CUDA context.

    A thread has one from its first call of the runtime on. The driver's calls need it, and may be
    the first of a thread.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DirectUnavailableError(
            "direct: cuda-bindings is not installed; install it, or use the kernel backend"
        ) from None
    error, pointer, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0)
    if error or not int(pointer):
        raise DirectUnavailableError(
            "direct: the driver has no batched copies (CUDA 13 brought them in this form); "
            "update it, or use the kernel backend"
        )

    def make_context_current() -> None:
        error, context = driver.cuCtxGetCurrent()
        if not error and not int(context):
            _, device = driver.cuDeviceGet(torch.cuda.current_device())
            error, context = driver.cuDevicePrimaryCtxRetain(device)
            if not error:
                (error,) = driver.cuCtxSetCurrent(context)
        if error:
            raise RuntimeError(f"the thread gets no CUDA context (error {int(error)})")

    address, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, address, address, address, size, address, address, size, address
    )
    return kind(int(pointer)), make_context_current
