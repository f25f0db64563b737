"""Paged attention by head: the torch reference, and attention without pages.

Queries are taken in blocks; a block reads exactly the keys that some query in it sees, and a mask
hides the others. With blocks of one query, all shapes depend on the number of visible tokens
alone, and so does the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import aligned
from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields


def paged_attention(
    run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams, block: int
) -> Tensor:
    """Attention of the step's queries (tokens, heads, dim) over the pages of their sequences.

    Keys and values of the step's own tokens come from the step: a page that is no longer needed
    when the step ends has no slot.
    """
    out = []
    for rows in run.sequences:
        new = slice(rows.start, rows.end)
        past = run.read_entries(place, rows, how.first_seen(rows.past))
        context = {name: torch.cat([past[name], kept[name][new]]) for name in kept}
        out.append(attend(queries[new], context["k"], context["v"], how, block))
    return torch.cat(out)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, how: AttentionParams, block: int
) -> Tensor:
    """Causal attention of queries (tokens, heads, dim), which belong to the last of the keys.

    Keys and values have fewer heads; each serves as many neighbouring query heads (GQA).
    """
    past = len(keys) - len(queries)
    keys, values = keys.float(), values.float()
    if block == 1:
        return _attend_singly(queries, keys, values, how, past)
    out = []
    for start in range(0, len(queries), block):
        some = queries[start : start + block]
        position = past + start
        seen = slice(how.first_seen(position), position + len(some))
        ours = (aligned(keys[seen]), aligned(values[seen]))
        hidden = None
        if len(some) > 1:
            hidden = _hidden(len(some), len(ours[0]), how.window, keys.device)
        out.append(_attend_block(some.float(), *ours, how, hidden))
    return torch.cat(out).to(queries.dtype)


def _attend_singly(
    queries: Tensor, keys: Tensor, values: Tensor, how: AttentionParams, past: int
) -> Tensor:
    """One query after another, with as few operations for each as there can be."""
    keys, values = aligned(keys), aligned(values)
    out = []
    for number, query in enumerate(_grouped(queries, keys, how)):
        first, end = how.first_seen(past + number), past + number + 1
        ours = keys.narrow(0, first, end - first), values.narrow(0, first, end - first)
        if first:
            ours = aligned(ours[0]), aligned(ours[1])
        out.append(_attend_one(query, *ours, how))
    return torch.stack(out).flatten(1, 2).to(queries.dtype)


def _attend_chosen(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: AttentionParams
) -> Tensor:
    """The same, over the keys that each query sees."""
    out = []
    for query, view in zip(_grouped(queries, keys, how), seen, strict=True):
        rows = torch.nonzero(view).squeeze(1)
        out.append(
            _attend_one(query, keys.index_select(0, rows), values.index_select(0, rows), how)
        )
    return torch.stack(out).flatten(1, 2).to(queries.dtype)


def _grouped(queries: Tensor, keys: Tensor, how: AttentionParams) -> Iterator[Tensor]:
    """Scaled queries one by one: (kv heads, heads of each, dim)."""
    scaled = queries.float() * how.scale
    return map(aligned, scaled.unflatten(1, (keys.shape[1], -1)))


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, how: AttentionParams) -> Tensor:
    """A query (kv heads, heads of each, dim) over all keys (tokens, kv heads, dim)."""
    scores = torch.bmm(query, keys.permute(1, 2, 0))
    if how.cap is not None:
        scores = torch.tanh(scores / how.cap) * how.cap
    if how.sinks is None:
        return torch.bmm(scores.softmax(-1), values.transpose(0, 1))
    probabilities = _softmax(scores[:, :, None], how.sinks).squeeze(2)
    return torch.bmm(probabilities.contiguous(), values.transpose(0, 1))


def attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, how: AttentionParams, block: int
) -> Tensor:
    """As `attend`, but each query sees the keys where `seen` (queries, keys) is true.

    With blocks of one query, its keys are gathered first, so no other key affects the result.
    """
    keys, values = keys.float(), values.float()
    if block == 1:
        return _attend_chosen(queries, keys, values, seen, how)
    out = []
    for start in range(0, len(queries), block):
        some, view = queries[start : start + block].float(), seen[start : start + block]
        rows = torch.nonzero(view.any(0)).squeeze(1)
        ours = (keys.index_select(0, rows), values.index_select(0, rows))
        hidden = None if len(some) == 1 else ~view[:, rows]
        out.append(_attend_block(some, *ours, how, hidden))
    return torch.cat(out).to(queries.dtype)


def _attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, how: AttentionParams, hidden: Tensor | None
) -> Tensor:
    count, heads, dim = queries.shape
    kv_heads, each = keys.shape[1], heads // keys.shape[1]
    grouped = (queries * how.scale).view(count, kv_heads, each, dim).permute(1, 2, 0, 3)
    scores = torch.bmm(grouped.reshape(kv_heads, each * count, dim), keys.permute(1, 2, 0))
    scores = scores.view(kv_heads, each, count, len(keys))
    if how.cap is not None:
        scores = torch.tanh(scores / how.cap) * how.cap
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    probabilities = _softmax(scores, how.sinks).reshape(kv_heads, each * count, len(keys))
    out = torch.bmm(probabilities, values.transpose(0, 1)).view(kv_heads, each, count, -1)
    return out.permute(2, 0, 1, 3).reshape(count, heads, -1)


def _hidden(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(queries, keys): true where a key is masked. The last query belongs to the last key."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    hidden = key > position
    return hidden if window is None else hidden | (key <= position - window)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys; a sink takes part in the normalisation and has no value."""
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, each, count, keys = scores.shape
    sink = sinks.view(kv_heads, each, 1, 1).expand(-1, -1, count, 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :keys]
