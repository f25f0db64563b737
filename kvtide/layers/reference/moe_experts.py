"""The weighted sum of a token's experts: the torch reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import (
    ExpertActivation,
    ExpertGroup,
    ExpertStack,
    ExpertWeights,
    Routing,
)
from kvtide.layers.elementwise import swish

Expert = Callable[[int, Tensor], Tensor]


def mix_experts(arithmetic: Arithmetic, stack: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
    """Σ weight · expert(x) over the experts of all ranks."""

    def expert(number: int, x: Tensor) -> Tensor:
        given = _gated(arithmetic, stack.gating, _linear(arithmetic, stack.gate_up, number, x))
        return _linear(arithmetic, stack.down, number, given)

    return mix(stack.group, x, routing, expert)


def mix(group: ExpertGroup, x: Tensor, routing: Routing, expert: Expert) -> Tensor:
    """Σ weight · expert(x), where `expert` numbers this rank's own from 0.

    A token's experts are added in ascending order, whatever other tokens are in the step.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for number in routing.experts.unique().tolist():
        if number in group.own:
            routed = routing.experts == number
            rows = torch.nonzero(routed.any(-1)).squeeze(1)
            weights = (routing.weights * routed).sum(-1, keepdim=True)[rows]
            out[rows] += expert(number - group.own.start, x[rows]) * weights
    return group.ranks.all_reduce(out).to(x.dtype)


def _linear(arithmetic: Arithmetic, stack: ExpertWeights, number: int, x: Tensor) -> Tensor:
    bias = None if stack.bias is None else stack.bias[number]
    return arithmetic.linear(x, stack.weight[number], bias)


def _gated(arithmetic: Arithmetic, how: ExpertActivation, given: Tensor) -> Tensor:
    def opened(rows: Tensor) -> Tensor:
        return swish(rows, how.gain) if how.activation is swish else how.activation(rows)

    if not how.gated:
        return arithmetic.rowwise(opened, given)
    gate, up = given.chunk(2, dim=-1)
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return arithmetic.rowwise(opened, gate) * (up + how.offset if how.offset else up)
