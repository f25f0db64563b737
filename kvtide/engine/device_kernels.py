"""The engine's kernels beside those of the model: sampling, and small copies from and to the host.

`device_kernels` is called once for a device, when the engine is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """As `layers/kernels/host_copy.py` and `layers/kernels/sampling.py` define them."""

    host_copy: Callable[[Tensor, Tensor], None]
    greedy: Callable[[Tensor, Tensor | None], Tensor]
    sample_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    sample_candidates: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    mask_logits: Callable[[Tensor, Tensor, Tensor], None]


def device_kernels(device: torch.device) -> DeviceKernels | None:
    """None on a CPU, where torch code runs."""
    if device.type != "cuda":
        return None
    # By name, for Triton is installed only where there is such a device.
    copies = import_module("kvtide.layers.kernels.host_copy")
    sampling = import_module("kvtide.layers.kernels.sampling")
    return DeviceKernels(
        copies.host_copy,
        sampling.greedy,
        sampling.sample_rows,
        sampling.sample_candidates,
        sampling.mask_logits,
    )
