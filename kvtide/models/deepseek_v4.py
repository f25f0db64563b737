"""DeepSeek-V4: four residual streams, and attention to a window and to compressed history.

Every layer attends to its last tokens. Most also have one entry for every block of tokens: blocks
of 4, of which an indexer selects a few for each query, or of 128, which are all seen. One vector
is key and value of a token or block, for all heads. The first layers look experts up by token id.

The parts are in `layers/`: `hyper_connections`, `compressor`, and of `reference/` `indexer`, `mla`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtide.layers import Blueprint, ForwardPass, Place, Step
from kvtide.layers.backend.kernel_args import AttentionParams, RoutingRule
from kvtide.layers.backend.ops import Selection
from kvtide.layers.compressor import Compressor
from kvtide.layers.dense import WideLinear
from kvtide.layers.elementwise import sqrt_softplus
from kvtide.layers.hyper_connections import HyperConnection, HyperHead
from kvtide.layers.moe import Mixture, Router
from kvtide.layers.rope import Rope, rope
from kvtide.models.deepseek_v4_names import DeepSeekV4Weights
from kvtide.models.model import Decoder, Layer
from kvtide.models.mtp import NextTokenDraft
from kvtide.spec.config import Config
from kvtide.spec.families.deepseek_v4 import rotary_dims


class BlockIndexer:
    """Selects, for every query, some of the blocks before it.

    low           the low-rank vector that queries are projected from
    weights       of its heads, for every token
    values_gates  the input of its compressor
    """

    def __init__(self, blueprint: Blueprint, layer: int, pool: str, rotation: Rope) -> None:
        config = blueprint.config
        self.ops = blueprint.ops
        self.compressor = Compressor(blueprint.under("compressor"), layer, pool, rotation)
        self.queries = blueprint.linear("wq_b")
        self.heads = config.count("index_n_heads")
        self.scale = self.compressor.stream.width**-0.5 * self.heads**-0.5
        self.count = config.count("index_topk")

    def __call__(
        self, low: Tensor, weights: Tensor, values_gates: Tensor, cos_sin: Tensor, run: ForwardPass
    ) -> Selection:
        entries = self.compressor(values_gates, run)
        queries = self.ops.rope(self.queries(low).view(len(low), self.heads, -1), cos_sin)
        stream = self.compressor.stream
        return self.ops.select_blocks(
            run, stream, entries, queries, weights, self.scale, self.count
        )


class CompressedAttention:
    """Attention over a window and compressed blocks, one vector for all heads.

    `compressor` and `indexer` are None in layers without them. Tokens go through two projections:
    `project` in the model's dtype, and `compress` in fp32 for all compressors.
    """

    def __init__(self, blueprint: Blueprint, layer: int, pool: str | None, rotation: Rope) -> None:
        config = blueprint.config
        self.ops, self.arithmetic = blueprint.ops, blueprint.arithmetic
        self.rotation = rotation
        self.window = _window(blueprint, layer)
        self.dim, groups = config.count("head_dim"), config.count("o_groups")
        each = config.count("num_attention_heads") // groups
        self.low_norm = blueprint.norm("q_norm")
        self._compress(blueprint, layer, pool)
        self.queries = blueprint.columns("wq_b", unit=each * self.dim)
        self.key_norm = blueprint.norm("norm")
        sinks = blueprint.shard(blueprint.tensor("attn_sink", torch.float32), each)
        assert self.window.window is not None
        self.how = AttentionParams(self.dim**-0.5, self.window.window, sinks)
        rank = config.count("o_lora_rank")
        self.out_groups = blueprint.shard(blueprint.tensor("wo_a.weight"), rank).unflatten(
            0, (-1, rank)
        )
        self.out = blueprint.rows("wo_b", unit=rank)
        self.eps = config.number("rms_norm_eps")

    def _compress(self, blueprint: Blueprint, layer: int, pool: str | None) -> None:
        """Compressor and indexer, and the two projections of tokens."""
        self.compressor, self.indexer, self.compress = None, None, None
        self.compressed: list[int] = []
        names, self.sides = ["wq_a", "wkv"], [len(self.low_norm.weight), self.dim]
        if pool is not None:
            under = blueprint.under("compressor")
            weights = [Compressor.weight(under)]
            self.compressor = Compressor(under, layer, pool, self.rotation)
            if self.compressor.overlaps:
                under = blueprint.under("indexer")
                weights.append(Compressor.weight(under.under("compressor")))
                self.indexer = BlockIndexer(under, layer, f"{pool}_index", self.rotation)
                names.append("indexer.weights_proj")
                self.sides.append(self.indexer.heads)
            self.compressed = [len(weight) for weight in weights]
            self.compress = WideLinear(self.ops, torch.cat(weights), blueprint.dtype)
        self.project = blueprint.linear(*names).weight

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        cos_sin = run.shared(
            self.rotation, lambda: self.arithmetic.rowwise(self.rotation, run.positions)
        )
        low, keys, *rest = self.ops.linear_parts(x, self.project, self.sides)
        low, norm = self.low_norm(low), self.key_norm.params
        kept = self.ops.norm_rope_write(run, self.window, keys, norm, cos_sin)
        values_gates, entries, stream, selected = self._values_gates(x), [], None, None
        if self.compressor is not None:
            entries, stream = self.compressor(values_gates[0], run), self.compressor.stream
        if self.indexer is not None:
            selected = self.indexer(low, rest[0], values_gates[1], cos_sin, run)
            if stream is not None and stream.entries.pool.hot is not None:
                selected = self.ops.swap_in(run, stream.entries, selected)
        queries = self.ops.rope(self.queries(low).unflatten(1, (-1, self.dim)), cos_sin, self.eps)
        out = self.ops.block_attention(
            run, self.window, kept, stream, entries, queries, self.how, selected
        )
        return self._out(self.ops.rope_back(out, cos_sin))

    def _values_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """The input of each compressor."""
        return () if self.compress is None else self.compress(x).split(self.compressed, dim=1)

    def _out(self, out: Tensor) -> Tensor:
        """A low-rank projection of every group of heads, then one of all groups."""
        groups = out.flatten(1).unflatten(1, (len(self.out_groups), -1))
        low = self.ops.grouped_linear(groups, self.out_groups)
        return self.out(low.flatten(1))


def _experts(blueprint: Blueprint) -> Mixture:
    """Experts selected by score, or looked up by token id in the table of a hash layer."""
    config, gate = blueprint.config, blueprint.under("gate")
    if (scoring := config.find("scoring_func")) not in (None, "sqrtsoftplus"):
        raise config.refusal(f"`scoring_func` is {scoring!r}; only sqrtsoftplus is known here")
    rule = RoutingRule(
        config.count("num_experts_per_tok"), scale=config.number("routed_scaling_factor")
    )
    bias, table = (name if gate.has(name) else None for name in ("bias", "tid2eid"))
    router = Router(gate, rule, sqrt_softplus, bias, table)
    names, limit = ("w1", "w3", "w2"), config.number("swiglu_limit")
    shared = blueprint.under("shared_experts").mlp(*names, limit=limit)
    return Mixture.numbered(router, blueprint.under("experts"), shared, *names, limit=limit)


class DeepSeekV4Layer:
    def __init__(self, blueprint: Blueprint, layer: int, pool: str | None, rotation: Rope) -> None:
        self.attention = CompressedAttention(blueprint.under("attn"), layer, pool, rotation)
        self.experts = _experts(blueprint.under("ffn"))
        self.before_attention = blueprint.norm("attn_norm")
        self.before_experts = blueprint.norm("ffn_norm")
        self.around_attention = HyperConnection(blueprint, "hc_attn_")
        self.around_experts = HyperConnection(blueprint, "hc_ffn_")

    def __call__(self, streams: Tensor, run: ForwardPass) -> Tensor:
        x, weights = self.around_attention.normed(streams, self.before_attention)
        given = self.attention(x, run)
        streams = self.around_attention.spread(given, streams, weights)
        x, weights = self.around_experts.normed(streams, self.before_experts)
        given = self.experts(x, run.step.tokens)
        return self.around_experts.spread(given, streams, weights)


class DeepSeekV4(Decoder):
    """Layers and stages pass all streams of every token on."""

    HEAD = "head.weight"
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "rms_norm_eps": 1e-6,
        "swiglu_limit": 10.0,
    }

    def __init__(self, blueprint: Blueprint) -> None:
        self.streams = blueprint.config.count("hc_mult")
        super().__init__(replace(blueprint, weights=DeepSeekV4Weights(blueprint.weights)))

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        near, far = _rotations(base.config)
        pools = {
            layer: pool.name
            for pool in base.memory.pools
            if pool.tokens_per_entry > 1 and not pool.name.endswith("_index")
            for layer in pool.layers
        }
        return [
            DeepSeekV4Layer(each, number, pools.get(number), far if number in pools else near)
            for number, each in base.layers()
        ]

    def close(self, base: Blueprint) -> None:
        super().close(base)
        self.joined = HyperHead(base, "hc_head.hc_")

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens)[:, None].repeat(1, self.streams, 1)

    def carried(self, tokens: Tensor) -> Tensor:
        return super().carried(tokens)[:, None].repeat(1, self.streams, 1)

    def closed(self, x: Tensor) -> Tensor:
        return super().closed(self.joined(x))


class DeepSeekV4NextToken(NextTokenDraft):
    """A layer with a window only, over the model's residual streams.

    The feature of a token are its streams: after the target's last layer, or after this one. Both
    are joined and normed for the head alone, here by weights of the draft's own.
    """

    NORM = "norm"

    def __init__(self, target: Decoder, blueprint: Blueprint) -> None:
        weights = DeepSeekV4Weights(blueprint.weights)
        super().__init__(target, replace(blueprint, weights=weights))

    @classmethod
    def under(cls, config: Config) -> str:
        return "mtp.0"

    def build_projections(self, base: Blueprint) -> None:
        self.of_token, self.of_streams = base.linear("e_proj"), base.linear("h_proj")
        self.joined = HyperHead(base, "hc_head.hc_")

    def build_layer(self, base: Blueprint) -> Layer:
        near, _ = _rotations(base.config)
        return DeepSeekV4Layer(base, self.number, None, near)

    def features(self, captured: Tensor) -> Tensor:
        return captured

    @torch.no_grad()
    def forward(self, step: Step, features: Tensor) -> Tensor:
        token = self.of_token(self.embed(step.tokens))
        streams = self.of_streams(self.feature_norm(features).flatten(0, 1)).view_as(features)
        step.wait(self.number)
        return self.layer(token[:, None] + streams, ForwardPass(step))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(self.joined(hidden)))


def _window(blueprint: Blueprint, layer: int) -> Place:
    """The pool of a layer's last tokens: the model's own, or a draft's."""
    pools = (p for p in blueprint.memory.pools if layer in p.layers and p.tail_entries is None)
    return Place(next(pool for pool in pools if pool.tokens_per_entry == 1), layer)


def _rotations(config: Config) -> tuple[Rope, Rope]:
    """Of layers with a window only, and of those with compressed history, which reach further.

    As `transformers` saves them, or as the lab writes them; neither has a gain.
    """
    saved = config.nested("rope_parameters") or Config(config.model, {})
    near, far = saved.nested("main"), saved.nested("compress")
    near = near or Config(config.model, {})
    far = far or config.nested("rope_scaling") or Config(config.model, {})
    theta, far_theta = (
        config.number("rope_theta", default=1e4),
        config.number("compress_rope_theta"),
    )
    dims = rotary_dims(config)
    plain = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    return (
        rope(Config(config.model, {"rope_theta": theta, **near.values, **plain}), dims),
        rope(Config(config.model, {"rope_theta": far_theta, **far.values, **plain}), dims),
    )
