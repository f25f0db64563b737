"""Routing as one kernel chooses what the torch code chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Deterministic
from kvtide.layers.backend.kernel_args import FixedExperts, Routing, RoutingRule
from kvtide.layers.elementwise import Activation, sigmoid, softmax, sqrt_softplus
from kvtide.layers.kernels import moe_routing
from kvtide.layers.reference.indexer import top_k
from kvtide.layers.reference.moe_routing import route, route_by_top_softmax

PLAIN = Deterministic()
"""Runs no kernels, wherever it is."""
CHOICES = {
    "few of many": (40, RoutingRule(3)),
    "scaled, as they are": (64, RoutingRule(8, renormalised=False, scale=2.5)),
    "groups by their two best": (64, RoutingRule(6, groups=8, allowed=4, scale=2.5)),
    "groups by their best": (32, RoutingRule(4, groups=4, allowed=2, group_depth=1)),
    "groups of one": (16, RoutingRule(2, groups=16, allowed=4)),
    "one": (5, RoutingRule(1)),
}


def randn(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def same(found: Routing, wanted: Routing) -> None:
    assert found.experts.tolist() == wanted.experts.tolist()
    torch.testing.assert_close(found.weights, wanted.weights, rtol=2e-5, atol=1e-7)


@pytest.mark.quick
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("score", [sigmoid, softmax, sqrt_softplus])
@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_chooses_what_torch_chooses(
    case: str, score: Activation, biased: bool, device: torch.device
) -> None:
    experts, choice = CHOICES[case]
    logits = randn(7, experts, seed=1, device=device) * 4
    bias = randn(experts, seed=2, device=device) - 0.5 if biased else None
    assert moe_routing.has_kernel(experts, choice, score)
    found = moe_routing.route(logits, choice, score, bias)
    same(found, route(PLAIN, logits, choice, score, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_of_the_best(dtype: torch.dtype, device: torch.device) -> None:
    """In bf16 many logits are equal."""
    logits = randn(9, 128, seed=3, device=device).to(dtype)
    found = moe_routing.route(logits, RoutingRule(5), None, softmax_of_best=True)
    same(found, route_by_top_softmax(PLAIN, logits, 5))


@pytest.mark.quick
@pytest.mark.parametrize("beside", [1, 3])
@pytest.mark.parametrize("case", CHOICES)
def test_experts_beside_have_the_next_numbers_and_a_weight_of_one(
    case: str, beside: int, device: torch.device
) -> None:
    experts, choice = CHOICES[case]
    logits = randn(7, experts, seed=1, device=device) * 4
    bias = randn(experts, seed=2, device=device)
    found = moe_routing.route(logits, choice, sigmoid, bias, beside=beside)
    assert found.experts.shape == found.weights.shape == (7, choice.count + beside)
    assert found.experts[:, choice.count :].tolist() == [[*range(experts, experts + beside)]] * 7
    assert bool((found.weights[:, choice.count :] == 1).all())
    same(found, route(PLAIN, logits, choice, sigmoid, bias, beside=beside))
    before = Routing(found.experts[:, : choice.count], found.weights[:, : choice.count])
    same(before, moe_routing.route(logits, choice, sigmoid, bias))


@pytest.mark.quick
@pytest.mark.parametrize("beside", [0, 2])
@pytest.mark.parametrize("kept_as", [torch.int64, torch.int32])
@pytest.mark.parametrize("score", [sigmoid, softmax, sqrt_softplus])
@pytest.mark.parametrize("case", ["few of many", "scaled, as they are", "one"])
def test_experts_of_a_table_have_the_weights_that_torch_gives_them(
    case: str, score: Activation, kept_as: torch.dtype, beside: int, device: torch.device
) -> None:
    experts, choice = CHOICES[case]
    logits = (randn(experts, 9, seed=1, device=device) * 4).T
    table = randn(30, experts, seed=2, device=device).argsort(-1)[:, : choice.count].contiguous()
    tokens = torch.tensor([29, 0, 7, 7, 1, 12, 28, 3, 0], device=device).to(kept_as)
    fixed = FixedExperts(table.to(kept_as), tokens)
    found = moe_routing.route(logits, choice, score, fixed=fixed, beside=beside)
    assert found.experts.dtype == torch.int32
    same(found, route(PLAIN, logits, choice, score, fixed=fixed, beside=beside))


def test_of_equals_the_first_are_chosen(device: torch.device) -> None:
    logits = randn(9, 48, seed=4, device=device).round()
    logits[0] = 0.5
    logits[1, ::2] = -0.0
    logits[2, 7:] = -torch.inf
    found = moe_routing.route(logits, RoutingRule(12, renormalised=False), None)
    assert found.experts.tolist() == top_k(logits, 12).tolist()
    assert torch.equal(found.weights, logits.gather(1, top_k(logits, 12)))


def test_what_is_no_number_leads_to_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 48), torch.nan, device=device)
    found = moe_routing.route(logits, RoutingRule(4), sigmoid).experts
    assert all(0 <= expert < 48 for expert in found.flatten().tolist())


def test_scores_far_from_zero_are_exact(device: torch.device) -> None:
    logits = torch.linspace(-30, 30, 64, device=device)[None]
    choice = RoutingRule(64, renormalised=False)
    found = moe_routing.route(logits, choice, sqrt_softplus)
    same(found, route(PLAIN, logits, choice, sqrt_softplus))


def test_groups_that_are_no_powers_of_two_are_left_to_torch() -> None:
    assert not moe_routing.has_kernel(12, RoutingRule(3, groups=4, allowed=2), sigmoid)
    assert not moe_routing.has_kernel(2048, RoutingRule(3), sigmoid)
    assert not moe_routing.has_kernel(64, RoutingRule(3), torch.cos)
