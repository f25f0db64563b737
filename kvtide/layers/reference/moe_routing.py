"""Which experts a token goes to, and their weights: the torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import FixedExperts, Routing, RoutingRule
from kvtide.layers.elementwise import Activation
from kvtide.layers.reference.indexer import top_k


def route(
    arithmetic: Arithmetic,
    logits: Tensor,
    rule: RoutingRule,
    score: Activation,
    bias: Tensor | None = None,
    *,
    fixed: FixedExperts | None = None,
    beside: int = 0,
) -> Routing:
    """The experts of every token by the scores of its logits, or the `fixed` ones.

    Every token also goes to `beside` more experts, numbered after those that have a score.
    """
    experts = logits.shape[1]
    scores = arithmetic.rowwise(score, logits.float())
    if fixed is None:
        return route_scores(arithmetic, scores, rule, bias).beside(experts, beside)
    experts_of_token = fixed.table[fixed.tokens]
    return weigh(arithmetic, scores, experts_of_token, rule).beside(experts, beside)


def route_by_top_softmax(arithmetic: Arithmetic, logits: Tensor, count: int) -> Routing:
    """The largest `count` logits, and a softmax over those alone."""
    experts = top_k(logits.float(), count)
    best = logits.float().gather(1, experts)
    return Routing(experts, arithmetic.rowwise(lambda rows: rows.softmax(-1), best))


def route_scores(
    arithmetic: Arithmetic, scores: Tensor, rule: RoutingRule, bias: Tensor | None = None
) -> Routing:
    """By scores (fp32, none negative) plus a bias that does not count in the weights."""
    ranked = scores if bias is None else scores + bias
    if rule.allowed < rule.groups:
        # Not with zeros: a biased score may be negative.
        ranked = ranked.masked_fill(~_allowed(ranked, rule), -torch.inf)
    return weigh(arithmetic, scores, top_k(ranked, rule.count), rule)


def weigh(arithmetic: Arithmetic, scores: Tensor, experts: Tensor, rule: RoutingRule) -> Routing:
    """The weight of every selected expert, from its score."""
    weights = scores.gather(1, experts)
    if rule.renormalised:
        weights = arithmetic.rowwise(
            lambda rows: rows / (rows.sum(-1, keepdim=True) + 1e-20), weights
        )
    return Routing(experts, weights * rule.scale)


def _allowed(ranked: Tensor, rule: RoutingRule) -> Tensor:
    grouped = ranked.view(len(ranked), rule.groups, -1)
    depth = min(rule.group_depth, grouped.shape[-1])
    strength = grouped.topk(depth, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(strength, dtype=torch.bool)
    allowed.scatter_(1, top_k(strength, rule.allowed), True)
    return allowed[:, :, None].expand_as(grouped).flatten(1)
