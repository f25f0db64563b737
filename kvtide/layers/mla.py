"""Latent attention (MLA) over pages: all heads read one short vector per token.

The cache has a latent for every token, from which a projection would make every head's keys and
values, and a rotated key of a few more dimensions that all heads share. Keys and values are never
made: the projection is absorbed into queries and outputs. Attention then has one key, latent and
shared part side by side, and one value, the latent, for all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import AttentionParams
from kvtide.layers.backend.ops import Selection
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.forward import ForwardPass
from kvtide.layers.packing import Fields
from kvtide.layers.rope import Rope

# Of the norms of low-rank vectors, whatever the config says of other norms.
_NARROW_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys are rotated: by which frequencies, and which dimensions make a pair.

    `rotate` is `rotate_half` or `rotate_interleaved`, over heads of rotated dimensions alone.
    """

    rope: Rope
    rotate: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, arithmetic: Arithmetic, run: ForwardPass) -> Tensor:
        """x (tokens, heads, rotated dimensions) at the positions of the step."""
        cos_sin = run.shared(self.rope, lambda: arithmetic.rowwise(self.rope, run.positions))
        return self.rotate(x, cos_sin)


class LatentAttention:
    """Queries by head, one latent and one shared key for all of them.

    Without a rotation the shared key is stored as it is. Queries come from a low-rank vector
    where the checkpoint has such weights. Heads are sharded over ranks; the cache is not.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        layer: int,
        rotation: Rotation | None,
        scale: float | None = None,
    ) -> None:
        config = blueprint.config
        self.ops, self.arithmetic, self.rotation = blueprint.ops, blueprint.arithmetic, rotation
        self.place = blueprint.place(layer, "latent")
        self.rank, self.shared = (self.place.field(f).shape[0] for f in ("latent", "rope"))
        self.plain, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
        self.query_dim = self.plain + self.shared
        self.narrow_norm = None
        if blueprint.has("q_a_proj.weight"):
            self.narrow = blueprint.linear("q_a_proj")
            self.narrow_norm = replace(blueprint.norm("q_a_layernorm"), eps=_NARROW_EPS)
        wide = "q_proj" if self.narrow_norm is None else "q_b_proj"
        self.queries = blueprint.columns(wide, unit=self.query_dim)
        self.latent = blueprint.linear("kv_a_proj_with_mqa")
        self.latent_norm = replace(blueprint.norm("kv_a_layernorm"), eps=_NARROW_EPS)
        both = blueprint.columns("kv_b_proj", unit=self.plain + value).weight
        both = both.view(-1, self.plain + value, self.rank)
        self.to_latent = both[:, : self.plain].mT.contiguous()
        self.from_latent = both[:, self.plain :].contiguous()
        self.out = blueprint.rows("o_proj", unit=value)
        self.how = AttentionParams(scale or self.query_dim**-0.5)
        self.by_head = self.arithmetic.order(_heads_together, self._head_by_head)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return self.attended(x, self.narrowed(x), run)

    def narrowed(self, x: Tensor) -> Tensor:
        """What queries are projected from: a low-rank vector, or x."""
        return x if self.narrow_norm is None else self.narrow_norm(self.narrow(x))

    def attended(
        self, x: Tensor, narrow: Tensor, run: ForwardPass, selected: Selection | None = None
    ) -> Tensor:
        """Writes the step's latents and attends with its queries.

        Without a selection, queries see all tokens up to themselves.
        """
        queries, kept = self._latent_queries(narrow, run), self._keep(x, run)
        if self.place.pool.hot is not None:
            assert selected is not None, "a hot pool is read through a selection"
            selected = self.ops.swap_in(run, self.place, selected)
        out = self.ops.mla_attention(run, self.place, queries, kept, self.how, selected)
        return self.out(self.by_head(out, self.from_latent).flatten(1))

    def _latent_queries(self, narrow: Tensor, run: ForwardPass) -> Tensor:
        """(tokens, heads, latent and shared dimensions)."""
        heads = self.queries(narrow).view(len(narrow), -1, self.query_dim)
        plain, shared = heads.split((self.plain, self.shared), dim=-1)
        return torch.cat([self.by_head(plain, self.to_latent), self._rotated(shared, run)], dim=-1)

    def _keep(self, x: Tensor, run: ForwardPass) -> Fields:
        latent, shared = self.latent(x).split((self.rank, self.shared), dim=-1)
        rotated = self._rotated(shared[:, None], run)[:, 0]
        return self.ops.kv_write(
            run, self.place, {"latent": self.latent_norm(latent), "rope": rotated}
        )

    def _rotated(self, x: Tensor, run: ForwardPass) -> Tensor:
        return x if self.rotation is None else self.rotation(x, self.arithmetic, run)

    def _head_by_head(self, x: Tensor, weights: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        return torch.stack([linear(x[:, i], weight) for i, weight in enumerate(weights)], dim=1)


def _heads_together(x: Tensor, weights: Tensor) -> Tensor:
    """Every head of x (tokens, heads, in) times its own weights (heads, out, in)."""
    return torch.bmm(x.transpose(0, 1), weights.mT).transpose(0, 1)
