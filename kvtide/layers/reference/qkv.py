"""From a projection to queries, keys and values by head: norms, a gain, the rotation."""

from __future__ import annotations

from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import Norm, QKVParams
from kvtide.layers.elementwise import rms_norm
from kvtide.layers.rope import rotate_half

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values: (tokens, heads, dim) each."""


def split_heads(
    arithmetic: Arithmetic, by_head: Tensor, cos_sin: Tensor | None, how: QKVParams
) -> Heads:
    """Of (tokens, heads + 2 · KV heads, dim); `cos_sin` is what a `Rope` gives for the tokens."""
    split = (by_head.shape[1] - 2 * how.kv_heads, how.kv_heads, how.kv_heads)
    queries, keys, values = by_head.split(split, dim=1)
    queries = _normed(arithmetic, queries, how.query_norm)
    keys = _normed(arithmetic, keys, how.key_norm)
    keys = keys if how.key_gain == 1 else keys * how.key_gain
    if cos_sin is None:
        return queries, keys, values
    return rotate_half(queries, cos_sin), rotate_half(keys, cos_sin), values


def _normed(arithmetic: Arithmetic, x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else arithmetic.rowwise(lambda rows: rms_norm(rows, *norm), x)
