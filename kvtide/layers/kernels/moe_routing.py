"""Routing as one device program: from logits to the experts of every token, and their shares.

The same as `moe.route` of scores, and as `moe.route_by_top_softmax`; of equals the first is taken,
as `selecting.top` does. A program takes one token, whose experts it picks one after another. A
score and its place are one number, the larger the better: what is picked last is what is largest.
Where experts are fixed by token, it looks them up, and only their shares are by score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers import elementwise
from kvtide.layers.elementwise import Activation
from kvtide.layers.kernel_args import FixedExperts, Routing, RoutingRule
from kvtide.layers.kernels.elementwise import sigmoid, softplus
from kvtide.layers.kernels.grid import power_of_two

MAX_EXPERTS = 1024
_SCORES: dict[Activation | None, int] = {
    None: 0,
    elementwise.sigmoid: 1,
    elementwise.softmax: 2,
    elementwise.sqrt_softplus: 3,
}


def has_kernel(experts: int, choice: RoutingRule, score: Activation | None) -> bool:
    """Whether there is a program for it: groups are cut out of powers of two alone."""
    grouped = choice.allowed < choice.groups
    whole = experts & (experts - 1) == 0 and choice.groups & (choice.groups - 1) == 0
    return experts <= MAX_EXPERTS and score in _SCORES and (whole or not grouped)


def route(
    logits: Tensor,
    choice: RoutingRule,
    score: Activation | None,
    bias: Tensor | None = None,
    *,
    softmax_of_best: bool = False,
    fixed: FixedExperts | None = None,
    beside: int = 0,
) -> Routing:
    """By the scores of logits (tokens, experts), or by these as they are; `softmax_of_best` makes
    shares of the chosen scores by a softmax, and leaves `choice` nothing but to choose. After
    those there are so many experts `beside`, numbered after the others, with a share of one."""
    tokens, experts = logits.shape
    count = choice.count if fixed is None else fixed.table.shape[1]
    columns, width = count + beside, max(32, power_of_two(experts))
    chosen = torch.empty((tokens, columns), dtype=torch.int32, device=logits.device)
    shares = torch.empty((tokens, columns), dtype=torch.float32, device=logits.device)
    grouped = fixed is None and choice.allowed < choice.groups
    assert fixed is None or fixed.table.is_contiguous()
    table, rows = (chosen, chosen) if fixed is None else (fixed.table, fixed.tokens.contiguous())
    _route[(tokens,)](
        *(logits, logits if bias is None else bias, table, rows, chosen, shares),
        *(logits.stride(0), logits.stride(1), choice.scale),
        EXPERTS=experts,
        COUNT=count,
        BESIDE=beside,
        TOLD=fixed is not None,
        SCORE=_SCORES[score],
        BIASED=bias is not None,
        GROUPS=choice.groups if grouped else 1,
        ALLOWED=choice.allowed,
        DEPTH=min(choice.group_depth, experts // choice.groups),
        RENORMALISED=choice.renormalised,
        SOFTMAX=softmax_of_best,
        N=experts if grouped else width,
        K=power_of_two(columns),
        num_warps=1 if width <= 512 else 2,
    )
    return Routing(chosen, shares)


@triton.jit
def _keys(value, place):  # type: ignore[no-untyped-def]
    """Numbers in the order of values, and of equal ones the first place above the others."""
    # There is one zero.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(x, inside, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if KIND == 1:
        x = sigmoid(x)
    elif KIND == 2:
        raised = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
        x = raised / tl.sum(raised, 0)
    elif KIND == 3:
        x = tl.sqrt(softplus(x))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _of_best_groups(  # type: ignore[no-untyped-def]
    keys,
    lowest,
    GROUPS: tl.constexpr,  # noqa: N803
    ALLOWED: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    N: tl.constexpr,  # noqa: N803
):
    """The keys of the groups that may be chosen from; of the others the lowest."""
    grouped = tl.reshape(keys, [GROUPS, N // GROUPS])
    rest, strength = grouped, tl.zeros([GROUPS], tl.float32)
    for _ in tl.static_range(DEPTH):
        best = tl.max(rest, 1)
        strength += _value(best)
        rest = tl.where(rest == best[:, None], lowest, rest)
    groups = _keys(strength, tl.arange(0, GROUPS))
    left = groups
    for _ in tl.static_range(ALLOWED):
        left = tl.where(left == tl.max(left, 0), lowest, left)
    return tl.reshape(tl.where((left == lowest)[:, None], grouped, lowest), [N])


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _told(  # type: ignore[no-untyped-def]
    scores, expert, row, COUNT: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    """The experts of a row of the table, and their scores."""
    lane = tl.arange(0, K)
    experts = tl.load(row + lane, mask=lane < COUNT, other=0).to(tl.int32)
    best = tl.zeros([K], tl.float32)
    for number in tl.static_range(COUNT):
        place = tl.sum(tl.where(lane == number, experts, 0), 0)
        value = tl.sum(tl.where(expert == place, scores, 0.0), 0)
        best = tl.where(lane == number, value, best)
    return experts, best


@triton.jit  # type: ignore[untyped-decorator]
def _picked(  # type: ignore[no-untyped-def]
    scores, bias, expert, inside,
    BIASED: tl.constexpr, GROUPS: tl.constexpr, ALLOWED: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    """The best experts, and their scores."""
    lane, ranked = tl.arange(0, K), scores
    if BIASED:
        ranked = scores + tl.load(bias + expert, mask=inside, other=0.0)
    lowest = tl.full([1], -0x8000000000000000, tl.int64)
    keys = tl.where(inside, _keys(ranked, expert), lowest)
    if GROUPS > 1:
        keys = _of_best_groups(keys, lowest, GROUPS, ALLOWED, DEPTH, N)
    experts, best = tl.zeros([K], tl.int32), tl.zeros([K], tl.float32)
    for number in tl.static_range(COUNT):
        key = tl.max(keys, 0)
        place, value = _place(key), _value(key)
        if BIASED:
            value = tl.sum(tl.where(expert == place, scores, 0.0), 0)
        experts = tl.where(lane == number, place, experts)
        best = tl.where(lane == number, value, best)
        keys = tl.where(keys == key, lowest, keys)
    return experts, best


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits, bias, table, tokens, chosen, shares, token_stride, expert_stride, scale,
    EXPERTS: tl.constexpr, COUNT: tl.constexpr, BESIDE: tl.constexpr,  # noqa: N803
    TOLD: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr, ALLOWED: tl.constexpr, DEPTH: tl.constexpr,  # noqa: N803
    RENORMALISED: tl.constexpr, SOFTMAX: tl.constexpr,  # noqa: N803
    N: tl.constexpr, K: tl.constexpr,  # noqa: N803
):
    token, expert, lane = tl.program_id(0).to(tl.int64), tl.arange(0, N), tl.arange(0, K)
    inside = expert < EXPERTS
    given = logits + token * token_stride + expert * expert_stride
    x = tl.load(given, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _scores(x, inside, SCORE)
    if TOLD:
        row = table + tl.load(tokens + token).to(tl.int64) * COUNT
        experts, best = _told(scores, expert, row, COUNT, K)
    else:
        experts, best = _picked(
            scores, bias, expert, inside, BIASED, GROUPS, ALLOWED, DEPTH, COUNT, N, K
        )
    if SOFTMAX:
        raised = tl.exp(best - tl.max(tl.where(lane < COUNT, best, float("-inf")), 0))
        best = raised / tl.sum(tl.where(lane < COUNT, raised, 0.0), 0)
    else:
        if RENORMALISED:
            best = best / (tl.sum(best, 0) + 1e-20)
        best = best * scale
    experts = tl.where(lane < COUNT, experts, EXPERTS + lane - COUNT)
    best = tl.where(lane < COUNT, best, 1.0)
    at = token * (COUNT + BESIDE) + lane
    tl.store(chosen + at, experts, mask=lane < COUNT + BESIDE)
    tl.store(shares + at, best, mask=lane < COUNT + BESIDE)
# fmt: on
