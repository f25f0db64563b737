"""Mixtures of experts: which experts a token goes to, and the sum of what they give back.

Every rank works out all routes; it has its share of the experts and adds up what those give.

An MLP that every token goes to is a sum over its channels. Where programs run, and there is one
rank, such an MLP beside experts becomes experts itself, of the same stack: as many as its channels
make, to which every token goes with a share of one. Then the mixture is no more launches than the
experts alone. Elsewhere the MLP stays what it is, and is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import Linear, WideLinear
from kvtide.layers.elementwise import Activation, sigmoid, swish
from kvtide.layers.indexer import top
from kvtide.layers.tensor_ranks import TensorRanks


@dataclass(frozen=True, slots=True)
class Routing:
    """Per token: the experts chosen, (tokens, k), and each one's share."""

    experts: Tensor
    shares: Tensor

    def beside(self, first: int, count: int) -> Routing:
        """And so many more experts, numbered from the first: for every token, a share of one."""
        if count == 0:
            return self
        more = torch.arange(
            first, first + count, dtype=self.experts.dtype, device=self.experts.device
        ).expand(len(self.experts), -1)
        shares = torch.cat([self.shares, torch.ones_like(more, dtype=self.shares.dtype)], dim=1)
        return Routing(torch.cat([self.experts, more], dim=1), shares)


