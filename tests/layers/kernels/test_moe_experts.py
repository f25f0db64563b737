"""Mixtures of experts as grouped GEMMs give what experts one by one give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.kernel_args import (
    ExpertActivation,
    ExpertGroup,
    ExpertWeights,
    Routing,
    RoutingRule,
)
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.backend.triton_ops import TritonOps
from kvtide.layers.elementwise import gelu_tanh, relu_squared, softmax
from kvtide.layers.kernels import moe_experts as kernels
from kvtide.layers.kernels.moe_experts import arrange, mix_experts
from kvtide.layers.moe import Experts
from kvtide.layers.reference import moe_experts as reference
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from tests.layers.kernels.repeating import same_again

SWISH = ExpertActivation()


@dataclass(frozen=True)
class Case:
    experts: int
    chosen: int
    inputs: int
    width: int
    gating: ExpertActivation = SWISH
    biased: bool = False


CASES = {
    "swish": Case(5, 2, 48, 32),
    "odd sizes": Case(7, 3, 40, 24),
    "no gate": Case(4, 2, 32, 40, ExpertActivation(relu_squared, gated=False)),
    "limits and biases": Case(
        4, 2, 32, 24, ExpertActivation(limit=0.7, gain=1.7, offset=1.0), biased=True
    ),
    "gelu, one each": Case(6, 1, 32, 32, ExpertActivation(gelu_tanh)),
}
LARGE = {
    "qwen3-30b": Case(128, 8, 2048, 768),
    "gpt-oss": Case(
        32, 4, 2880, 2880, ExpertActivation(limit=7.0, gain=1.702, offset=1.0), biased=True
    ),
    "nemotron": Case(128, 6, 2688, 1856, ExpertActivation(relu_squared, gated=False)),
}


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def made(case: Case, device: torch.device, dtype: torch.dtype) -> Experts:
    def stack(outputs: int, inputs: int, seed: int) -> ExpertWeights:
        shape = case.experts, outputs, inputs
        weight = randn(*shape, seed=seed, device=device, dtype=torch.float32) * inputs**-0.5
        bias = randn(*shape[:2], seed=seed + 1, device=device, dtype=dtype)
        return ExpertWeights(weight.to(dtype), bias if case.biased else None)

    outputs = case.width * (2 if case.gating.gated else 1)
    group = ExpertGroup(range(case.experts), ALONE)
    stacks = stack(outputs, case.inputs, 1), stack(case.inputs, case.width, 3)
    return Experts(
        group=group, gate_up=stacks[0], down=stacks[1], gating=case.gating, ops=TorchOps(Batched())
    )


def routed(case: Case, tokens: int, device: torch.device) -> Routing:
    order = randn(tokens, case.experts, seed=7, device=device, dtype=torch.float32).argsort(-1)
    weights = randn(tokens, case.chosen, seed=8, device=device, dtype=torch.float32).softmax(-1)
    return Routing(order[:, : case.chosen].contiguous(), weights)


def one_by_one(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """In fp32 over the same numbers."""

    def wide(stack: ExpertWeights) -> ExpertWeights:
        return ExpertWeights(
            stack.weight.float(), None if stack.bias is None else stack.bias.float()
        )

    exact = replace(experts, gate_up=wide(experts.gate_up), down=wide(experts.down))
    return reference.mix_experts(Batched(), exact, x.float(), routing)


@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_what_experts_one_by_one_give(
    case: str, tokens: int, device: torch.device
) -> None:
    given = CASES[case]
    experts, routing = made(given, device, torch.float32), routed(given, tokens, device)
    x = randn(tokens, given.inputs, seed=9, device=device, dtype=torch.float32)
    wanted, found = (
        one_by_one(experts, x, routing),
        same_again(lambda: mix_experts(experts, x, routing)),
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_with_many_pairs_there_may_be_gaps_between_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COUNTED", 16)
    case = CASES["swish"]
    experts, routing = made(case, device, torch.float32), routed(case, 21, device)
    x = randn(21, case.inputs, seed=9, device=device, dtype=torch.float32)
    wanted = one_by_one(experts, x, routing)
    torch.testing.assert_close(mix_experts(experts, x, routing), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["odd sizes", "no gate", "limits and biases"])
def test_tiles_may_be_fetched_by_their_numbers(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_EXACT", replace(kernels._EXACT, described=True))
    given = CASES[case]
    experts, routing = made(given, device, torch.float32), routed(given, 21, device)
    x = randn(21, given.inputs, seed=9, device=device, dtype=torch.float32)
    wanted = one_by_one(experts, x, routing)
    torch.testing.assert_close(mix_experts(experts, x, routing), wanted, rtol=0, atol=2e-5)


def test_half_precision_is_rounded_between_projections_alone(device: torch.device) -> None:
    """In fp16, which an interpreter multiplies rightly."""
    case = CASES["swish"]
    experts, routing = made(case, device, torch.float16), routed(case, 3, device)
    x = randn(3, case.inputs, seed=9, device=device, dtype=torch.float16)
    wanted, found = one_by_one(experts, x, routing), mix_experts(experts, x, routing)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tokens", [21])
def test_ranks_add_what_their_own_experts_give(tokens: int, device: torch.device) -> None:
    case = replace(CASES["limits and biases"], experts=6)
    experts, routing = made(case, device, torch.float32), routed(case, tokens, device)
    x = randn(tokens, case.inputs, seed=9, device=device, dtype=torch.float32)
    parts = []
    for rank in range(3):
        own = slice(2 * rank, 2 * rank + 2)
        stacks = {
            name: ExpertWeights(stack.weight[own], None if stack.bias is None else stack.bias[own])
            for name, stack in (("gate_up", experts.gate_up), ("down", experts.down))
        }
        group = ExpertGroup(range(own.start, own.stop), TensorRanks(rank, 3))
        parts.append(mix_experts(replace(experts, group=group, **stacks), x, routing))
    wanted = one_by_one(experts, x, routing)
    torch.testing.assert_close(sum(parts), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("counted", [8, 4096])
@pytest.mark.parametrize("own", [range(0, 9), range(3, 6)], ids=str)
def test_pairs_are_in_order_and_every_block_has_rows_of_one_expert(
    own: range, counted: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COUNTED", counted)
    chosen = torch.tensor([3, 0, 8, 3, 3, 4, 8, 3, 0, 3, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3])
    arranged = arrange(chosen.view(-1, 1).to(device), own, 16)
    pairs = [n for e in own for n in range(len(chosen)) if chosen[n] == e]
    assert arranged.order.tolist()[: len(pairs)] == pairs
    covered = []
    for expert, first, end in arranged.blocks.tolist():
        assert 0 <= end - first <= 16
        covered += range(first, end)
        assert all(chosen[pairs[at]] == own.start + expert for at in range(first, end))
    assert covered == list(range(len(pairs)))


def test_layers_leave_routes_and_experts_to_the_kernels(device: torch.device) -> None:
    case, ops = CASES["swish"], TritonOps()
    experts = made(case, device, torch.float32)
    x = randn(5, case.inputs, seed=9, device=device, dtype=torch.float32)
    logits = randn(5, case.experts, seed=10, device=device, dtype=torch.float32)
    by_scores = ops.route(logits, RoutingRule(case.chosen), softmax)
    by_logits = ops.route_by_top_softmax(logits, case.chosen)
    assert by_scores.experts.dtype == by_logits.experts.dtype == torch.int32
    torch.testing.assert_close(by_scores.weights, by_logits.weights)
    found = replace(experts, ops=ops)(x, by_scores)
    torch.testing.assert_close(found, one_by_one(experts, x, by_logits), rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 64, 300, 700, 3000])
@pytest.mark.parametrize("case", LARGE)
def test_published_experts_in_half_precision(case: str, tokens: int, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("an interpreter would take minutes: --device cuda")
    given = LARGE[case]
    experts, routing = made(given, device, torch.bfloat16), routed(given, tokens, device)
    x = randn(tokens, given.inputs, seed=9, device=device, dtype=torch.bfloat16)
    wanted, found = (
        one_by_one(experts, x, routing),
        same_again(lambda: mix_experts(experts, x, routing)),
    )
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
