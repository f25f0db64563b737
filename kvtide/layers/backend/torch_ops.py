"""The operations of layers by their torch references, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtide.layers import elementwise
from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import (
    AttentionParams,
    CompressedStream,
    ConvWeights,
    DeltaGates,
    ExpertStack,
    FixedExperts,
    GatedNorm,
    Norm,
    QKVParams,
    Routing,
    RoutingRule,
    ScanParams,
    StreamMixing,
)
from kvtide.layers.backend.ops import Ops, Selection
from kvtide.layers.elementwise import Activation
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields
from kvtide.layers.reference import hyper_connections
from kvtide.layers.reference.attention import paged_attention
from kvtide.layers.reference.causal_conv import causal_conv
from kvtide.layers.reference.compressor import compress
from kvtide.layers.reference.gated_delta import gated_delta
from kvtide.layers.reference.gated_norm import gated_norm
from kvtide.layers.reference.indexer import select_blocks, select_tokens
from kvtide.layers.reference.kv_write import kv_write
from kvtide.layers.reference.mla import block_attention, mla_attention
from kvtide.layers.reference.moe_experts import mix_experts
from kvtide.layers.reference.moe_routing import route, route_by_top_softmax
from kvtide.layers.reference.qkv import split_heads
from kvtide.layers.reference.ssd_scan import ssd_scan
from kvtide.layers.reference.swap_in import swap_in
from kvtide.layers.rope import inverse_rotation, rotate_interleaved


class TorchOps(Ops):
    """Each operation by the function of its name; what it computes, `Ops` says."""

    uses_kernels = False

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic

    # -- single rows -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.arithmetic.rowwise(lambda rows: elementwise.rms_norm(rows, *norm), x)

    def add_rms_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, self.rms_norm(total, norm)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self.arithmetic.rowwise(
            lambda rows: elementwise.layer_norm(rows, weight, bias, eps), x
        )

    def gated(
        self, gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None
    ) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.arithmetic.rowwise(activation, gate).to(up.dtype) * up

    def linear_parts(self, x: Tensor, weight: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        return [self.arithmetic.linear(x, part) for part in weight.split(list(widths))]

    def grouped_linear(self, x: Tensor, weights: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        return torch.stack([linear(x[:, i], weight) for i, weight in enumerate(weights)], dim=1)

    def rope(self, x: Tensor, cos_sin: Tensor, eps: float | None = None) -> Tensor:
        if eps is not None:
            x = self.rms_norm(x, Norm(torch.ones((), device=x.device), eps))
        return rotate_interleaved(x, cos_sin)

    def rope_back(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        return rotate_interleaved(x, inverse_rotation(cos_sin))

    # -- attention -------------------------------------------------------------------------------

    def kv_write(self, run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
        return kv_write(run, place, entries)

    def qkv_write(
        self,
        run: ForwardPass,
        place: Place,
        by_head: Tensor,
        cos_sin: Tensor | None,
        how: QKVParams,
    ) -> tuple[Tensor, Fields]:
        queries, keys, values = split_heads(self.arithmetic, by_head, cos_sin, how)
        return queries, self.kv_write(run, place, {"k": keys, "v": values})

    def norm_rope_write(
        self, run: ForwardPass, place: Place, x: Tensor, norm: Norm, cos_sin: Tensor
    ) -> Tensor:
        return self.kv_write(run, place, {"kv": self.rope(self.rms_norm(x, norm), cos_sin)})["kv"]

    def paged_attention(
        self, run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams
    ) -> Tensor:
        return paged_attention(run, place, queries, kept, how, self.arithmetic.query_block)

    def mla_attention(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        kept: Fields,
        how: AttentionParams,
        selected: Selection | None,
    ) -> Tensor:
        block = self.arithmetic.query_block
        return mla_attention(run, place, queries, kept, how, selected, block)

    def select_tokens(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        weights: Tensor,
        kept: Tensor,
        count: int,
    ) -> Selection:
        block = self.arithmetic.query_block
        return select_tokens(run, place, queries, weights, kept, count, block)

    def compress(
        self, run: ForwardPass, stream: CompressedStream, values_gates: Tensor
    ) -> list[Tensor]:
        return compress(self.arithmetic, run, stream, values_gates)

    def select_blocks(
        self,
        run: ForwardPass,
        stream: CompressedStream,
        entries: Sequence[Tensor],
        queries: Tensor,
        weights: Tensor,
        scale: float,
        count: int,
    ) -> Selection:
        block = self.arithmetic.query_block
        return select_blocks(run, stream, entries, queries, weights * scale, count, block)

    def block_attention(
        self,
        run: ForwardPass,
        window: Place,
        kept: Tensor,
        stream: CompressedStream | None,
        entries: Sequence[Tensor],
        queries: Tensor,
        how: AttentionParams,
        selected: Selection | None,
    ) -> Tensor:
        block = self.arithmetic.query_block
        return block_attention(run, window, kept, stream, entries, queries, how, selected, block)

    def swap_in(self, run: ForwardPass, place: Place, selected: Selection) -> Selection:
        swap_in(run, place, selected)
        return selected

    # -- recurrent layers ------------------------------------------------------------------------

    def causal_conv(
        self,
        run: ForwardPass,
        place: Place,
        conv: ConvWeights,
        inputs: Tensor,
        activation: Activation | None = None,
    ) -> Tensor:
        return causal_conv(self.arithmetic, run, place, conv, inputs, activation)

    def ssd_scan(
        self, run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
    ) -> Tensor:
        return ssd_scan(self.arithmetic, run, place, how, convolved, dt)

    def gated_delta(
        self, run: ForwardPass, place: Place, convolved: Tensor, gates: DeltaGates
    ) -> Tensor:
        return gated_delta(self.arithmetic, run, place, convolved, gates)

    def gated_norm(self, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
        return gated_norm(self.arithmetic, x, gate, how)

    # -- mixtures of experts ---------------------------------------------------------------------

    def route(
        self,
        logits: Tensor,
        rule: RoutingRule,
        score: Activation,
        bias: Tensor | None = None,
        *,
        fixed: FixedExperts | None = None,
        beside: int = 0,
    ) -> Routing:
        return route(self.arithmetic, logits, rule, score, bias, fixed=fixed, beside=beside)

    def route_by_top_softmax(self, logits: Tensor, count: int) -> Routing:
        return route_by_top_softmax(self.arithmetic, logits, count)

    def experts(self, stack: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
        return mix_experts(self.arithmetic, stack, x, routing)

    # -- hyper-connections -----------------------------------------------------------------------

    def packed_mixing(self, mixing: StreamMixing, dtype: torch.dtype) -> StreamMixing:
        return mixing

    def gather_streams(
        self, mixing: StreamMixing, streams: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        x, weights = hyper_connections.gather(self.arithmetic, mixing, streams)
        return self.rms_norm(x, norm), weights

    def spread_streams(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        return hyper_connections.spread(given, streams, weights)

    def join_streams(self, mixing: StreamMixing, streams: Tensor) -> Tensor:
        return hyper_connections.join(self.arithmetic, mixing, streams)
