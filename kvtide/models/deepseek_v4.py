"""DeepSeek-V4: four residual streams, and attention to a window and to compressed history.

Every layer attends to its last tokens. Most also keep one entry for every block of tokens: blocks
of 4, of which an indexer chooses a few for each query, or of 128, which are all seen. One vector is
key and value of a token, of a block and of all heads. The first layers choose experts by token.

Where things stand in `layers/`: the streams in `streams`, compressors in `compressing`, the choice
in `selecting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers import Blueprint, ForwardPass, Place, Step
from kvtide.layers.attention import Attending, attend_seen
from kvtide.layers.compressor import Compressor
from kvtide.layers.dense import WideLinear
from kvtide.layers.elementwise import rms_norm, sqrt_softplus
from kvtide.layers.hyper_connections import Around, Joined
from kvtide.layers.indexer import choose
from kvtide.layers.moe import Choice, Mixture, Router
from kvtide.layers.rope import Rope, rope, rotate_neighbours
from kvtide.layers.step import Rows
from kvtide.models.deepseek_v4_names import DeepSeekV4Weights
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config
from kvtide.spec.families.deepseek_v4 import rotary_dims


class BlockIndexer:
    """Chooses, for every query, some of the blocks before it.

    low       what queries are made of
    weights   of its heads, for every token
    products  for its compressor
    """

    def __init__(self, blueprint: Blueprint, layer: int, pool: str, rotation: Rope) -> None:
        config = blueprint.config
        self.arithmetic = blueprint.arithmetic
        self.compressor = Compressor(blueprint.under("compressor"), layer, pool, rotation)
        self.queries = blueprint.linear("wq_b")
        self.heads = config.count("index_n_heads")
        self.scale = self.compressor.width**-0.5 * self.heads**-0.5
        self.count = config.count("index_topk")

    def __call__(
        self, low: Tensor, weights: Tensor, products: Tensor, turns: Tensor, run: ForwardPass
    ) -> list[Tensor]:
        """By sequence: (tokens, entries), true where chosen."""
        queries = self.queries(low).view(len(low), self.heads, -1)
        queries, weights = rotate_neighbours(queries, turns), weights * self.scale
        chosen = []
        for rows, keys in zip(run.sequences, self.compressor(products, run), strict=True):
            new = slice(rows.start, rows.end)
            visible = (run.positions[new] + 1) // self.compressor.ratio
            block = self.arithmetic.query_block
            chosen.append(choose(queries[new], weights[new], keys, visible, self.count, block))
        return chosen

    def by_program(
        self, low: Tensor, weights: Tensor, products: Tensor, turns: Tensor, run: ForwardPass
    ) -> Tensor:
        """The numbers of those that are chosen, (tokens, count): -1 for none."""
        from kvtide.layers.kernels.indexer import choose_paged
        from kvtide.layers.kernels.rope import turn

        self.compressor.write(products, run)
        queries = turn(self.queries(low).view(len(low), self.heads, -1), turns)
        # What all weights are multiplied by changes no choice.
        return choose_paged(run, self.compressor.entries, queries, weights, self.count)


class CompressedAttention:
    """`compressor` and `indexer` are None in layers that have no such thing.

    What tokens are multiplied by is two weights: `project`, whose products are of the model's
    dtype, and `compress` for all compressors.
    """

    def __init__(self, blueprint: Blueprint, layer: int, pool: str | None, rotation: Rope) -> None:
        config = blueprint.config
        self.arithmetic = blueprint.arithmetic
        self.rotation = rotation
        self.window = _window(blueprint, layer)
        self.dim, groups = config.count("head_dim"), config.count("o_groups")
        each = config.count("num_attention_heads") // groups
        self.low_norm = blueprint.norm("q_norm")
        self._compress(blueprint, layer, pool)
        self.queries = blueprint.columns("wq_b", unit=each * self.dim)
        self.key_norm = blueprint.norm("norm")
        sinks = blueprint.share(blueprint.tensor("attn_sink", torch.float32), each)
        assert self.window.window is not None
        self.how = Attending(self.dim**-0.5, self.window.window, sinks)
        rank = config.count("o_lora_rank")
        self.out_groups = blueprint.share(blueprint.tensor("wo_a.weight"), rank).unflatten(
            0, (-1, rank)
        )
        self.out = blueprint.rows("wo_b", unit=rank)
        self.eps = config.number("rms_norm_eps")
        self.one = torch.ones((), device=sinks.device)

    def _compress(self, blueprint: Blueprint, layer: int, pool: str | None) -> None:
        """Compressor and indexer, and all that tokens are multiplied by."""
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
            self.compress = WideLinear(self.arithmetic, torch.cat(weights), blueprint.dtype)
        self.project = blueprint.linear(*names)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        turns = run.shared(
            self.rotation, lambda: self.arithmetic.rowwise(self.rotation, run.positions)
        )
        if self.arithmetic.runs_programs(x.device):
            return self._by_program(x, turns, run)
        weights = self.project.weight.split(self.sides)
        low, keys, *rest = (self.arithmetic.linear(x, weight) for weight in weights)
        low, products = self.low_norm(low), self._products(x)
        queries = rotate_neighbours(self._heads(low), turns)
        keys = rotate_neighbours(self.key_norm(keys), turns)
        kept = run.keep(self.window, {"kv": keys})["kv"]
        entries, chosen = [kept[:0]] * len(run.sequences), None
        if self.compressor is not None:
            entries = self.compressor(products[0], run)
        if self.indexer is not None:
            chosen = self.indexer(low, rest[0], products[1], turns, run)
        mixed = []
        for number, rows in enumerate(run.sequences):
            new = slice(rows.start, rows.end)
            past = run.entries(self.window, rows, self.how.first_seen(rows.past))["kv"]
            context = torch.cat([past, kept[new], entries[number]])[:, None]
            blocks = self._blocks(run.positions[new], len(entries[number]))
            blocks = blocks if chosen is None else chosen[number]
            seen = torch.cat([self._seen(rows, len(past), x.device), blocks], dim=1)
            block = self.arithmetic.query_block
            mixed.append(attend_seen(queries[new], context, context, seen, self.how, block))
        return self._out(rotate_neighbours(torch.cat(mixed), _back(turns)))

    def _by_program(self, x: Tensor, turns: Tensor, run: ForwardPass) -> Tensor:
        """The same over pages: nothing is gathered, and nothing depends on what a page holds."""
        from kvtide.layers.kernels.mla import attend_blocks
        from kvtide.layers.kernels.rope import keep_turned, turn

        low, keys, *rest = self.project(x).split(self.sides, dim=1)
        low, norm = self.low_norm(low), (self.key_norm.weight, self.key_norm.eps)
        kept, products = keep_turned(run, self.window, keys, norm, turns), self._products(x)
        entries, chosen = None, None
        if self.compressor is not None:
            self.compressor.write(products[0], run)
            entries = self.compressor.entries
        if self.indexer is not None:
            chosen = self.indexer.by_program(low, rest[0], products[1], turns, run)
        queries = turn(self.queries(low).unflatten(1, (-1, self.dim)), turns, self.eps)
        mixed = attend_blocks(run, self.window, kept, entries, queries, self.how, chosen)
        return self._out(turn(mixed, turns, back=True))

    def _products(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each compressor takes."""
        return () if self.compress is None else self.compress(x).split(self.compressed, dim=1)

    def _heads(self, low: Tensor) -> Tensor:
        heads = self.queries(low).unflatten(1, (-1, self.dim))
        return self.arithmetic.rowwise(lambda rows: rms_norm(rows, self.one, self.eps), heads)

    def _seen(self, rows: Rows, past: int, device: torch.device) -> Tensor:
        """(tokens, past + tokens): which tokens of the window each query sees."""
        key = torch.arange(rows.past - past, rows.total, device=device)
        query = torch.arange(rows.past, rows.total, device=device)[:, None]
        return (key <= query) & (key > query - (self.how.window or 0))

    def _blocks(self, positions: Tensor, count: int) -> Tensor:
        """(tokens, entries): which blocks are closed where a query stands."""
        ratio = self.compressor.ratio if self.compressor else 1
        return torch.arange(count, device=positions.device) < ((positions + 1) // ratio)[:, None]

    def _out(self, mixed: Tensor) -> Tensor:
        """Every group of heads by itself into few dimensions, then all of them together."""
        groups = mixed.flatten(1).unflatten(1, (len(self.out_groups), -1))
        if self.arithmetic.runs_programs(mixed.device):
            low = mixed.new_empty((len(mixed), *self.out_groups.shape[:2]))
            torch.bmm(groups.transpose(0, 1), self.out_groups.mT, out=low.transpose(0, 1))
        else:
            linear, pairs = self.arithmetic.linear, enumerate(self.out_groups)
            low = torch.stack([linear(groups[:, i], weight) for i, weight in pairs], dim=1)
        return self.out(low.flatten(1))


def _experts(blueprint: Blueprint) -> Mixture:
    """Chosen by score, or by what the table of a hash layer says of the token."""
    config, gate = blueprint.config, blueprint.under("gate")
    if (scoring := config.find("scoring_func")) not in (None, "sqrtsoftplus"):
        raise config.refusal(f"`scoring_func` is {scoring!r}; only sqrtsoftplus is known here")
    choice = Choice(
        config.count("num_experts_per_tok"), scale=config.number("routed_scaling_factor")
    )
    bias, table = (name if gate.has(name) else None for name in ("bias", "tid2eid"))
    router = Router(gate, choice, sqrt_softplus, bias, table)
    names, limit = ("w1", "w3", "w2"), config.number("swiglu_limit")
    shared = blueprint.under("shared_experts").mlp(*names, limit=limit)
    return Mixture.numbered(router, blueprint.under("experts"), shared, *names, limit=limit)


class DeepSeekV4Layer:
    def __init__(self, blueprint: Blueprint, layer: int, pool: str | None, rotation: Rope) -> None:
        self.attention = CompressedAttention(blueprint.under("attn"), layer, pool, rotation)
        self.experts = _experts(blueprint.under("ffn"))
        self.before_attention = blueprint.norm("attn_norm")
        self.before_experts = blueprint.norm("ffn_norm")
        self.around_attention = Around(blueprint, "hc_attn_")
        self.around_experts = Around(blueprint, "hc_ffn_")

    def __call__(self, streams: Tensor, run: ForwardPass) -> Tensor:
        x, weights = self.around_attention.normed(streams, self.before_attention)
        given = self.attention(x, run)
        streams, x, weights = self.around_attention.passed(
            given, streams, weights, self.around_experts, self.before_experts
        )
        given = self.experts(x, run.step.tokens)
        return self.around_experts.spread(given, streams, weights)


class NextToken:
    """Multi-token prediction: one more layer, which sees the token that came next as well.

    It is fed with the streams that the model's last layer gave, or an earlier call of this. Its
    window is a draft's pool: a prefix without it is right, only guessed worse.
    """

    def __init__(self, blueprint: Blueprint, layer: int, embedding: Tensor) -> None:
        near, _ = _rotations(blueprint.config)
        self.number = layer
        self.embedding = embedding
        self.layer = DeepSeekV4Layer(blueprint, layer, None, near)
        self.of_token = blueprint.linear("e_proj")
        self.of_streams = blueprint.linear("h_proj")
        self.token_norm = blueprint.norm("enorm")
        self.stream_norm = blueprint.norm("hnorm")
        self.joined = Joined(blueprint, "hc_head.hc_")
        self.norm = blueprint.norm("norm")

    @torch.no_grad()
    def __call__(self, step: Step, streams: Tensor, following: Tensor) -> Tensor:
        """Streams from which the token after each of the `following` ones can be guessed."""
        token = self.of_token(self.token_norm(functional.embedding(following, self.embedding)))
        carried = self.of_streams(self.stream_norm(streams).flatten(0, 1)).view_as(streams)
        step.wait(self.number)
        return self.layer(token[:, None] + carried, ForwardPass(step))

    @torch.no_grad()
    def closed(self, streams: Tensor) -> Tensor:
        """What the model's `logits` takes."""
        return self.norm(self.joined(streams))


class DeepSeekV4(Decoder):
    """Between layers, and between stages, there are all streams of every token."""

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
        self.joined = Joined(base, "hc_head.hc_")
        layers = range(self.memory.layers, self.memory.end_layer)
        root = replace(base, prefix="")
        self.next_tokens = [
            NextToken(root.under(f"mtp.{number}"), layer, self.embedding)
            for number, layer in enumerate(layers)
        ]

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens)[:, None].repeat(1, self.streams, 1)

    def carried(self, tokens: Tensor) -> Tensor:
        return super().carried(tokens)[:, None].repeat(1, self.streams, 1)

    def closed(self, x: Tensor) -> Tensor:
        return super().closed(self.joined(x))


def _window(blueprint: Blueprint, layer: int) -> Place:
    """Where a layer keeps its last tokens: with all the others, or as a draft."""
    pools = (p for p in blueprint.memory.pools if layer in p.layers and p.tail_entries is None)
    return Place(next(pool for pool in pools if pool.tokens_per_entry == 1), layer)


def _back(turns: Tensor) -> Tensor:
    """The same turns the other way."""
    return torch.stack([turns[:, 0], -turns[:, 1]], dim=1)


def _rotations(config: Config) -> tuple[Rope, Rope]:
    """Of layers with a window only, and of those with compressed history, which see further.

    As `transformers` saves them, or as the lab writes them; neither makes what is turned larger.
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
