"""Mamba2's recurrence as a kernel gives what the plain sums give, from state to state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import ScanParams
from kvtide.layers.elementwise import softplus
from kvtide.layers.kernels.recurrent.ssd_scan import ssd_scan
from kvtide.layers.reference.ssd_scan import ScanInput, scan_tokens
from kvtide.spec import DType, Field
from tests.layers.kernels.recurring import STEPS, World, assert_within_a_rounding, randn, world


@dataclass(frozen=True)
class Case:
    heads: int
    dim: int
    width: int
    groups: int
    limits: tuple[float, float] = (0.0, float("inf"))
    steepest: float = 0.5

    def how(self, generator: torch.Generator, device: torch.device) -> ScanParams:
        decay = -torch.rand(self.heads, generator=generator) * self.steepest
        bias, skip = (randn(generator, self.heads).to(device) for _ in range(2))
        return ScanParams(bias, decay.to(device), skip[:, None], self.limits)


CASES = {
    "one group": Case(2, 16, 16, 1),
    "groups, odd sizes": Case(4, 24, 20, 2),
    "several blocks, bounded steps": Case(2, 64, 16, 2, limits=(0.1, 0.7)),
    "forgets at once": Case(2, 16, 16, 1, steepest=300.0),
}
LARGE = {"nemotron-h": Case(128, 64, 128, 8), "falcon-h1": Case(32, 64, 256, 1)}


def plain(one: World, case: Case, how: ScanParams, convolved: Tensor, dt: Tensor) -> list[Tensor]:
    """Outputs of all tokens, and the state of every sequence, in fp32 a token at a time."""
    inner, shared = case.heads * case.dim, case.groups * case.width
    x, b, c = convolved.float().split((inner, shared, shared), -1)
    x = x.unflatten(1, (case.heads, case.dim))
    b, c = (t.unflatten(1, (case.groups, case.width)) for t in (b, c))
    dt = softplus(dt.float() + how.dt_bias).clamp(*case.limits)
    outputs, states = [], []
    for rows, state in zip(one.rows, one.states, strict=True):
        ours = slice(rows.start, rows.end)
        shape = (case.heads, case.dim, case.width)
        before = x.new_zeros(shape) if state is None else state["ssm"].float()
        tokens = ScanInput(x[ours], dt[ours], how.decay, b[ours], c[ours])
        output, after = scan_tokens(tokens, before)
        outputs.append((output + x[ours] * how.skip).flatten(1))
        states.append(after)
    return [torch.cat(outputs), *states]


def both(
    case: Case,
    step: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    kept: DType = DType.FP32,
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and states: found, and wanted."""
    field = Field("ssm", (case.heads, case.dim, case.width), kept)
    one = world((field,), step, device)
    generator = torch.Generator().manual_seed(11)
    how, count = case.how(generator, device), one.rows[-1].end
    channels = case.heads * case.dim + 2 * case.groups * case.width
    convolved = randn(generator, count, channels).to(device, dtype)
    dt = randn(generator, count, case.heads + 3).to(device, dtype)[:, 1:-2]
    wanted = plain(one, case, how, convolved, dt)
    found = [one.gone_on(lambda: ssd_scan(one.run, one.place, how, convolved, dt))]
    found += [one.after(number)["ssm"].float() for number in range(len(step))]
    return list(zip(found, wanted, strict=True))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_plain_sums_give(case: str, step: str, device: torch.device) -> None:
    # Of long sums the differences lose a few bits.
    close = 1e-4 if CASES[case].steepest > 1 else 2e-5
    for found, wanted in both(CASES[case], STEPS[step], device):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def test_a_state_may_be_kept_in_another_precision(device: torch.device) -> None:
    for step in STEPS.values():
        pairs = both(CASES["one group"], step, device, kept=DType.BF16)
        torch.testing.assert_close(*pairs[0], rtol=2e-5, atol=2e-5)
        for found, wanted in pairs[1:]:
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2e-5)


def test_rows_without_slots_write_nothing(device: torch.device) -> None:
    case = CASES["one group"]
    field = Field("ssm", (case.heads, case.dim, case.width), DType.FP32)
    one = world((field,), [(0, 1), (0, 1)], device, kept=False)
    how = case.how(torch.Generator().manual_seed(1), device)
    ones = torch.ones(2, case.heads * case.dim + 2 * case.width, device=device)
    found = ssd_scan(one.run, one.place, how, ones, ones[:, : case.heads])
    assert bool(found.isfinite().all())
    assert bool(one.buffers.view("state", 0)["ssm"].isnan().all())


@pytest.mark.parametrize("case", LARGE)
def test_published_heads_in_half_precision(case: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter has no such GEMM: --device cuda")
    for step in ([(0, 1100), (77, 1), (300, 500)], [(40 + i, 1) for i in range(64)]):
        # With more columns than that, not all of it is in tf32.
        times = 1.0 if LARGE[case].width <= 128 else 1.5
        assert_within_a_rounding(case, both(LARGE[case], step, device, torch.bfloat16), times)
