"""MoE routing in one kernel: from router logits to the top-k experts of a token and their weights.

Torch reference: `layers/reference/moe_routing.py`, `route` and `route_by_top_softmax`; of equal
scores the first expert wins, as in `layers/reference/indexer.py`, `top_k`.

`_route`  grid (tokens,): top-k by repeated maximum

A score and its expert are packed into one 64-bit key, so that a maximum gives both. Where a table
fixes the experts of a token (hash routing), the kernel looks them up and computes their weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtide.layers import elementwise
from kvtide.layers.backend.kernel_args import FixedExperts, Routing, RoutingRule
from kvtide.layers.elementwise import Activation
from kvtide.layers.kernels.elementwise import sigmoid, softplus
from kvtide.layers.kernels.grid import power_of_two

MAX_EXPERTS = 1024
_SCORES: dict[Activation | None, int] = {
    None: 0,
    elementwise.sigmoid: 1,
    elementwise.softmax: 2,
    elementwise.sqrt_softplus: 3,
}


def has_kernel(experts: int, rule: RoutingRule, score: Activation | None) -> bool:
    """Whether the kernel supports this routing: groups need powers of two."""
    grouped = rule.allowed < rule.groups
    whole = experts & (experts - 1) == 0 and rule.groups & (rule.groups - 1) == 0
    return experts <= MAX_EXPERTS and score in _SCORES and (whole or not grouped)


def route(
    logits: Tensor,
    rule: RoutingRule,
    score: Activation | None,
    bias: Tensor | None = None,
    *,
    softmax_of_best: bool = False,
    fixed: FixedExperts | None = None,
    beside: int = 0,
) -> Routing:
    """Routes by the scores of logits (tokens, experts), or by the logits themselves.

    `softmax_of_best`: weights are the softmax of the top-k scores. `fixed`: a table fixes the
    experts. `beside`: so many shared experts follow, numbered after the others, with weight one.
    """
    tokens, experts = logits.shape
    count = rule.count if fixed is None else fixed.table.shape[1]
    columns, width = count + beside, max(32, power_of_two(experts))
    selected = torch.empty((tokens, columns), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, columns), dtype=torch.float32, device=logits.device)
    grouped = fixed is None and rule.allowed < rule.groups
    assert fixed is None or fixed.table.is_contiguous()
    table, rows = (
        (selected, selected) if fixed is None else (fixed.table, fixed.tokens.contiguous())
    )
    _route[(tokens,)](
        *(logits, logits if bias is None else bias, table, rows, selected, weights),
        *(logits.stride(), rule.scale),
        EXPERTS=experts,
        TOP_K=count,
        SHARED_EXPERTS=beside,
        FIXED=fixed is not None,
        SCORE=_SCORES[score],
        BIASED=bias is not None,
        GROUPS=rule.groups if grouped else 1,
        TOP_GROUPS=rule.allowed,
        GROUP_DEPTH=min(rule.group_depth, experts // rule.groups),
        RENORMALISED=rule.renormalised,
        SOFTMAX=softmax_of_best,
        BLOCK_EXPERTS=experts if grouped else width,
        BLOCK_K=power_of_two(columns),
        num_warps=1 if width <= 512 else 2,
    )
    return Routing(selected, weights)


@triton.jit
def _sort_keys(score, expert):  # type: ignore[no-untyped-def]
    """Keys in the order of scores; of equal scores the first expert has the highest key."""
    # -0 and +0 are equal.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - expert).to(tl.int64)


@triton.jit
def _score_of_key(key):  # type: ignore[no-untyped-def]
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _expert_of_key(key):  # type: ignore[no-untyped-def]
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(x, inside, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 1:
        x = sigmoid(x)
    elif KIND == 2:
        exponentials = tl.where(inside, tl.exp(x - tl.max(x, 0)), 0.0)
        x = exponentials / tl.sum(exponentials, 0)
    elif KIND == 3:
        x = tl.sqrt(softplus(x))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _keep_best_groups(  # type: ignore[no-untyped-def]
    keys,
    lowest,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_DEPTH: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Keys of the top groups; those of other groups become the lowest."""
    grouped = tl.reshape(keys, [GROUPS, BLOCK_EXPERTS // GROUPS])
    rest, group_score = grouped, tl.zeros([GROUPS], tl.float32)
    for _ in tl.static_range(GROUP_DEPTH):
        best = tl.max(rest, 1)
        group_score += _score_of_key(best)
        rest = tl.where(rest == best[:, None], lowest, rest)
    group_keys = _sort_keys(group_score, tl.arange(0, GROUPS))
    group_rest = group_keys
    for _ in tl.static_range(TOP_GROUPS):
        group_rest = tl.where(group_rest == tl.max(group_rest, 0), lowest, group_rest)
    return tl.reshape(tl.where((group_rest == lowest)[:, None], grouped, lowest), [BLOCK_EXPERTS])


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _lookup_experts(  # type: ignore[no-untyped-def]
    scores, expert, row, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """The fixed experts of a token, and their scores."""
    lane = tl.arange(0, BLOCK_K)
    experts = tl.load(row + lane, mask=lane < TOP_K, other=0).to(tl.int32)
    best = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        expert_id = tl.sum(tl.where(lane == k, experts, 0), 0)
        score = tl.sum(tl.where(expert == expert_id, scores, 0.0), 0)
        best = tl.where(lane == k, score, best)
    return experts, best


@triton.jit  # type: ignore[untyped-decorator]
def _top_k(  # type: ignore[no-untyped-def]
    scores, bias, expert, inside,
    BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The top-k experts, and their scores without bias."""
    lane, ranking = tl.arange(0, BLOCK_K), scores
    if BIASED:
        ranking = scores + tl.load(bias + expert, mask=inside, other=0.0)
    lowest = tl.full([1], -0x8000000000000000, tl.int64)
    keys = tl.where(inside, _sort_keys(ranking, expert), lowest)
    if GROUPS > 1:
        keys = _keep_best_groups(keys, lowest, GROUPS, TOP_GROUPS, GROUP_DEPTH, BLOCK_EXPERTS)
    experts, best = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        key = tl.max(keys, 0)
        expert_id, score = _expert_of_key(key), _score_of_key(key)
        if BIASED:
            score = tl.sum(tl.where(expert == expert_id, scores, 0.0), 0)
        experts = tl.where(lane == k, expert_id, experts)
        best = tl.where(lane == k, score, best)
        keys = tl.where(keys == key, lowest, keys)
    return experts, best


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits, bias, table, tokens, selected, expert_weights, logits_strides, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SHARED_EXPERTS: tl.constexpr,
    FIXED: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_DEPTH: tl.constexpr,
    RENORMALISED: tl.constexpr, SOFTMAX: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, lane = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_K)
    inside = expert < EXPERTS
    logit_ptrs = logits + token * logits_strides[0] + expert * logits_strides[1]
    x = tl.load(logit_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    scores = _scores(x, inside, SCORE)
    if FIXED:
        row = table + tl.load(tokens + token).to(tl.int64) * TOP_K
        experts, weights = _lookup_experts(scores, expert, row, TOP_K, BLOCK_K)
    else:
        experts, weights = _top_k(
            scores, bias, expert, inside, BIASED, GROUPS, TOP_GROUPS, GROUP_DEPTH, TOP_K,
            BLOCK_EXPERTS, BLOCK_K
        )
    if SOFTMAX:
        exponentials = tl.exp(weights - tl.max(tl.where(lane < TOP_K, weights, float("-inf")), 0))
        weights = exponentials / tl.sum(tl.where(lane < TOP_K, exponentials, 0.0), 0)
    else:
        if RENORMALISED:
            weights = weights / (tl.sum(weights, 0) + 1e-20)
        weights = weights * scale
    experts = tl.where(lane < TOP_K, experts, EXPERTS + lane - TOP_K)
    weights = tl.where(lane < TOP_K, weights, 1.0)
    offsets = token * (TOP_K + SHARED_EXPERTS) + lane
    tl.store(selected + offsets, experts, mask=lane < TOP_K + SHARED_EXPERTS)
    tl.store(expert_weights + offsets, weights, mask=lane < TOP_K + SHARED_EXPERTS)
# fmt: on
