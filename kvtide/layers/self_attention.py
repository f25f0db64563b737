"""Attention by head over pages: the layer.

Biases, norms of queries and keys, and sinks exist where the checkpoint has such weights. The window
is that of the pool that keeps the layer's keys.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers.backend.kernel_args import AttentionParams, AttentionParts, QKVParams
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.dense import Linear
from kvtide.layers.elementwise import sigmoid
from kvtide.layers.forward import ForwardPass
from kvtide.layers.rope import Rope


class Attention:
    """Queries, keys and values by head; keys are stored after their rotation, if there is one.

    `cap` limits scores by a tanh; `key_gain` multiplies keys.
    """

    QUERY_NORM: ClassVar[str] = "q_norm"
    KEY_NORM: ClassVar[str] = "k_norm"
    OUT: ClassVar[str] = "o_proj"

    def __init__(
        self,
        blueprint: Blueprint,
        layer: int,
        rope: Rope | None,
        scale: float | None = None,
        cap: float | None = None,
        key_gain: float = 1.0,
    ) -> None:
        self.ops, self.arithmetic = blueprint.ops, blueprint.arithmetic
        self.place = blueprint.place(layer, "k")
        self.kv_heads, self.head_dim = self.place.field("k").shape
        self.rope = rope
        self.qkv = self.projection(blueprint)
        self.out = blueprint.rows(self.OUT, unit=self.head_dim)
        query_norm, key_norm = (
            blueprint.norm(name).params if blueprint.has(f"{name}.weight") else None
            for name in (self.QUERY_NORM, self.KEY_NORM)
        )
        self.preparing = QKVParams(self.kv_heads, query_norm, key_norm, key_gain)
        sinks = blueprint.tensor("sinks", torch.float32) if blueprint.has("sinks") else None
        sinks = None if sinks is None else blueprint.shard(sinks)
        self.how = AttentionParams(scale or self.head_dim**-0.5, self.place.window, sinks, cap)
        self.parts = AttentionParts(self.qkv, self.out, self.preparing, self.how)

    def projection(self, blueprint: Blueprint) -> Linear:
        """Queries, keys and values, side by side."""
        return blueprint.columns("q_proj", "k_proj", "v_proj", unit=self.head_dim)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return self.ops.self_attention(run, self.place, x, self.parts, self.cos_sin(run))

    def cos_sin(self, run: ForwardPass) -> Tensor | None:
        """What the rotation of the step's positions takes."""
        if (rope := self.rope) is None:
            return None
        return run.shared(rope, lambda: self.arithmetic.rowwise(rope, run.positions))


class GatedAttention(Attention):
    """Every head's output is multiplied by a gate, which is projected beside its query."""

    def projection(self, blueprint: Blueprint) -> Linear:
        """Queries, keys, values and gates, side by side."""
        whole = blueprint.linear("q_proj")
        keys_values = blueprint.columns("k_proj", "v_proj", unit=self.head_dim)
        weight = self._beside(blueprint, whole.weight, keys_values.weight)
        if whole.bias is None and keys_values.bias is None:
            return Linear(self.arithmetic, weight)
        bias = self._beside(blueprint, whole.bias_or_zeros, keys_values.bias_or_zeros)
        return Linear(self.arithmetic, weight, bias)

    def _beside(self, blueprint: Blueprint, whole: Tensor, keys_values: Tensor) -> Tensor:
        """With this rank's shard of queries and gates, which alternate in `whole`."""
        parts = _queries_and_gates(whole, self.head_dim)
        queries, gates = (blueprint.shard(part, self.head_dim) for part in parts)
        return torch.cat([queries, keys_values, gates])

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        by_head = self.qkv(x).view(len(x), -1, self.head_dim)
        heads = (by_head.shape[1] - 2 * self.kv_heads) // 2
        attending, gates = by_head.split((heads + 2 * self.kv_heads, heads), dim=1)
        queries, kept = self.ops.qkv_write(
            run, self.place, attending, self.cos_sin(run), self.preparing
        )
        attended = self.ops.paged_attention(run, self.place, queries, kept, self.how).flatten(1)
        opened = self.arithmetic.rowwise(sigmoid, gates.flatten(1))
        return self.out(attended * opened.to(x.dtype))


def _queries_and_gates(weight: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Of heads in the order query, gate, query, gate: all queries, and all gates."""
    alternating = weight.unflatten(0, (-1, 2, head_dim))
    return alternating[:, 0].flatten(0, 1), alternating[:, 1].flatten(0, 1)
