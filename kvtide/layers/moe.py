"""Mixtures of experts: which experts a token goes to, and the sum of what they give back.

Every rank works out all routes; it has its share of the experts and adds up what those give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import Linear
from kvtide.layers.elementary import sigmoid
from kvtide.layers.ranks import ALONE, TensorRanks
from kvtide.layers.selecting import top


@dataclass(frozen=True, slots=True)
class Routing:
    """Per token: the experts chosen, (tokens, k), and each one's share."""

    experts: Tensor
    shares: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen by their scores, and what share each gets.

    count            experts for a token
    groups, allowed  experts lie in groups, and only the best `allowed` groups may be chosen from
    group_depth      a group is as good as its so many best experts together, or all if it has fewer
    renormalised     shares are made to add up to one, before `scale`
    """

    count: int
    groups: int = 1
    allowed: int = 1
    group_depth: int = 2
    renormalised: bool = True
    scale: float = 1.0


def route(
    arithmetic: Arithmetic, scores: Tensor, choice: Choice, bias: Tensor | None = None
) -> Routing:
    """By the scores (fp32, none negative) plus a bias that does not count in the shares."""
    ranked = scores if bias is None else scores + bias
    if choice.allowed < choice.groups:
        # Not by zeros, above which a biased score need not be.
        ranked = ranked.masked_fill(~_allowed(ranked, choice), -torch.inf)
    return share_out(arithmetic, scores, top(ranked, choice.count), choice)


def share_out(arithmetic: Arithmetic, scores: Tensor, experts: Tensor, choice: Choice) -> Routing:
    """Every chosen expert's share, by its score."""
    shares = scores.gather(1, experts)
    if choice.renormalised:
        shares = arithmetic.rowwise(
            lambda rows: rows / (rows.sum(-1, keepdim=True) + 1e-20), shares
        )
    return Routing(experts, shares * choice.scale)


def _allowed(ranked: Tensor, choice: Choice) -> Tensor:
    grouped = ranked.view(len(ranked), choice.groups, -1)
    depth = min(choice.group_depth, grouped.shape[-1])
    strength = grouped.topk(depth, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(strength, dtype=torch.bool)
    allowed.scatter_(1, top(strength, choice.allowed), True)
    return allowed[:, :, None].expand_as(grouped).flatten(1)


CORRECTION_BIAS = "e_score_correction_bias"


class Router:
    """Scores the experts of every token in fp32, and chooses by the scores.

    Under its name there is a weight with a row for each expert. `bias` is what a learned bias is
    called there, which has a say in the choice alone; None where there is none.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        choice: Choice,
        score: Callable[[Tensor], Tensor] = sigmoid,
        bias: str | None = CORRECTION_BIAS,
    ) -> None:
        self.arithmetic, self.choice, self.score = blueprint.arithmetic, choice, score
        self.linear = Linear(self.arithmetic, blueprint.tensor("weight", torch.float32))
        self.bias = None if bias is None else blueprint.tensor(bias, torch.float32)
        self._check(blueprint)

    @property
    def experts(self) -> int:
        return len(self.linear.weight)

    def __call__(self, x: Tensor) -> Routing:
        return route(self.arithmetic, self.scores(x), self.choice, self.bias)

    def scores(self, x: Tensor) -> Tensor:
        """(tokens, experts), before any bias."""
        return self.arithmetic.rowwise(self.score, self.linear(x.float()))

    def _check(self, blueprint: Blueprint) -> None:
        choice, (each, rest) = self.choice, divmod(self.experts, self.choice.groups)
        if rest or choice.allowed > choice.groups or choice.count > choice.allowed * each:
            raise blueprint.config.refusal(
                f"{choice.count} of {self.experts} experts cannot be chosen from {choice.allowed} "
                f"of {choice.groups} groups; use the numbers of experts for a token, groups and "
                "allowed groups that the checkpoint was made with"
            )


def route_by_top_softmax(arithmetic: Arithmetic, logits: Tensor, count: int) -> Routing:
    """The largest `count` logits, and a softmax over those alone."""
    experts = top(logits.float(), count)
    best = logits.float().gather(1, experts)
    return Routing(experts, arithmetic.rowwise(lambda rows: rows.softmax(-1), best))


@dataclass(frozen=True, slots=True)
class Crew:
    """The experts that this rank has, of those that all ranks have together."""

    own: range
    ranks: TensorRanks

    @classmethod
    def of(cls, blueprint: Blueprint, count: int) -> Crew:
        ranks = blueprint.ranks
        each, rest = divmod(count, ranks.count)
        if rest:
            raise blueprint.config.refusal(
                f"{count} experts do not divide over {ranks.count} tensor ranks; use fewer ranks, "
                "or as many as divide them"
            )
        return cls(range(ranks.rank * each, (ranks.rank + 1) * each), ranks)

    def share(self, stacked: Tensor) -> Tensor:
        """What this rank's experts have of a weight with an axis for experts; not a view of it."""
        own = stacked[self.own.start : self.own.stop]
        return stacked if len(own) == len(stacked) else own.clone()

    def mix(self, x: Tensor, routing: Routing, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Σ share · expert(x), where `expert` numbers this rank's own from 0.

        A token's experts are added in ascending order, whoever else is here.
        """
        mixed = torch.zeros_like(x, dtype=torch.float32)
        for number in routing.experts.unique().tolist():
            if number in self.own:
                chosen = routing.experts == number
                rows = torch.nonzero(chosen.any(-1)).squeeze(1)
                shares = (routing.shares * chosen).sum(-1, keepdim=True)[rows]
                mixed[rows] += expert(number - self.own.start, x[rows]) * shares
        return self.ranks.total(mixed).to(x.dtype)


class Experts:
    """Gated MLPs, numbered from 0 under the blueprint's name."""

    def __init__(
        self, blueprint: Blueprint, count: int, *names: str, limit: float | None = None
    ) -> None:
        self.crew = Crew.of(blueprint, count)
        # An expert is one rank's, and whole.
        whole = replace(blueprint, ranks=ALONE)
        self.mlps = [whole.under(str(number)).mlp(*names, limit=limit) for number in self.crew.own]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.crew.mix(x, routing, lambda number, rows: self.mlps[number](rows))


class StackedExperts:
    """As `Experts`, but in two weights with an axis for experts: gate and up side by side, and
    down."""

    def __init__(self, blueprint: Blueprint, count: int, gate_up: str, down: str) -> None:
        self.arithmetic = blueprint.arithmetic
        self.activation = blueprint.activation()
        self.crew = Crew.of(blueprint, count)
        self.gate_up, self.down = (
            self.crew.share(blueprint.tensor(name)) for name in (gate_up, down)
        )

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.crew.mix(x, routing, self._expert)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        gate, up = linear(x, self.gate_up[number]).chunk(2, dim=-1)
        return linear(self.arithmetic.rowwise(self.activation, gate) * up, self.down[number])


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts that a router chooses, beside those that every token goes to, if there are any.

    `experts` gives the sum of what a token's experts give, each by its share.
    """

    router: Router
    experts: Callable[[Tensor, Routing], Tensor]
    shared: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        mixed = self.experts(x, self.router(x))
        return mixed if self.shared is None else mixed + self.shared(x)