@dataclass(frozen=True, slots=True)
class Told:
    """Experts that tokens go to whatever their scores: `table` has a row (k) for every token."""

    table: Tensor
    tokens: Tensor


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
    *,
    told: Told | None = None,
    beside: int = 0,
) -> Routing:
    """As `route`, by the scores that logits have, or to the experts that are `told`; and to so many
    `beside` those, which have the numbers after the last one that has a score."""
    experts = logits.shape[1]
    if arithmetic.runs_programs(logits.device):
        from kvtide.layers.kernels import moe_routing

        if moe_routing.takes(experts, choice, score):
            return moe_routing.route(logits, choice, score, bias, told=told, beside=beside)
    scores = arithmetic.rowwise(score, logits.float())
    if told is None:
        return route(arithmetic, scores, choice, bias).beside(experts, beside)
    chosen = told.table[told.tokens]
    return share_out(arithmetic, scores, chosen, choice).beside(experts, beside)


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
    called there, which has a say in the choice alone; None where there is none. `table` is what a
    table is called that has every token's experts, which are then not chosen.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        choice: Choice,
        score: Activation = sigmoid,
        bias: str | None = CORRECTION_BIAS,
        table: str | None = None,
    ) -> None:
        self.arithmetic, self.choice, self.score = blueprint.arithmetic, choice, score
        weight = blueprint.tensor("weight", torch.float32)
        self.linear = WideLinear(self.arithmetic, weight, blueprint.dtype)
        self.bias = None if bias is None else blueprint.tensor(bias, torch.float32)
        self.table = None if table is None else blueprint.tensor(table, torch.int64)
        self._check(blueprint)

    @property
    def experts(self) -> int:
        return self.linear.outputs

    def __call__(self, x: Tensor, tokens: Tensor | None = None, beside: int = 0) -> Routing:
        """`tokens`, which a table needs, are those that x has rows of; of `beside`, see
        `score_and_route`."""
        told = None
        if self.table is not None:
            assert tokens is not None, "a router with a table has to be given the tokens"
            told = Told(self.table, tokens)
        how = (self.choice, self.score, self.bias)
        return score_and_route(self.arithmetic, self.linear(x), *how, told=told, beside=beside)

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
        from kvtide.layers.kernels import moe_routing

        if moe_routing.takes(logits.shape[1], Choice(count), None):
            return moe_routing.route(logits, Choice(count), None, softmax_of_best=True)
    experts = top(logits.float(), count)
    best = logits.float().gather(1, experts)
    return Routing(experts, arithmetic.rowwise(lambda rows: rows.softmax(-1), best))


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts that this rank has, of those that all ranks have together."""

    own: range
    ranks: TensorRanks

    @classmethod
    def of(cls, blueprint: Blueprint, count: int) -> ExpertGroup:
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


def cut(mlp: SharedMLP, width: int, gating: Gating) -> list[tuple[Linear, Linear]]:
    """Experts of this width and gating that add up to the MLP, for its channels do. None where it
    is no whole number of them, has another gating, or biases."""
    channels, arithmetic = mlp.down.weight.shape[1], mlp.down.arithmetic
    halves = len(mlp.first.weight) // channels
    same = gating == Gating(mlp.activation, gated=halves == 2, limit=mlp.limit)
    biased = mlp.first.bias is not None or mlp.down.bias is not None
    if not same or biased or channels % width:
        return []
    firsts = mlp.first.weight.unflatten(0, (halves, -1, width)).unbind(1)
    pairs = zip(firsts, mlp.down.weight.split(width, dim=1), strict=True)
    return [
        (Linear(arithmetic, first.flatten(0, 1)), Linear(arithmetic, down)) for first, down in pairs
    ]


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

    What a gated one's first projection gives is gate and up, side by side. The last `beside` of
    them are an MLP that every token goes to.
    """

    arithmetic: Arithmetic
    crew: ExpertGroup
    gate_up: Stack
    down: Stack
    gating: Gating
    beside: int = 0

    @classmethod
    def numbered(
        cls,
        blueprint: Blueprint,
        count: int,
        *names: str,
        limit: float | None = None,
        shared: SharedMLP | None = None,
    ) -> Experts:
        """Of weights for every expert, numbered from 0 under the blueprint's name. `names` are
        those of gate, up and down, if they are not the usual, or of up and down alone. Where
        a `shared` MLP can be experts of the same stack it is, and they are `beside` the others."""
        *first, last = names or ("gate_proj", "up_proj", "down_proj")
        crew, arithmetic = ExpertGroup.of(blueprint, count), blueprint.arithmetic
        each = [blueprint.under(str(number)) for number in crew.own]
        gating = Gating(blueprint.activation(), gated=len(first) == 2, limit=limit)
        firsts = (under.linear(*first) for under in each)
        lasts = (under.linear(last) for under in each)
        # How wide experts are is known by one of them.
        one, beside = next(firsts), []
        bare = not any(each[0].has(f"{name}.bias") for name in (*first, last))
        alone = crew.ranks.count == 1 and arithmetic.runs_programs(one.weight.device)
        if shared is not None and alone and bare:
            beside = cut(shared, len(one.weight) // len(first), gating)
            crew = replace(crew, own=range(count + len(beside)))
        gate_up = Stack.of(chain([one], firsts, (pair[0] for pair in beside)), len(crew.own))
        down = Stack.of(chain(lasts, (pair[1] for pair in beside)), len(crew.own))
        return cls(arithmetic, crew, gate_up, down, gating, len(beside))

    @classmethod
    def stacked(cls, blueprint: Blueprint, count: int, gate_up: str, down: str) -> Experts:
        """Of two weights with an axis for experts."""
        crew = ExpertGroup.of(blueprint, count)
        first, last = (Stack(crew.share(blueprint.tensor(name))) for name in (gate_up, down))
        return cls(blueprint.arithmetic, crew, first, last, Gating(blueprint.activation()))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        if self.arithmetic.runs_programs(x.device):
            from kvtide.layers.kernels.moe_experts import mix

            return self.crew.ranks.total(mix(self, x, routing)).to(x.dtype)
        return self.crew.mix(x, routing, self._expert)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        given = self.gating(self.arithmetic, self.gate_up(self.arithmetic, number, x))
        return self.down(self.arithmetic, number, given)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts that a router chooses, beside those that every token goes to, if there are any.

    experts  gives the sum of what a token's experts give, each by its share
    shared   what every token goes to, if it is not among the experts
    beside   so many of the experts every token goes to
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
        """`tokens` are those that x has rows of, where the router needs them."""
        mixed = self.experts(x, self.router(x, tokens, self.beside))
        return mixed if self.shared is None else mixed + self.shared(x)
