"""From a projection to queries, keys and values by head: norms, a gain, the rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtide.layers.dense import RMSNorm
from kvtide.layers.rope import rotate

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values: (tokens, heads, dim) each."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """What a layer does with its heads: norms where there are any, of each head by itself, and what
    keys are multiplied by before they turn."""

    kv_heads: int
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    key_gain: float = 1.0

    def __call__(self, by_head: Tensor, turns: Tensor | None) -> Heads:
        """Of (tokens, heads + 2 · KV heads, dim); `turns` is what a `Rope` says of the tokens."""
        split = (by_head.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads)
        queries, keys, values = by_head.split(split, dim=1)
        queries = queries if self.query_norm is None else self.query_norm(queries)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        keys = keys if self.key_gain == 1 else keys * self.key_gain
        if turns is None:
            return queries, keys, values
        return rotate(queries, turns), rotate(keys, turns), values
