"""A causal convolution as a kernel gives what the plain sums give, and keeps the same."""

from __future__ import annotations

import pytest
import torch

from kvtide.layers.elementwise import swish
from kvtide.layers.kernels.recurrent.causal_conv import causal_conv
from kvtide.layers.reference.causal_conv import convolve as one_sequence
from kvtide.spec import DType, Field
from kvtide.tiers import Layout
from tests.layers.kernels.recurring import STEPS, convolution, randn, world

PARTS = {"one": (24,), "three": (160, 24, 24), "several blocks": (300, 130, 8)}


def compared(
    parts: tuple[int, ...],
    step: list[tuple[int, int]],
    device: torch.device,
    *,
    taps: int = 4,
    bias: bool = True,
    swished: bool = True,
    kept: DType = DType.FP32,
    dtype: torch.dtype = torch.float32,
    layout: Layout = Layout.PAGE_FIRST_DIRECT,
    close: float = 2e-6,
) -> None:
    tail, beside = taps - 1, Field("other", (3, 4, 2), DType.FP32)
    shapes = [(width, tail) for width in parts] if tail else []
    fields = [Field(f"conv_{i}", shape, kept) for i, shape in enumerate(shapes)]
    one = world((*fields, beside), step, device, layout)
    generator = torch.Generator().manual_seed(7)
    weights = randn(generator, taps, sum(parts)).to(device)
    biases = randn(generator, sum(parts)).to(device) if bias else None
    conv = convolution(weights, biases, fields)
    count = one.rows[-1].end
    # Beside other columns, as a projection gives them.
    inputs = randn(generator, count, sum(parts) + 5).to(device, dtype)[:, 2:-3]
    found = causal_conv(one.run, one.place, conv, inputs, swished=swished)
    assert found.dtype is dtype
    wide = conv.rounded(one.run, one.place, inputs).float()
    for number, (rows, state) in enumerate(zip(one.rows, one.states, strict=True)):
        wanted, kept_tail = one_sequence(conv, wide[rows.start : rows.end], state)
        wanted = swish(wanted) if swished else wanted
        ours = found[rows.start : rows.end].float()
        torch.testing.assert_close(ours, wanted, rtol=close, atol=close)
        for name, value in kept_tail.items():
            assert torch.equal(one.after(number)[name], value.to(one.after(number)[name].dtype))


@pytest.mark.quick
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("parts", PARTS)
def test_sums_and_tails_are_the_plain_ones(parts: str, step: str, device: torch.device) -> None:
    compared(PARTS[parts], STEPS[step], device)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_any_number_of_taps(taps: int, device: torch.device) -> None:
    compared((20, 8), STEPS["all at once"], device, taps=taps, bias=False, swished=False)


@pytest.mark.parametrize("layout", Layout)
def test_any_layout_of_pages(layout: Layout, device: torch.device) -> None:
    compared((20, 8), STEPS["all at once"], device, layout=layout)


@pytest.mark.quick
@pytest.mark.parametrize("kept", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_kept_may_be_less_precise(kept: DType, step: str, device: torch.device) -> None:
    compared((20, 8), STEPS[step], device, kept=kept)


def test_half_precision(device: torch.device) -> None:
    for step in STEPS.values():
        compared((20,), step, device, dtype=torch.bfloat16, kept=DType.BF16, close=2**-7)


def test_rows_without_slots_write_nothing(device: torch.device) -> None:
    field = Field("conv", (8, 3), DType.FP32)
    one = world((field,), [(0, 1), (0, 1)], device, kept=False)
    conv = convolution(torch.ones(4, 8, device=device), None, [field])
    found = causal_conv(one.run, one.place, conv, torch.ones(2, 8, device=device), swished=False)
    assert bool((found == 1).all())
    assert bool(one.buffers.view("state", 0)["conv"].isnan().all())


def test_many_channels_on_a_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    for step in ([(0, 3000), (77, 1), (300, 500)], [(40 + i, 1) for i in range(64)]):
        parts = (8192, 1024, 1024)
        compared(parts, step, device, dtype=torch.bfloat16, kept=DType.BF16, close=2**-7)
