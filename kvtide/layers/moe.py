"""Mixtures of experts: which experts a token goes to, and the sum of what they give back.

Every rank works out all routes; it has its share of the experts and adds up what those give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import Linear, WideLinear
from kvtide.layers.elementary import Activation, sigmoid, swish
from kvtide.layers.ranks import TensorRanks
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


def score_and_route(
    arithmetic: Arithmetic,
    logits: Tensor,
    choice: Choice,
    score: Activation,
    bias: Tensor | None = None,
) -> Routing:
    """As `route`, by the scores that logits have."""
    if arithmetic.runs_programs(logits.device):
        from kvtide.layers.programs import routing

        if routing.takes(logits.shape[1], choice, score):
            return routing.route(logits, choice, score, bias)
    return route(arithmetic, arithmetic.rowwise(score, logits.float()), choice, bias)


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
        score: Activation = sigmoid,
        bias: str | None = CORRECTION_BIAS,
    ) -> None:
        self.arithmetic, self.choice, self.score = blueprint.arithmetic, choice, score
        weight = blueprint.tensor("weight", torch.float32)
        self.linear = WideLinear(self.arithmetic, weight, blueprint.dtype)
        self.bias = None if bias is None else blueprint.tensor(bias, torch.float32)
        self._check(blueprint)

    @property
    def experts(self) -> int:
        return self.linear.outputs

    def __call__(self, x: Tensor) -> Routing:
        logits = self.linear(x)
        return score_and_route(self.arithmetic, logits, self.choice, self.score, self.bias)

    def scores(self, x: Tensor) -> Tensor:
        """(tokens, experts), before any bias."""
        return self.arithmetic.rowwise(self.score, self.linear(x))

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
    if arithmetic.runs_programs(logits.device):
        from kvtide.layers.programs import routing

        if routing.takes(logits.shape[1], Choice(count), None):
            return routing.route(logits, Choice(count), None, softmax_of_best=True)
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


@dataclass(frozen=True, slots=True)
class Gating:
    """What an expert does between its two projections, with what the first one gives.

    activation  of the gate, or of everything where there is no gate
    gated       the first half is a gate for the second
    limit       what neither half may exceed
    gain        how steep a swish is
    offset      what the second half is taken plus
    """

    activation: Activation = swish
    gated: bool = True
    limit: float | None = None
    gain: float = 1.0
    offset: float = 0.0

    def __call__(self, arithmetic: Arithmetic, given: Tensor) -> Tensor:
        if not self.gated:
            return arithmetic.rowwise(self._opened, given)
        gate, up = given.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return arithmetic.rowwise(self._opened, gate) * (up + self.offset if self.offset else up)

    def _opened(self, rows: Tensor) -> Tensor:
        return swish(rows, self.gain) if self.activation is swish else self.activation(rows)


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection of every expert: (experts, outputs, inputs), and a bias (experts, outputs)."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, projections: Iterable[Linear], count: int) -> Stack:
        """Of so many, each of which is needed no longer when the next one is taken."""
        stack: Stack | None = None
        for number, one in enumerate(projections):
            stack = stack or cls._empty(one, count)
            stack.weight[number] = one.weight
            assert (one.bias is None) == (stack.bias is None), "some have a bias and some do not"
            if stack.bias is not None and one.bias is not None:
                stack.bias[number] = one.bias
        assert stack is not None
        return stack

    @classmethod
    def _empty(cls, like: Linear, count: int) -> Stack:
        weight = like.weight.new_empty((count, *like.weight.shape))
        bias = None if like.bias is None else like.bias.new_empty((count, *like.bias.shape))
        return cls(weight, bias)

    def __call__(self, arithmetic: Arithmetic, number: int, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[number]
        return arithmetic.linear(x, self.weight[number], bias)


@dataclass(frozen=True, slots=True)
class Experts:
    """This rank's experts, each two projections with a gating between them.

    What a gated one's first projection gives is gate and up, side by side.
    """

    arithmetic: Arithmetic
    crew: Crew
    gate_up: Stack
    down: Stack
    gating: Gating

    @classmethod
    def numbered(
        cls, blueprint: Blueprint, count: int, *names: str, limit: float | None = None
    ) -> Experts:
        """Of weights for every expert, numbered from 0 under the blueprint's name. `names` are
        those of gate, up and down, if they are not the usual, or of up and down alone."""
        *first, last = names or ("gate_proj", "up_proj", "down_proj")
        crew = Crew.of(blueprint, count)
        each = [blueprint.under(str(number)) for number in crew.own]
        gating = Gating(blueprint.activation(), gated=len(first) == 2, limit=limit)
        gate_up = Stack.of((one.linear(*first) for one in each), len(each))
        down = Stack.of((one.linear(last) for one in each), len(each))
        return cls(blueprint.arithmetic, crew, gate_up, down, gating)

    @classmethod
    def stacked(cls, blueprint: Blueprint, count: int, gate_up: str, down: str) -> Experts:
        """Of two weights with an axis for experts."""
        crew = Crew.of(blueprint, count)
        first, last = (Stack(crew.share(blueprint.tensor(name))) for name in (gate_up, down))
        return cls(blueprint.arithmetic, crew, first, last, Gating(blueprint.activation()))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        if self.arithmetic.runs_programs(x.device):
            from kvtide.layers.programs.experts import mix

            return self.crew.ranks.total(mix(self, x, routing)).to(x.dtype)
        return self.crew.mix(x, routing, self._expert)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        given = self.gating(self.arithmetic, self.gate_up(self.arithmetic, number, x))
        return self.down(self.arithmetic, number, given)


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
