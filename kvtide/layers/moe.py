"""Mixtures of experts: routers, experts, and MLPs that every token goes to.

Every rank computes all routes and has a shard of the experts.

A shared MLP is a sum over its channels. Where kernels run on one rank, it is cut into experts of
the same stack, which every token goes to with a weight of one. The mixture then takes no more
launches than the experts alone. Elsewhere the MLP is computed and added by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import (
    ExpertActivation,
    ExpertGroup,
    ExpertStack,
    ExpertWeights,
    FixedExperts,
    Routing,
    RoutingRule,
)
from kvtide.layers.backend.ops import Ops
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import Linear, WideLinear
from kvtide.layers.elementwise import Activation, sigmoid

CORRECTION_BIAS = "e_score_correction_bias"


class Router:
    """Scores the experts of every token in fp32, and selects by the scores.

    bias   name of a learned bias that counts in the selection and not in the weights, or None
    table  name of a table with the experts of every token id, which replaces the selection
    """

    def __init__(
        self,
        blueprint: Blueprint,
        rule: RoutingRule,
        score: Activation = sigmoid,
        bias: str | None = CORRECTION_BIAS,
        table: str | None = None,
    ) -> None:
        self.ops, self.rule, self.score = blueprint.ops, rule, score
        weight = blueprint.tensor("weight", torch.float32)
        self.linear = WideLinear(self.ops, weight, blueprint.dtype)
        self.bias = None if bias is None else blueprint.tensor(bias, torch.float32)
        self.table = None if table is None else blueprint.tensor(table, torch.int64)
        self._check(blueprint)

    @property
    def experts(self) -> int:
        return self.linear.outputs

    def __call__(self, x: Tensor, tokens: Tensor | None = None, beside: int = 0) -> Routing:
        """The experts of the rows of x, whose `tokens` a table needs; `Ops.route` has `beside`."""
        fixed = None
        if self.table is not None:
            assert tokens is not None, "a router with a table has to be given the tokens"
            fixed = FixedExperts(self.table, tokens)
        how = (self.rule, self.score, self.bias)
        return self.ops.route(self.linear(x), *how, fixed=fixed, beside=beside)

    def _check(self, blueprint: Blueprint) -> None:
        rule, (each, rest) = self.rule, divmod(self.experts, self.rule.groups)
        if rest or rule.allowed > rule.groups or rule.count > rule.allowed * each:
            raise blueprint.config.refusal(
                f"{rule.count} of {self.experts} experts cannot be chosen from {rule.allowed} "
                f"of {rule.groups} groups; use the numbers of experts for a token, groups and "
                "allowed groups that the checkpoint was made with"
            )


class SharedMLP(Protocol):
    """Two projections: the first one gives gate and up side by side, or up alone."""

    @property
    def first(self) -> Linear: ...

    @property
    def down(self) -> Linear: ...

    @property
    def activation(self) -> Activation: ...

    @property
    def limit(self) -> float | None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def experts_of_mlp(
    mlp: SharedMLP, width: int, gating: ExpertActivation
) -> list[tuple[Linear, Linear]]:
    """Experts of this width and gating that add up to the MLP.

    None if it is no whole number of them, has another gating, or biases.
    """
    channels, arithmetic = mlp.down.weight.shape[1], mlp.down.arithmetic
    halves = len(mlp.first.weight) // channels
    same = gating == ExpertActivation(mlp.activation, gated=halves == 2, limit=mlp.limit)
    biased = mlp.first.bias is not None or mlp.down.bias is not None
    if not same or biased or channels % width:
        return []
    firsts = mlp.first.weight.unflatten(0, (halves, -1, width)).unbind(1)
    pairs = zip(firsts, mlp.down.weight.split(width, dim=1), strict=True)
    return [
        (Linear(arithmetic, first.flatten(0, 1)), Linear(arithmetic, down)) for first, down in pairs
    ]


def stack_experts(projections: Iterable[Linear], count: int) -> ExpertWeights:
    """One tensor of `count` projections; each is released before the next one is read."""
    stack: ExpertWeights | None = None
    for number, one in enumerate(projections):
        stack = stack or _empty(one, count)
        stack.weight[number] = one.weight
        assert (one.bias is None) == (stack.bias is None), "some have a bias and some do not"
        if stack.bias is not None and one.bias is not None:
            stack.bias[number] = one.bias
    assert stack is not None
    return stack


def _empty(like: Linear, count: int) -> ExpertWeights:
    weight = like.weight.new_empty((count, *like.weight.shape))
    bias = None if like.bias is None else like.bias.new_empty((count, *like.bias.shape))
    return ExpertWeights(weight, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(ExpertStack):
    """The experts of a layer, as its checkpoint has them."""

    ops: Ops

    @classmethod
    def numbered(
        cls,
        blueprint: Blueprint,
        count: int,
        *names: str,
        limit: float | None = None,
        shared: SharedMLP | None = None,
    ) -> Experts:
        """Of weights for every expert, numbered from 0 under the blueprint's name.

        `names` are those of gate, up and down, if not the usual ones, or of up and down alone. A
        `shared` MLP becomes the `beside` experts of the stack where that is possible.
        """
        *first, last = names or ("gate_proj", "up_proj", "down_proj")
        group = ExpertGroup.of(blueprint.config, blueprint.ranks, count)
        each = [blueprint.under(str(number)) for number in group.own]
        gating = ExpertActivation(blueprint.activation(), gated=len(first) == 2, limit=limit)
        firsts = (under.linear(*first) for under in each)
        lasts = (under.linear(last) for under in each)
        # The first expert tells how wide all of them are.
        one, beside = next(firsts), []
        bare = not any(each[0].has(f"{name}.bias") for name in (*first, last))
        alone = group.ranks.count == 1 and blueprint.ops.uses_kernels
        if shared is not None and alone and bare:
            beside = experts_of_mlp(shared, len(one.weight) // len(first), gating)
            group = replace(group, own=range(count + len(beside)))
        gate_up = stack_experts(chain([one], firsts, (pair[0] for pair in beside)), len(group.own))
        down = stack_experts(chain(lasts, (pair[1] for pair in beside)), len(group.own))
        return cls(
            group=group,
            gate_up=gate_up,
            down=down,
            gating=gating,
            beside=len(beside),
            ops=blueprint.ops,
        )

    @classmethod
    def stacked(cls, blueprint: Blueprint, count: int, gate_up: str, down: str) -> Experts:
        """Of two weights with an axis for experts."""
        group = ExpertGroup.of(blueprint.config, blueprint.ranks, count)
        first, last = (
            ExpertWeights(group.shard(blueprint.tensor(name))) for name in (gate_up, down)
        )
        gating = ExpertActivation(blueprint.activation())
        return cls(group=group, gate_up=first, down=last, gating=gating, ops=blueprint.ops)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.ops.experts(self, x, routing)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Routed experts, and the shared MLP, if there is one.

    experts  the weighted sum of a token's experts
    shared   the shared MLP, if it is not among the experts
    beside   how many of the experts every token goes to
    """

    router: Router
    experts: Callable[[Tensor, Routing], Tensor]
    shared: Callable[[Tensor], Tensor] | None
    beside: int = 0

    @classmethod
    def numbered(
        cls,
        router: Router,
        blueprint: Blueprint,
        shared: SharedMLP | None,
        *names: str,
        limit: float | None = None,
    ) -> Mixture:
        """Of `Experts.numbered`, and the shared MLP among or beside them."""
        experts = Experts.numbered(blueprint, router.experts, *names, limit=limit, shared=shared)
        return cls(router, experts, None if experts.beside else shared, experts.beside)

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """`tokens` are the token ids of the rows of x, which a router with a table needs."""
        mixed = self.experts(x, self.router(x, tokens, self.beside))
        return mixed if self.shared is None else mixed + self.shared(x)
