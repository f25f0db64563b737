"""Routing in groups chooses what `transformers` chooses, with the same weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kvtide.layers.backend.arithmetic import Batched
from kvtide.layers.backend.kernel_args import Routing, RoutingRule
from kvtide.layers.reference.moe_routing import route_scores

TOKENS, EXPERTS, WIDTH = 200, 12, 16


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_expert(routing: Routing) -> Tensor:
    """(tokens, experts): the weights of experts, 0 where not chosen."""
    return torch.zeros(TOKENS, EXPERTS).scatter(1, routing.experts, routing.weights)


def of_oracle(router: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        _, weights, experts = router(x)
    return torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)


@pytest.mark.parametrize("bias", [0.3, -5.0, 0.0], ids=["mixed", "negative", "none"])
@pytest.mark.parametrize(("groups", "allowed"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("renormalised", [True, False])
def test_groups_are_judged_by_their_two_best_and_the_bias_is_in_no_weight(
    bias: float, groups: int, allowed: int, renormalised: bool
) -> None:
    """A bias that makes all scores negative must not let experts of other groups in."""
    config = transformers.DeepseekV3Config(
        hidden_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=3, n_group=groups,
        topk_group=allowed, norm_topk_prob=renormalised, routed_scaling_factor=2.5,
    )  # fmt: skip
    router, x = DeepseekV3TopkRouter(config), randn(TOKENS, WIDTH, seed=1)
    router.weight.data = randn(EXPERTS, WIDTH, seed=2)
    biases = randn(EXPERTS, seed=3) * 0.3 + min(bias, 0.0) if bias else torch.zeros(EXPERTS)
    router.e_score_correction_bias.copy_(biases)
    choice = RoutingRule(3, groups, allowed, renormalised=renormalised, scale=2.5)
    routing = route_scores(Batched(), (x @ router.weight.T).sigmoid(), choice, biases)
    torch.testing.assert_close(by_expert(routing), of_oracle(router, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("groups", "allowed"), [(4, 2), (3, 1), (2, 2)])
def test_groups_are_judged_by_their_best_where_the_choice_says_so(
    groups: int, allowed: int
) -> None:
    config = transformers.DeepseekV2Config(
        hidden_size=WIDTH, num_attention_heads=4, n_routed_experts=EXPERTS, num_experts_per_tok=3,
        n_group=groups, topk_group=allowed, topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )  # fmt: skip
    router, x = DeepseekV2TopkRouter(config), randn(TOKENS, WIDTH, seed=1)
    router.weight.data = randn(EXPERTS, WIDTH, seed=2)
    choice = RoutingRule(3, groups, allowed, group_depth=1, renormalised=False, scale=1.5)
    routing = route_scores(Batched(), (x @ router.weight.T).softmax(-1), choice)
    torch.testing.assert_close(by_expert(routing), of_oracle(router, x), rtol=0, atol=1e-6)


def test_of_equal_experts_and_equal_groups_the_first_are_chosen() -> None:
    scores = torch.full((1, EXPERTS), 0.5)
    assert route_scores(Batched(), scores, RoutingRule(3)).experts.tolist() == [[0, 1, 2]]
    scores[0, 8:] = 0.6
    routing = route_scores(Batched(), scores, RoutingRule(5, groups=3, allowed=2))
    assert routing.experts.tolist() == [[8, 9, 10, 11, 0]]


def test_a_group_with_fewer_experts_than_it_is_judged_by_is_judged_by_all() -> None:
    scores = torch.full((1, EXPERTS), 0.5)
    scores[0, [4, 9]] = torch.tensor([0.6, 0.7])
    routing = route_scores(
        Batched(), scores, RoutingRule(2, groups=EXPERTS, allowed=2, group_depth=2)
    )
    assert routing.experts.tolist() == [[9, 4]]
