"""Attention by head over pages.

What a layer has is what its checkpoint and its pool say: biases, norms of queries and keys, and
sinks if there are such weights; a window if the pool that keeps its keys reaches only so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.layers.attending import Attending, attend
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.rope import Rope, rotate


class Attention:
    """Queries, keys and values by head; keys are kept after their rotation."""

    def __init__(
        self, blueprint: Blueprint, layer: int, rope: Rope, scale: float | None = None
    ) -> None:
        self.arithmetic = blueprint.arithmetic
        self.place = blueprint.place(layer, "k")
        self.kv_heads, self.head_dim = self.place.field("k").shape
        self.rope = rope
        self.qkv = blueprint.linear("q_proj", "k_proj", "v_proj")
        self.out = blueprint.linear("o_proj")
        self.query_norm = blueprint.norm("q_norm") if blueprint.has("q_norm.weight") else None
        self.key_norm = blueprint.norm("k_norm") if blueprint.has("k_norm.weight") else None
        sinks = blueprint.tensor("sinks", torch.float32) if blueprint.has("sinks") else None
        self.how = Attending(scale or self.head_dim**-0.5, self.place.window, sinks)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        queries, keys, values = self.heads(x)
        turns = run.shared(self.rope, lambda: self.arithmetic.rowwise(self.rope, run.positions))
        heads = (rotate(queries, turns), rotate(keys, turns), values)
        block = self.arithmetic.query_block
        return self.out(attend_over_pages(run, self.place, heads, self.how, block).flatten(1))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Before rotation: (tokens, heads, dim) each."""
        by_head = self.qkv(x).view(len(x), -1, self.head_dim)
        split = (by_head.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads)
        queries, keys, values = by_head.split(split, dim=1)
        queries = queries if self.query_norm is None else self.query_norm(queries)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        return queries, keys, values


def attend_over_pages(
    run: ForwardPass,
    place: Place,
    heads: tuple[Tensor, Tensor, Tensor],
    how: Attending,
    query_block: int,
) -> Tensor:
    """Keeps the step's keys and values, and attends with its queries: (tokens, heads, dim).

    Keys and values of the step's own tokens come from the step: a page that is no longer needed
    when the step ends has no slot.
    """
    queries, keys, values = heads
    kept = run.keep(place, {"k": keys, "v": values})
    mixed = []
    for rows in run.sequences:
        new = slice(rows.start, rows.end)
        past = run.entries(place, rows, how.first_seen(rows.past))
        context = {name: torch.cat([past[name], kept[name][new]]) for name in kept}
        mixed.append(attend(queries[new], context["k"], context["v"], how, query_block))
    return torch.cat(mixed)
