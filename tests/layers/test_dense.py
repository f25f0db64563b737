"""Projections in fp32 without GEMMs in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers import choose
from kvtide.layers.dense import WideLinear
from kvtide.layers.elementwise import split_bf16


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_halves_make_the_weight() -> None:
    weight = randn(24, 40, seed=1)
    high, low = split_bf16(weight).float().chunk(2)
    assert ((high + low - weight).abs() <= weight.abs() * 2**-16).all()
    assert not torch.equal(high, weight)


def test_what_was_saved_in_bf16_has_one_half() -> None:
    weight = randn(24, 40, seed=1).bfloat16()
    assert torch.equal(split_bf16(weight.float()), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_the_result_is_that_of_a_product_in_fp32(
    dtype: torch.dtype, saved: torch.dtype, device: torch.device
) -> None:
    x, weight = randn(48, 256, seed=1).to(dtype), randn(64, 256, seed=2).to(saved).float()
    wanted = x.double() @ weight.double().T
    found = WideLinear(choose(False, device), weight.to(device), x.dtype)(x.to(device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=5e-4)
