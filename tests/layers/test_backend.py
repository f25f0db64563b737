"""Which implementation of the operations a model gets."""

from __future__ import annotations

import torch

from kvtide.layers import choose
from kvtide.layers.backend.arithmetic import Batched, Deterministic
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.native.build import library
from kvtide.layers.native.native_ops import NativeOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_deterministic_model_on_a_cpu_runs_the_torch_references() -> None:
    ops = choose(True, CPU)
    assert type(ops) is TorchOps and not ops.uses_kernels
    assert type(ops.arithmetic) is Deterministic


def test_a_cpu_runs_native_kernels_where_they_load() -> None:
    """`native/test_build.py` has the machines where they do not."""
    ops = choose(False, CPU)
    assert type(ops) is (TorchOps if library() is None else NativeOps)
    assert isinstance(ops.arithmetic, Batched) and not ops.uses_kernels


def test_a_cuda_device_runs_the_kernels() -> None:
    ops = choose(False, CUDA)
    assert ops.uses_kernels and type(ops.arithmetic) is Batched
    own = {name for name in TorchOps.__dict__ if not name.startswith("_")} - {"arithmetic"}
    by_kernel = {name for kind in type(ops).__mro__[:2] for name in kind.__dict__}
    assert own <= by_kernel, "an operation without a kernel"


def test_a_deterministic_model_writes_by_kernel_and_computes_by_reference() -> None:
    ops = choose(True, CUDA)
    assert not ops.uses_kernels and type(ops.arithmetic) is Deterministic
    overridden = {name for name in type(ops).__dict__ if not name.startswith("_")}
    assert isinstance(ops, TorchOps) and overridden == {"kv_write"}
