"""Numbers that steps send to a device and get from it, by a program that no copy of pages keeps
waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Staging:
    """To and from one device. Elsewhere than on a CUDA device numbers stay where they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._carried: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def to_device(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Arrays of one type as the device has them, in one piece that nobody waits for."""
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        there = flat
        if self.device.type == "cuda":
            there, pinned = torch.empty_like(flat, device=self.device), flat.pin_memory()
            self._carry(pinned, there, pinned)
        ends = np.cumsum([0, *(array.size for array in arrays)]).tolist()
        return [
            there[start:end].view(array.shape)
            for (start, end), array in zip(pairwise(ends), arrays, strict=True)
        ]

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """As indices."""
        return self.to_device(np.asarray(numbers, np.int64))[0]

    def read_back(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Tensors of one type as the host will have them: a call waits for them."""
        flat = torch.cat([each.flatten() for each in tensors])
        here, passed = flat, None
        if self.device.type == "cuda":
            here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            passed = self._carry(flat, here, here)

        def read() -> list[Tensor]:
            if passed is not None:
                passed.synchronize()
            pieces = here.split([each.numel() for each in tensors])
            return [piece.view(each.shape) for piece, each in zip(pieces, tensors, strict=True)]

        return read

    def _carry(self, source: Tensor, target: Tensor, pinned: Tensor) -> torch.cuda.Event:
        """Nobody else may get pinned memory before the device is done with it."""
        from kvtide.layers.kernels.host_copy import host_copy

        while self._carried and self._carried[0][0].query():
            self._carried.popleft()
        host_copy(source.view(torch.int32), target.view(torch.int32))
        passed = torch.cuda.Event()
        passed.record()
        self._carried.append((passed, pinned))
        return passed
