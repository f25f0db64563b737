"""Small step inputs and outputs between host and device, by a kernel.

A kernel reads and writes pinned memory, so that they do not queue behind page copies on the copy
engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.device_kernels import DeviceKernels, device_kernels


class Staging:
    """To and from one device. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kernels = device_kernels(device)
        self._in_flight: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def to_device(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Arrays of one dtype on the device, in one copy that the host does not wait for."""
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        there = flat
        if self.kernels is not None:
            there, pinned = torch.empty_like(flat, device=self.device), flat.pin_memory()
            self._copy(self.kernels, pinned, there, pinned)
        ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        return [
            there[start:end].view(array.shape)
            for (start, end), array in zip(pairwise(ends), arrays, strict=True)
        ]

    def pinned(self, rows: int, columns: int) -> Tensor:
        """Host memory for int32 numbers that `upload` takes."""
        pins = self.kernels is not None
        return torch.empty(rows, columns, dtype=torch.int32, pin_memory=pins)

    def upload(self, numbers: Tensor) -> Tensor:
        """Int32 numbers on the device, in a copy that the host does not wait for. Pinned memory is
        read where it is: it must not change before."""
        if self.kernels is None:
            return numbers
        here = numbers if numbers.is_pinned() else numbers.pin_memory()
        there = torch.empty_like(here, device=self.device)
        self._copy(self.kernels, here.view(-1), there.view(-1), here)
        return there

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """Index tensor on the device."""
        return self.to_device(np.asarray(numbers, np.int64))[0]

    def read_back(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Queue a copy of tensors of one dtype to the host; the returned call waits for it."""
        flat = torch.cat([each.flatten() for each in tensors])
        here, copied = flat, None
        if self.kernels is not None:
            here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            copied = self._copy(self.kernels, flat, here, here)

        def read() -> list[Tensor]:
            if copied is not None:
                copied.synchronize()
            pieces = here.split([each.numel() for each in tensors])
            return [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]

        return read

    def _copy(
        self, kernels: DeviceKernels, source: Tensor, target: Tensor, pinned: Tensor
    ) -> torch.cuda.Event:
        """Holds the pinned memory until the device is done with it."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        kernels.host_copy(source.view(torch.int32), target.view(torch.int32))
        copied = torch.cuda.Event()
        copied.record()
        self._in_flight.append((copied, pinned))
        return copied
