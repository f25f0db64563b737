"""A norm by group and a gate as one kernel give what they give one after the other."""

from __future__ import annotations

import pytest
import torch

from kvtide.layers.backend.kernel_args import GatedNorm
from kvtide.layers.elementwise import rms_norm, sigmoid, swish
from kvtide.layers.kernels.recurrent.gated_norm import gated_norm

CASES = {
    "no norm": (4, 24, None, True, True),
    "by head, shared weights": (6, 16, 1, True, True),
    "by head, σ": (3, 40, 1, True, False),
    "by group": (3, 72, 2, True, True),
    "by group, gate first": (2, 600, 2, False, True),
    "all at once": (1, 1100, 2, False, True),
}
"""Groups, channels of each, axes of the weights, whether the norm is first, whether it is swish."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_both_give(
    case: str, dtype: torch.dtype, device: torch.device
) -> None:
    groups, width, axes, norm_first, swished = CASES[case]
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(5, groups * width, generator=generator).to(device)
    gates = torch.randn(5, groups * width + 8, generator=generator).to(device, dtype)[:, 3:-5]
    weight = None
    if axes is not None:
        shape = (width,) if axes == 1 else (groups, width)
        weight = torch.randn(shape, generator=generator).to(device)
    found = gated_norm(
        mixed, gates, GatedNorm(groups, weight, 1e-3, norm_first, swish if swished else sigmoid)
    )
    wanted, opened = mixed, (swish if swished else sigmoid)(gates.float())
    if not norm_first:
        wanted = wanted * opened
    if weight is not None:
        wanted = rms_norm(wanted.unflatten(1, (groups, width)), weight, 1e-3).flatten(1)
    if norm_first:
        wanted = wanted * opened
    assert found.dtype is dtype
    close = 2e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), wanted, rtol=close, atol=close)
