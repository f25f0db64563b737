"""Top-k selection, and the indexer of sparse attention (DSA): the torch reference.

Of equal scores the first is selected. A selection then does not depend on later entries, on the
device, or on the chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import aligned
from kvtide.layers.backend.kernel_args import CompressedStream
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.reference.compressor import all_entries


def top_k(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest `count` scores of each row, best first."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def select_tokens(
    run: ForwardPass,
    place: Place,
    queries: Tensor,
    weights: Tensor,
    kept: Tensor,
    count: int,
    block: int,
) -> list[Tensor]:
    """What each query selects of the tokens up to itself, by the index keys in `place`.

    A mask (queries, tokens) for every sequence; `kept` are the step's own keys.
    """
    masks = []
    for rows in run.sequences:
        new = slice(rows.start, rows.end)
        keys = torch.cat([run.read_entries(place, rows)["index_key"], kept[new]])
        visible = torch.arange(rows.past + 1, rows.total + 1, device=keys.device)
        masks.append(select(queries[new], weights[new], keys, visible, count, block))
    return masks


def select_blocks(
    run: ForwardPass,
    stream: CompressedStream,
    closed: Sequence[Tensor],
    queries: Tensor,
    weights: Tensor,
    count: int,
    block: int,
) -> list[Tensor]:
    """What each query selects of the closed blocks before it: a mask for every sequence.

    `closed` are the entries of the step, by sequence.
    """
    masks = []
    for rows, ours in zip(run.sequences, closed, strict=True):
        new, keys = slice(rows.start, rows.end), all_entries(run, stream, rows, ours)
        visible = (run.positions[new] + 1) // stream.ratio
        masks.append(select(queries[new], weights[new], keys, visible, count, block))
    return masks


def select(
    queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, count: int, block: int
) -> Tensor:
    """The entries that an indexer selects for each query: a mask (tokens, entries).

    An entry's score is Σ over heads of weight · relu(query · key). Query i selects up to `count` of
    the first `visible[i]` entries, which may only grow from query to query. Queries (tokens,
    heads, dim), weights (tokens, heads), keys (entries, dim). A block of queries scores exactly the
    entries that some query in it sees.
    """
    selected = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    keys, numbers, limits = (
        keys.float(),
        torch.arange(len(keys), device=keys.device),
        visible.tolist(),
    )
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        limit = limits[rows][-1]
        seen = numbers[:limit] < visible[rows, None]
        if limit > count:
            scores = _scores(queries[rows].float(), weights[rows].float(), keys[:limit])
            best = top_k(scores.masked_fill(~seen, -torch.inf), count)
            seen &= torch.zeros_like(seen).scatter_(1, best, True)
        selected[rows, :limit] = seen
    return selected


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    count, heads, dim = queries.shape
    dots = aligned(queries.reshape(-1, dim)) @ aligned(keys).T
    dots = dots.relu().view(count, heads, -1)
    return (dots * weights[..., None]).sum(1)
