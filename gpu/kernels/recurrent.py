"""Causal convolutions, Mamba2 (SSD), gated delta and KDA at published shapes.

ROWS: (name, setup), where setup() gives the call to time, the bytes it must move and its FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import ConvWeights, DeltaGates, GatedNorm, ScanParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels.recurrent import ssd_scan as ssd_scan_kernels
from kvtide.layers.kernels.recurrent.causal_conv import causal_conv
from kvtide.layers.kernels.recurrent.gated_delta import gated_delta
from kvtide.layers.kernels.recurrent.gated_norm import gated_norm
from kvtide.layers.kernels.recurrent.ssd_scan import ssd_scan
from kvtide.layers.step import Rows, Step
from kvtide.spec import DType, Entry, Field, PoolSpec

Ready = tuple[Callable[[], object], int, int]
Lengths = tuple[int, ...]

DEVICE = torch.device("cuda")
PAGE = 64
PAST = 640
STEPS: dict[str, Lengths] = {
    "8192": (8192,),
    "4 x 2048": (2048,) * 4,
    "decode 64": (1,) * 64,
    "decode 1": (1,),
}


def step(fields: tuple[Field, ...], lengths: Lengths) -> tuple[ForwardPass, Place]:
    """Sequences of so many new tokens each, with a state to go on from."""
    place = Place(PoolSpec("state", (0,), Entry(fields), tail_entries=1), 0)
    view = {
        field.name: randn(
            len(lengths), 1, *field.shape, dtype=getattr(torch, field.dtype.torch_name)
        )
        for field in fields
    }
    rows, start = [], 0
    for number, count in enumerate(lengths):
        slots = torch.full((-(-(PAST + count) // PAGE),), number, device=DEVICE)
        rows.append(Rows(start, start + count, PAST, {"state": slots}))
        start += count
    at = torch.arange(start, device=DEVICE)
    made = Step(at, at, tuple(rows), PAGE, lambda pool, layer: view, lambda layer: None)
    return ForwardPass(made), place


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype) * 0.5


def convolution(lengths: Lengths, channels: int = 8192, taps: int = 4) -> Ready:
    field = Field("conv", (channels, taps - 1), DType.BF16)
    run, place = step((field,), lengths)
    conv = ConvWeights(randn(taps, channels, dtype=torch.float32), None, (field,))
    inputs = randn(sum(lengths), channels)
    tails = 2 * len(lengths) * channels * (taps - 1) * 2
    moved = 2 * 2 * inputs.numel() + tails
    return partial(causal_conv, run, place, conv, inputs, swished=True), moved, 0


def mamba(
    lengths: Lengths, heads: int = 128, dim: int = 64, width: int = 128, groups: int = 8
) -> Ready:
    run, place = step((Field("ssm", (heads, dim, width), DType.FP32),), lengths)
    tokens = sum(lengths)
    convolved, dt = (
        randn(tokens, heads * dim + 2 * groups * width),
        randn(tokens, heads),
    )
    by_head = partial(randn, heads, dtype=torch.float32)
    how = ScanParams(by_head(), -by_head().abs(), by_head(), (0.0, float("inf")))
    states = 2 * 4 * len(lengths) * heads * dim * width
    moved = 2 * (convolved.numel() + dt.numel()) + 4 * tokens * heads * dim + states
    chunk = min(64, max(lengths))
    operations = 2 * tokens * heads * (chunk * width + chunk * dim + 2 * dim * width)
    return partial(ssd_scan, run, place, how, convolved, dt), moved, operations


def delta(
    lengths: Lengths, *, key_heads: int, by_channel: bool, heads: int = 32, dim: int = 128
) -> Ready:
    run, place = step((Field("delta", (heads, dim, dim), DType.FP32),), lengths)
    tokens, each = sum(lengths), dim if by_channel else 1
    convolved = randn(tokens, (2 * key_heads + heads) * dim)
    dt, strength = randn(tokens, heads * each), randn(tokens, heads)
    bias, decay = (
        randn(heads * each, dtype=torch.float32),
        randn(heads, dtype=torch.float32),
    )
    gates = DeltaGates(dt, bias, -decay.abs(), strength)
    states = 2 * 4 * len(lengths) * heads * dim * dim
    moved = 2 * (convolved.numel() + dt.numel()) + 4 * tokens * heads * dim + states
    chunk = min(64, max(lengths))
    operations = 2 * tokens * heads * (3 * dim * dim + 4 * chunk * dim)
    return partial(gated_delta, run, place, convolved, gates), moved, operations


def gates(lengths: Lengths, groups: int, width: int) -> Ready:
    tokens = sum(lengths)
    mixed, given = (
        randn(tokens, groups * width, dtype=torch.float32),
        randn(tokens, groups * width),
    )
    how = GatedNorm(groups, randn(groups, width, dtype=torch.float32), 1e-6, norm_first=False)
    return partial(gated_norm, mixed, given, how), 8 * tokens * groups * width, 0


def narrow(make: Callable[[Lengths], Ready], lengths: Lengths) -> Ready:
    """With bf16 intermediates in place of tf32."""
    call, moved, operations = make(lengths)

    def narrowed() -> object:
        before, ssd_scan_kernels.WIDE = ssd_scan_kernels.WIDE, False
        try:
            return call()
        finally:
            ssd_scan_kernels.WIDE = before

    return narrowed, moved, operations


KINDS: dict[str, Callable[[Lengths], Ready]] = {
    "causal conv, 8192 channels": convolution,
    "Mamba2 SSD, 128 heads of 64 x 128, 8 groups": mamba,
    "gated delta, 32 (16) heads of 128 x 128": partial(delta, key_heads=16, by_channel=False),
    "KDA, 32 heads of 128 x 128": partial(delta, key_heads=32, by_channel=True),
    "gated norm, 8 groups of 1024": partial(gates, groups=8, width=1024),
}
ROWS: list[tuple[str, Callable[[], Ready]]] = [
    (f"{kind}: {name}", partial(make, lengths))
    for kind, make in KINDS.items()
    for name, lengths in STEPS.items()
]
ROWS += [
    (f"{kind}, in bf16: {name}", partial(narrow, KINDS[kind], STEPS[name]))
    for kind in list(KINDS)[1:4]
    for name in ("8192", "4 x 2048")
]
