"""Norm and gate kernels give what the torch code gives, and round where it rounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers import Ops
from kvtide.layers.backend.arithmetic import Deterministic
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.dense import GatedMLP, LayerNorm, Linear, RMSNorm
from kvtide.layers.elementwise import (
    Activation,
    gelu_tanh,
    layer_norm,
    relu_squared,
    rms_norm,
    sigmoid,
    swish,
)
from kvtide.layers.kernels import norms
from kvtide.layers.kernels.norms import gated

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

TYPES = [torch.float32, torch.bfloat16]
SHAPES = {
    "tokens": (5, 96),
    "odd width": (3, 119),
    "one wide row": (1, 4096),
    "heads": (7, 3, 32),
    "one token": (1, 64),
}
LARGE = {
    "decoding": (64, 4096),
    "prompt": (8192, 4096),
    "widest": (300, 16384),
    "heads": (2048, 32, 128),
    "odd": (1000, 5120 + 3),
}


def some(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    return values.to(device, dtype)


def weights(width: int, device: torch.device, seed: int = 9) -> Tensor:
    return 1 + some((width,), device, torch.float32, seed) / 4


def alike(found: Tensor, wanted: Tensor) -> None:
    """In bf16 on a device most are equal, and none is off by more than one step of its precision;
    the interpreter cuts off where a device rounds. What is next to nothing is left of a difference
    of numbers that are nearly equal, and has no digits to compare."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-5)
        return
    step = 2**-7 if found.is_cuda else 2**-6
    torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=1e-6)
    something = wanted.abs() > 1e-2
    assert not found.is_cuda or (found == wanted)[something].float().mean() > 0.99


def shapes(device: torch.device) -> list[tuple[int, ...]]:
    return [*SHAPES.values(), *(LARGE.values() if device.type == "cuda" else ())]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms(dtype: torch.dtype, device: torch.device) -> None:
    for shape in shapes(device):
        x, weight = some(shape, device, dtype), weights(shape[-1], device)
        alike(norms.rms_norm(x, weight, 1e-3), rms_norm(x, weight, 1e-3))
        bias = weights(shape[-1], device, 3)
        alike(norms.layer_norm(x + 1, weight, bias, 1e-3), layer_norm(x + 1, weight, bias, 1e-3))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_sum_is_rounded_and_then_normed(dtype: torch.dtype, device: torch.device) -> None:
    for shape in shapes(device):
        x, y = some(shape, device, dtype), some(shape, device, dtype, 1)
        kept, weight = x.clone(), weights(shape[-1], device)
        total, result = norms.add_rms_norm(x, y, weight, 1e-6)
        alike(total, x + y)
        assert not x.is_cuda or torch.equal(total, x + y)
        alike(result, rms_norm(total, weight, 1e-6))
        assert torch.equal(x, kept), "inputs are not written"


def test_a_cta_takes_several_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "CTAS_PER_SM", 1)
    monkeypatch.setattr(norms, "sm_count", lambda device: 2)
    monkeypatch.setattr(norms, "TILE", 64)
    for shape in ((13, 24), (3, 7, 16), (5, 100)):
        x, y, weight = (some(s, device, torch.float32) for s in (shape, shape, shape[-1:]))
        alike(norms.rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
        alike(norms.add_rms_norm(x, y, weight, 1e-6)[1], rms_norm(x + y, weight, 1e-6))


def test_strided_inputs(device: torch.device) -> None:
    """Heads of a QKV projection; every other element."""
    wide = some((5, 9, 32), device, torch.float32)
    part, weight = wide[:, 2:6], weights(32, device)
    alike(norms.rms_norm(part, weight, 1e-6), rms_norm(part, weight, 1e-6))
    alike(
        norms.add_rms_norm(part, wide[:, :4], weight, 1e-6)[1],
        rms_norm(part + wide[:, :4], weight, 1e-6),
    )
    flat = wide.flatten(1)
    for strided in (flat[:, 8:40], flat[:, :64:2], flat[::2, 5:37]):
        alike(norms.rms_norm(strided, weight, 1e-6), rms_norm(strided, weight, 1e-6))


def exact(activation: Activation, x: Tensor) -> Tensor:
    """In fp32 the torch code has few digits left where a GELU is next to nothing."""
    if activation is gelu_tanh:
        return functional.gelu(x.double(), approximate="tanh")
    return activation(x)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("activation", [swish, gelu_tanh, relu_squared, sigmoid])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gates(
    dtype: torch.dtype, activation: Activation, limit: float | None, device: torch.device
) -> None:
    widths = [(3, 40), (1, 2100)]
    widths += [(64, 12288), (4096, 12288)] if device.type == "cuda" else []
    for tokens, width in widths:
        both = some((tokens, 2 * width), device, dtype) * 3
        gate, up = both.chunk(2, dim=-1)
        found = gated(gate, up, activation, limit)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        alike(found, exact(activation, gate).to(dtype) * up)


def test_gates_of_many_rows(device: torch.device) -> None:
    gate, up = some((70, 16), device, torch.float32).chunk(2, dim=-1)
    alike(gated(gate, up, swish), swish(gate) * up)


def test_gates_far_from_zero_are_open_or_shut(device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]], device=device)
    for activation in (swish, gelu_tanh, sigmoid):
        found = gated(gate, torch.ones_like(gate), activation)
        torch.testing.assert_close(found, activation(gate), rtol=1e-6, atol=1e-30)


def test_one_gate_for_all_of_a_row(device: torch.device) -> None:
    x, gate = some((5, 70), device, torch.bfloat16), some((5, 1), device, torch.bfloat16, 1)
    alike(gated(gate, x, sigmoid), sigmoid(gate).to(x.dtype) * x)


# -- layers ------------------------------------------------------------------------------------


def test_layers_launch_the_kernels(device: torch.device) -> None:
    """They give what the torch code gives."""
    x, y = (some((5, 24), device, torch.float32, seed) for seed in (1, 2))
    weight, bias, gates = (some((n,), device, torch.float32, n) for n in (24, 24, 5))
    up = some((80, 24), device, torch.float32, 3)
    down = some((24, 40), device, torch.float32, 4)

    def results(ops: Ops) -> list[Tensor]:
        norm = RMSNorm(ops, weight, 1e-5)
        linears = (Linear(ops.arithmetic, up), Linear(ops.arithmetic, down))
        return [
            norm(x),
            *norm.add_and_norm(x, y),
            LayerNorm(ops, weight, bias, 1e-5)(x),
            GatedMLP(ops, *linears, swish)(x),
            GatedMLP(ops, *linears, gelu_tanh, limit=1.0)(x),
            ops.gated(gates[:, None], x, sigmoid),
            ops.gated(y, x, sigmoid),
        ]

    for found, wanted in zip(results(TritonOps()), results(TorchOps(Deterministic())), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_without_kernels_a_fused_sum_and_norm_are_those_of_torch() -> None:
    x, y = (some((5, 24), torch.device("cpu"), torch.bfloat16, seed) for seed in (1, 2))
    norm = RMSNorm(TorchOps(Deterministic()), weights(24, torch.device("cpu")), 1e-5)
    total, result = norm.add_and_norm(x, y)
    assert torch.equal(total, x + y) and torch.equal(result, norm(x + y))
