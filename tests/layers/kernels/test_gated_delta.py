"""The gated delta rule as kernels gives what the plain sums give, from state to state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import DeltaGates
from kvtide.layers.elementwise import l2norm, sigmoid, softplus
from kvtide.layers.kernels.recurrent.gated_delta import gated_delta
from kvtide.layers.reference.gated_delta import DeltaInput, delta_tokens
from kvtide.spec import DType, Field
from tests.layers.kernels.recurring import STEPS, World, assert_within_a_rounding, randn, world


@dataclass(frozen=True)
class Case:
    """`alike`: how much all keys have in common."""

    key_heads: int
    heads: int
    keys: int
    values: int
    by_channel: bool = False
    steepest: float = 0.5
    alike: float = 0.0

    @property
    def field(self) -> Field:
        return Field("delta", (self.heads, self.keys, self.values), DType.FP32)

    def inputs(
        self, count: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, DeltaGates]:
        generator = torch.Generator().manual_seed(11)
        channels = self.heads * (self.keys if self.by_channel else 1)
        key_width = self.key_heads * self.keys
        convolved = randn(generator, count, 2 * key_width + self.heads * self.values)
        convolved[:, key_width : 2 * key_width] += self.alike
        dt = randn(generator, count, channels).to(device, dtype)
        # Most strengths near one.
        beta = randn(generator, count, self.heads + 2).to(device, dtype)[:, :-2] * 2 + 2
        decay = -torch.rand(self.heads, generator=generator).to(device) * self.steepest
        bias = randn(generator, channels).to(device)
        return convolved.to(device, dtype), DeltaGates(dt, bias, decay, beta)


CASES = {
    "even": Case(2, 2, 16, 16),
    "even, shared keys, odd sizes": Case(1, 2, 24, 40),
    "even, forgets at once": Case(1, 1, 16, 16, steepest=300.0),
    "even, keys alike": Case(1, 1, 16, 16, steepest=1e-3, alike=10.0),
    "by channel": Case(2, 2, 16, 16, by_channel=True),
    "by channel, odd sizes": Case(1, 1, 24, 40, by_channel=True),
    "by channel, forgets at once": Case(1, 1, 16, 16, by_channel=True, steepest=300.0),
    "by channel, keys alike": Case(1, 1, 16, 16, by_channel=True, steepest=1e-3, alike=10.0),
}
LARGE = {
    "qwen3-next": Case(16, 32, 128, 128),
    "kimi-linear": Case(32, 32, 128, 128, by_channel=True),
    "qwen3-next, keys alike": Case(16, 32, 128, 128, steepest=1e-3, alike=3.0),
}


def plain(one: World, case: Case, convolved: Tensor, gates: DeltaGates) -> list[Tensor]:
    """Outputs of all tokens, and the state of every sequence, in fp32 a token at a time."""
    width = case.key_heads * case.keys
    query, key, value = convolved.float().split((width, width, case.heads * case.values), -1)
    value = value.unflatten(1, (case.heads, case.values))
    query, key = (l2norm(t.unflatten(1, (-1, case.keys))) for t in (query, key))
    each = case.heads // case.key_heads
    query, key = (t.repeat_interleave(each, 1) for t in (query * case.keys**-0.5, key))
    dt = softplus(gates.dt.float() + gates.dt_bias)
    log_decay = gates.decay[:, None] * dt.unflatten(1, (case.heads, -1))
    tokens = DeltaInput(query, key, value, log_decay, sigmoid(gates.beta))
    outputs, states = [], []
    for rows, state in zip(one.rows, one.states, strict=True):
        zeros = value.new_zeros(case.heads, case.keys, case.values)
        before = zeros if state is None else state["delta"]
        output, after = delta_tokens(tokens.span(rows.start, rows.end), before)
        outputs.append(output)
        states.append(after)
    return [torch.cat(outputs), *states]


def both(
    case: Case,
    step: list[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and states: found, and wanted."""
    one = world((case.field,), step, device)
    convolved, gates = case.inputs(one.rows[-1].end, device, dtype)
    wanted = plain(one, case, convolved, gates)
    found = [one.gone_on(lambda: gated_delta(one.run, one.place, convolved, gates))]
    found += [one.after(number)["delta"] for number in range(len(step))]
    return list(zip(found, wanted, strict=True))


@pytest.mark.quick
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_plain_sums_give(case: str, step: str, device: torch.device) -> None:
    for found, wanted in both(CASES[case], STEPS[step], device):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_rows_without_slots_write_nothing(device: torch.device) -> None:
    case = CASES["even"]
    one = world((case.field,), [(0, 1), (0, 1)], device, kept=False)
    found = gated_delta(one.run, one.place, *case.inputs(2, device, torch.float32))
    assert bool(found.isfinite().all())
    assert bool(one.buffers.view("state", 0)["delta"].isnan().all())


@pytest.mark.parametrize("case", LARGE)
def test_published_heads_in_half_precision(case: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter has no such GEMM: --device cuda")
    for step in ([(0, 1100), (77, 1), (300, 500)], [(40 + i, 1) for i in range(64)]):
        assert_within_a_rounding(case, both(LARGE[case], step, device, torch.bfloat16))
