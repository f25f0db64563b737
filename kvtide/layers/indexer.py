"""The few of many: which experts, which entries of a history. Ties are broken here and only here.

Of equals the one that stands first is taken, so what is chosen does not depend on how many others
there are behind it, on the device, or on how a sequence was cut into steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.arithmetic import aligned


def top(scores: Tensor, count: int) -> Tensor:
    """Where the largest `count` scores of each row stand, best first, of equals the first one."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def choose(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, count: int, block: int
) -> Tensor:
    """The entries that an indexer picks for each query: (tokens, entries), true where chosen.

    An entry's score is Σ over heads of weight · relu(query · key). Query i chooses up to `count` of
    the first `visible[i]` entries, which may only grow from query to query. Queries (tokens,
    heads, dim), weights (tokens, heads), keys (entries, dim). Queries are taken in blocks, a block
    scoring exactly the entries that some query in it sees: with blocks of one a choice depends on
    nothing but what its query sees.
    """
    chosen = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    keys, numbers, limits = (
        keys.float(),
        torch.arange(len(keys), device=keys.device),
        visible.tolist(),
    )
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        most = limits[rows][-1]
        seen = numbers[:most] < visible[rows, None]
        if most > count:
            scores = _scores(queries[rows].float(), weights[rows].float(), keys[:most])
            best = top(scores.masked_fill(~seen, -torch.inf), count)
            seen &= torch.zeros_like(seen).scatter_(1, best, True)
        chosen[rows, :most] = seen
    return chosen


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    count, heads, dim = queries.shape
    products = aligned(queries.reshape(-1, dim)) @ aligned(keys).T
    products = products.relu().view(count, heads, -1)
    return (products * weights[..., None]).sum(1)
