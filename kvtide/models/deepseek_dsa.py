"""DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer selects (DSA).

An indexer scores all tokens by keys of its own, and a query sees the best of them. Some layers of
GLM models have no indexer and take the selection of the layer before them. A next-token layer has
an indexer of its own, and selects anew for every token that it drafts. With
`index_share_for_mtp_iteration` other engines select for the last accepted token, and take that
selection for the drafts behind the first: the same drafts while all tokens fit a selection, but for
the run's own. docs/SPECULATION.md says why it is not followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass
from kvtide.layers.backend.ops import Selection
from kvtide.layers.dense import LayerNorm, Linear
from kvtide.layers.mla import LatentAttention, Rotation
from kvtide.models.deepseek import (
    DeepSeek3,
    DeepSeekLayer,
    DeepSeekNextToken,
    rotation_of,
    rotation_style,
    scale_of,
)
from kvtide.models.model import Layer
from kvtide.spec.config import Config

_SHARES = "index_share_for_mtp_iteration"
_SELECTED = "tokens that an indexer selected"


class TokenIndexer:
    """Stores a key for every token, and selects the tokens that each query sees.

    It is whole on every rank. The first dimensions of its queries and keys are rotated.
    """

    def __init__(self, blueprint: Blueprint, layer: int, rotation: Rotation) -> None:
        config = blueprint.config
        self.ops, self.arithmetic, self.rotation = blueprint.ops, blueprint.arithmetic, rotation
        self.place = blueprint.place(layer, "index_key")
        self.heads, self.count = config.count("index_n_heads"), config.count("index_topk")
        self.dim, self.rotary_dim = self.place.field("index_key").shape[0], rotation.rope.dims
        self.queries, self.keys = blueprint.linear("wq_b"), blueprint.linear("wk")
        self.key_norm = LayerNorm(
            self.ops,
            blueprint.tensor("k_norm.weight", torch.float32),
            blueprint.tensor("k_norm.bias", torch.float32),
            eps=1e-6,
        )
        weights = blueprint.tensor("weights_proj.weight", torch.float32)
        self.weights = Linear(self.arithmetic, weights)
        self.scale = (self.heads * self.dim) ** -0.5

    def __call__(self, x: Tensor, narrow: Tensor, run: ForwardPass) -> Selection:
        """The tokens that each query sees."""
        queries = self._rotated(self.queries(narrow).view(len(x), self.heads, self.dim), run)
        keys = self._rotated(self.key_norm(self.keys(x))[:, None], run)[:, 0]
        kept = self.ops.kv_write(run, self.place, {"index_key": keys})["index_key"]
        weights = self.weights(x.float()) * self.scale
        return self.ops.select_tokens(run, self.place, queries, weights, kept, self.count)

    def _rotated(self, x: Tensor, run: ForwardPass) -> Tensor:
        first, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        return torch.cat([self.rotation(first, self.arithmetic, run), rest], dim=-1)


class SparseLatentAttention(LatentAttention):
    """Without an indexer of its own, a layer takes the last selection before it."""

    indexer: TokenIndexer | None = None

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        narrow = self.narrowed(x)
        if self.indexer is not None:
            run.left_by_layers[_SELECTED] = self.indexer(x, narrow, run)
        return self.attended(x, narrow, run, run.left_by_layers[_SELECTED])


class SparseLayers:
    """Builds layers, with an indexer or without, that rotate by the same frequencies."""

    def __init__(self, config: Config) -> None:
        self.rotation, self.scale = rotation_of(config), scale_of(config)
        style = rotation_style(config, "indexer_rope_interleave")
        self.of_indexer = Rotation(self.rotation.rope, style)

    def __call__(self, blueprint: Blueprint, number: int, indexed: bool) -> DeepSeekLayer:
        beneath = blueprint.under("self_attn")
        attention = SparseLatentAttention(beneath, number, self.rotation, self.scale)
        if indexed:
            attention.indexer = TokenIndexer(beneath.under("indexer"), number, self.of_indexer)
        return DeepSeekLayer(blueprint, attention)


class DeepSeek32(DeepSeek3):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        **DeepSeek3.DEFAULTS,
        "indexer_rope_interleave": False,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        config, indexed = base.config, _indexed(base)
        first = base.memory.own_layers.start
        if first not in indexed:
            raise config.refusal(
                f"layer {first} takes the selection of an indexer before it, and begins a stage "
                "without one; use another number of stages, so that each begins with an indexer"
            )
        build = SparseLayers(config)
        return [build(each, number, number in indexed) for number, each in base.layers()]


class GlmMoeDsa(DeepSeek32):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        **DeepSeek32.DEFAULTS,
        "indexer_rope_interleave": True,
        "n_group": 1,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
    }


class SparseNextToken(DeepSeekNextToken):
    @classmethod
    def remark(cls, config: Config) -> str:
        if not config.flag(_SHARES):
            return ""
        return f"{_SHARES} is not followed: every draft selects its tokens anew"

    def build_layer(self, base: Blueprint) -> Layer:
        return SparseLayers(base.config)(base, self.number, indexed=True)


def _indexed(base: Blueprint) -> frozenset[int]:
    """The layers of this stage that keep index keys."""
    pools = (pool for pool in base.memory.pools if pool.entry.fields[0].name == "index_key")
    return frozenset(layer for pool in pools for layer in pool.layers)
