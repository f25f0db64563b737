"""The operations of layers by Triton kernels. Only `choice.choose` imports this module.

What has no kernel (an activation, a number of experts) falls back to the torch reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Batched
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
from kvtide.layers.backend.ops import Selection
from kvtide.layers.backend.torch_ops import TorchOps
from kvtide.layers.elementwise import Activation, swish
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernels import hyper_connections, moe_routing, norms
from kvtide.layers.kernels.attention.attention_prefill import paged_attention
from kvtide.layers.kernels.attention.indexer import select_entries
from kvtide.layers.kernels.attention.mla import block_attention, mla_attention
from kvtide.layers.kernels.compressor import compress
from kvtide.layers.kernels.kv_write import kv_write
from kvtide.layers.kernels.moe_experts import mix_experts
from kvtide.layers.kernels.qkv import qkv_write
from kvtide.layers.kernels.recurrent.causal_conv import causal_conv
from kvtide.layers.kernels.recurrent.gated_delta import gated_delta
from kvtide.layers.kernels.recurrent.gated_norm import gated_norm
from kvtide.layers.kernels.recurrent.ssd_scan import ssd_scan
from kvtide.layers.kernels.rope import norm_rope_write, rope, rope_back
from kvtide.layers.kernels.swap_in import swap_in
from kvtide.layers.packing import Fields


class TorchOpsWithKernelWrites(TorchOps):
    """The torch references, but entries are written by a kernel: the bytes are the same."""

    def kv_write(self, run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
        if place.pool.tokens_per_entry > 1:
            return super().kv_write(run, place, entries)
        return kv_write(run, place, entries)


class TritonOps(TorchOpsWithKernelWrites):
    """Each operation by its kernel; what it computes, `Ops` says."""

    uses_kernels = True

    def __init__(self) -> None:
        super().__init__(Batched())

    # -- single rows -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norms.rms_norm(x, *norm)

    def add_rms_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return norms.add_rms_norm(x, y, *norm)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return norms.layer_norm(x, weight, bias, eps)

    def gated(
        self, gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None
    ) -> Tensor:
        return norms.gated(gate, up, activation, limit)

    def linear_parts(self, x: Tensor, weight: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = self.arithmetic.linear(x, weight).split(list(widths), dim=1)
        return parts

    def grouped_linear(self, x: Tensor, weights: Tensor) -> Tensor:
        result = x.new_empty((len(x), *weights.shape[:2]))
        torch.bmm(x.transpose(0, 1), weights.mT, out=result.transpose(0, 1))
        return result

    def rope(self, x: Tensor, cos_sin: Tensor, eps: float | None = None) -> Tensor:
        return rope(x, cos_sin, eps)

    def rope_back(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        return rope_back(x, cos_sin)

    # -- attention -------------------------------------------------------------------------------

    def qkv_write(
        self,
        run: ForwardPass,
        place: Place,
        by_head: Tensor,
        cos_sin: Tensor | None,
        how: QKVParams,
    ) -> tuple[Tensor, Fields]:
        return qkv_write(run, place, by_head, cos_sin, how)

    def norm_rope_write(
        self, run: ForwardPass, place: Place, x: Tensor, norm: Norm, cos_sin: Tensor
    ) -> Tensor:
        return norm_rope_write(run, place, x, norm, cos_sin)

    def paged_attention(
        self, run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams
    ) -> Tensor:
        return paged_attention(run, place, queries, kept, how)

    def mla_attention(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        kept: Fields,
        how: AttentionParams,
        selected: Selection | None,
    ) -> Tensor:
        return mla_attention(run, place, queries, how, _numbers(selected))

    def select_tokens(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        weights: Tensor,
        kept: Tensor,
        count: int,
    ) -> Selection:
        return [select_entries(run, place, queries, weights, count)]

    def compress(
        self, run: ForwardPass, stream: CompressedStream, values_gates: Tensor
    ) -> list[Tensor]:
        ratio = stream.ratio
        cos_sin = run.shared(
            (stream.rope, ratio), lambda: stream.rope(run.positions // ratio * ratio)
        )
        compress(run, stream, values_gates, cos_sin)
        return []

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
        # A factor of all weights changes no selection.
        return [select_entries(run, stream.entries, queries, weights, count)]

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
        blocks = None if stream is None else stream.entries
        return block_attention(run, window, kept, blocks, queries, how, _numbers(selected))

    def swap_in(self, run: ForwardPass, place: Place, selected: Selection) -> Selection:
        return [swap_in(run, place, selected[0])]

    # -- recurrent layers ------------------------------------------------------------------------

    def causal_conv(
        self,
        run: ForwardPass,
        place: Place,
        conv: ConvWeights,
        inputs: Tensor,
        activation: Activation | None = None,
    ) -> Tensor:
        swished = activation is swish
        convolved = causal_conv(run, place, conv, inputs, swished=swished)
        return convolved if swished or activation is None else activation(convolved)

    def ssd_scan(
        self, run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
    ) -> Tensor:
        return ssd_scan(run, place, how, convolved, dt)

    def gated_delta(
        self, run: ForwardPass, place: Place, convolved: Tensor, gates: DeltaGates
    ) -> Tensor:
        return gated_delta(run, place, convolved, gates)

    def gated_norm(self, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
        return gated_norm(x, gate, how) if how.has_kernel else super().gated_norm(x, gate, how)

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
        if moe_routing.has_kernel(logits.shape[1], rule, score):
            return moe_routing.route(logits, rule, score, bias, fixed=fixed, beside=beside)
        return super().route(logits, rule, score, bias, fixed=fixed, beside=beside)

    def route_by_top_softmax(self, logits: Tensor, count: int) -> Routing:
        if moe_routing.has_kernel(logits.shape[1], RoutingRule(count), None):
            return moe_routing.route(logits, RoutingRule(count), None, softmax_of_best=True)
        return super().route_by_top_softmax(logits, count)

    def experts(self, stack: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
        return stack.group.ranks.all_reduce(mix_experts(stack, x, routing)).to(x.dtype)

    # -- hyper-connections -----------------------------------------------------------------------

    def packed_mixing(self, mixing: StreamMixing, dtype: torch.dtype) -> StreamMixing:
        return hyper_connections.packed_mixing(mixing, dtype)

    def gather_streams(
        self, mixing: StreamMixing, streams: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        return hyper_connections.gather_streams(mixing, streams, norm)

    def spread_streams(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        return hyper_connections.spread_streams(given, streams, weights)

    def join_streams(self, mixing: StreamMixing, streams: Tensor) -> Tensor:
        return hyper_connections.join_streams(mixing, streams)


def _numbers(selected: Selection | None) -> Tensor | None:
    return None if selected is None else selected[0]
