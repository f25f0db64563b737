"""Routing as one device program chooses what the torch code chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtide.layers.arithmetic import Deterministic
from kvtide.layers.elementary import Activation, sigmoid, softmax, sqrt_softplus
from kvtide.layers.moe import Choice, Routing, route_by_top_softmax, score_and_route
from kvtide.layers.programs import routing
from kvtide.layers.selecting import top

PLAIN = Deterministic()
"""Runs no programs, wherever it is."""
CHOICES = {
    "few of many": (40, Choice(3)),
    "scaled, as they are": (64, Choice(8, renormalised=False, scale=2.5)),
    "groups by their two best": (64, Choice(6, groups=8, allowed=4, scale=2.5)),
    "groups by their best": (32, Choice(4, groups=4, allowed=2, group_depth=1)),
    "groups of one": (16, Choice(2, groups=16, allowed=4)),
    "one": (5, Choice(1)),
}


def drawn(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def same(found: Routing, wanted: Routing) -> None:
    assert found.experts.tolist() == wanted.experts.tolist()
    torch.testing.assert_close(found.shares, wanted.shares, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("score", [sigmoid, softmax, sqrt_softplus])
@pytest.mark.parametrize("case", CHOICES)
def test_the_program_chooses_what_torch_chooses(
    case: str, score: Activation, biased: bool, device: torch.device
) -> None:
    experts, choice = CHOICES[case]
    logits = drawn(7, experts, seed=1, device=device) * 4
    bias = drawn(experts, seed=2, device=device) - 0.5 if biased else None
    assert routing.takes(experts, choice, score)
    found = routing.route(logits, choice, score, bias)
    same(found, score_and_route(PLAIN, logits, choice, score, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_softmax_of_the_best(dtype: torch.dtype, device: torch.device) -> None:
    """In bf16 many logits are equal."""
    logits = drawn(9, 128, seed=3, device=device).to(dtype)
    found = routing.route(logits, Choice(5), None, softmax_of_best=True)
    same(found, route_by_top_softmax(PLAIN, logits, 5))


def test_of_equals_the_first_are_chosen(device: torch.device) -> None:
    logits = drawn(9, 48, seed=4, device=device).round()
    logits[0] = 0.5
    logits[1, ::2] = -0.0
    logits[2, 7:] = -torch.inf
    found = routing.route(logits, Choice(12, renormalised=False), None)
    assert found.experts.tolist() == top(logits, 12).tolist()
    assert torch.equal(found.shares, logits.gather(1, top(logits, 12)))


def test_what_is_no_number_leads_to_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 48), torch.nan, device=device)
    found = routing.route(logits, Choice(4), sigmoid).experts
    assert all(0 <= expert < 48 for expert in found.flatten().tolist())


def test_scores_far_from_zero_are_exact(device: torch.device) -> None:
    logits = torch.linspace(-30, 30, 64, device=device)[None]
    choice = Choice(64, renormalised=False)
    found = routing.route(logits, choice, sqrt_softplus)
    same(found, score_and_route(PLAIN, logits, choice, sqrt_softplus))


def test_groups_that_are_no_powers_of_two_are_left_to_torch() -> None:
    assert not routing.takes(12, Choice(3, groups=4, allowed=2), sigmoid)
    assert not routing.takes(2048, Choice(3), sigmoid)
    assert not routing.takes(64, Choice(3), torch.cos)
