"""Mixtures of experts: which experts a token goes to, and the sum of what they give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic


@dataclass(frozen=True, slots=True)
class Routing:
    """Per token: the experts chosen, (tokens, k), and each one's share."""

    experts: Tensor
    shares: Tensor


def route_by_top_softmax(arithmetic: Arithmetic, logits: Tensor, count: int) -> Routing:
    """The largest `count` logits, and a softmax over those alone."""
    best, experts = logits.float().topk(count, dim=-1)
    return Routing(experts, arithmetic.rowwise(lambda rows: rows.softmax(-1), best))


def mix(x: Tensor, routing: Routing, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Σ share · expert(x). A token's experts are added in ascending order, whoever else is here."""
    mixed = torch.zeros_like(x, dtype=torch.float32)
    for number in routing.experts.unique().tolist():
        rows, ranks = torch.nonzero(routing.experts == number, as_tuple=True)
        mixed[rows] += expert(number, x[rows]) * routing.shares[rows, ranks, None]
    return mixed.to(x.dtype)
