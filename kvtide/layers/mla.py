"""Latent attention (MLA) over pages: all heads read one short vector per token.

A token leaves behind a latent, from which a projection would make every head's keys and values, and
a key of a few more dimensions that all heads share and that is kept after its rotation. Keys and
values are never made here. That projection is applied to the queries instead, so that they meet
latents as they were kept, and to what they mix: attention has one key, latent and shared part
side by side, and one value, the latent, for all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Arithmetic
from kvtide.layers.attention import Attending, attend, attend_seen
from kvtide.layers.blueprint import Blueprint
from kvtide.layers.forward import ForwardPass
from kvtide.layers.packing import Fields
from kvtide.layers.rope import Rope
from kvtide.layers.step import Rows

# Norms of what is narrowed take this, whatever the config says of the other norms.
_NARROW_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys turn: at which speeds, and which dimensions make a pair.

    `turn` is a function like `rotate`. It is given heads that have no dimensions but those.
    """

    rope: Rope
    turn: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, arithmetic: Arithmetic, run: ForwardPass) -> Tensor:
        """x (tokens, heads, dimensions that turn), turned to the positions of the step."""
        turns = run.shared(self.rope, lambda: arithmetic.rowwise(self.rope, run.positions))
        return self.turn(x, turns)


class LatentAttention:
    """Queries by head, one latent and one shared key for all of them.

    Without a rotation the shared key is kept as it is. Queries come through a narrow vector
    where the checkpoint has such weights. Heads divide over ranks; what is kept does not.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        layer: int,
        rotation: Rotation | None,
        scale: float | None = None,
    ) -> None:
        config = blueprint.config
        self.arithmetic, self.rotation = blueprint.arithmetic, rotation
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
        self.how = Attending(scale or self.query_dim**-0.5)
        self.by_head = self.arithmetic.order(_heads_together, self._head_by_head)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return self.attended(x, self.narrowed(x), run)

    def narrowed(self, x: Tensor) -> Tensor:
        """What queries are made of."""
        return x if self.narrow_norm is None else self.narrow_norm(self.narrow(x))

    def attended(
        self, x: Tensor, narrow: Tensor, run: ForwardPass, seen: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Keeps the step's latents and attends with its queries.

        `seen` has for every sequence what each of its queries sees, (queries, tokens); where
        programs run, it has for all of them together the numbers of the tokens that each sees,
        (queries, count). Without it they see all tokens up to themselves.
        """
        queries, kept = self._latent_queries(narrow, run), self._keep(x, run)
        mixed = self._mixed(queries, kept, run, seen)
        return self.out(self.by_head(mixed, self.from_latent).flatten(1))

    def _mixed(
        self, queries: Tensor, kept: Fields, run: ForwardPass, seen: Sequence[Tensor] | None
    ) -> Tensor:
        """The latents that queries see, with their shares: (tokens, heads, latent dimensions)."""
        if self.arithmetic.runs_programs(queries.device):
            # Only who has such a device needs the compiler.
            from kvtide.layers.kernels.mla import attend_latent

            chosen = None if seen is None else seen[0]
            return attend_latent(run, self.place, queries, self.how, chosen)
        block, mixed = self.arithmetic.query_block, []
        for rows, view in zip(run.sequences, seen or repeat(None), strict=seen is not None):
            ours = queries[rows.start : rows.end]
            keys, latents = self._context(rows, kept, run)
            if view is None:
                mixed.append(attend(ours, keys, latents, self.how, block))
            else:
                mixed.append(attend_seen(ours, keys, latents, view, self.how, block))
        return torch.cat(mixed)

    def _latent_queries(self, narrow: Tensor, run: ForwardPass) -> Tensor:
        """(tokens, heads, latent and shared dimensions)."""
        heads = self.queries(narrow).view(len(narrow), -1, self.query_dim)
        plain, shared = heads.split((self.plain, self.shared), dim=-1)
        return torch.cat([self.by_head(plain, self.to_latent), self._turned(shared, run)], dim=-1)

    def _keep(self, x: Tensor, run: ForwardPass) -> Fields:
        latent, shared = self.latent(x).split((self.rank, self.shared), dim=-1)
        turned = self._turned(shared[:, None], run)[:, 0]
        return run.keep(self.place, {"latent": self.latent_norm(latent), "rope": turned})

    def _turned(self, x: Tensor, run: ForwardPass) -> Tensor:
        return x if self.rotation is None else self.rotation(x, self.arithmetic, run)

    def _context(self, rows: Rows, kept: Fields, run: ForwardPass) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of a sequence, as one head."""
        past, new = run.entries(self.place, rows), slice(rows.start, rows.end)
        latents, shared = (
            torch.cat([past[name], kept[name][new]]).float() for name in ("latent", "rope")
        )
        return torch.cat([latents, shared], dim=-1)[:, None], latents[:, None]

    def _head_by_head(self, x: Tensor, weights: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        return torch.stack([linear(x[:, i], weight) for i, weight in enumerate(weights)], dim=1)


def _heads_together(x: Tensor, weights: Tensor) -> Tensor:
    """Every head of x (tokens, heads, in) times its own weights (heads, out, in)."""
    return torch.bmm(x.transpose(0, 1), weights.mT).transpose(0, 1)
