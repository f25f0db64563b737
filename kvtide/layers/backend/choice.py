"""Which implementation of the operations a model runs: chosen here, once, when it is built."""

from __future__ import annotations

from importlib import import_module

import torch

from kvtide.layers.backend.arithmetic import Batched, Deterministic
from kvtide.layers.backend.ops import Ops
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.native.build import library
from kvtide.layers.native.c_functions import Functions
from kvtide.layers.native.native_ops import NativeOps


def choose(deterministic: bool, device: torch.device) -> Ops:
    """Native kernels or torch references on a CPU, Triton kernels on a CUDA device.

    A deterministic model runs the references on every device. On a CUDA device the Triton kernel
    still writes its KV entries, with the same bytes.
    """
    if device.type == "cuda":
        # By name, for Triton is installed only where there is such a device.
        triton_ops = import_module("kvtide.layers.backend.triton_ops")
        ops: Ops
        ops = (
            triton_ops.TorchOpsWithKernelWrites(Deterministic())
            if deterministic
            else triton_ops.TritonOps()
        )
        return ops
    if deterministic:
        return TorchOps(Deterministic())
    native = library()
    return TorchOps(Batched()) if native is None else NativeOps(Functions.of(native))
