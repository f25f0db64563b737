"""The operations of layers by Triton kernels. Only `backend.choose` imports this module.

What has no kernel (an activation, a number of experts) falls back to the torch reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtide.layers.arithmetic import Batched
from kvtide.layers.elementwise import Activation, swish
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.kernel_args import (
    Attending,
    Choice,
    CompressedStream,
    ConvWeights,
    ExpertStack,
    Forgetting,
    GatedNorm,
    Mixing,
    Norm,
    Preparing,
    Routing,
    Scanning,
    Told,
)
from kvtide.layers.kernels import hyper_connections, moe_routing, rows
from kvtide.layers.kernels.attention_prefill import attend_paged
from kvtide.layers.kernels.causal_conv import convolve
from kvtide.layers.kernels.compressor import compress
from kvtide.layers.kernels.gated_delta import associate
from kvtide.layers.kernels.gated_norm import open_gates
from kvtide.layers.kernels.indexer import choose_paged
from kvtide.layers.kernels.kv_write import keep
from kvtide.layers.kernels.mla import attend_blocks, attend_latent
from kvtide.layers.kernels.moe_experts import mix
from kvtide.layers.kernels.qkv import keep_heads
from kvtide.layers.kernels.rope import keep_turned, turn
from kvtide.layers.kernels.ssd_scan import scan
from kvtide.layers.ops import Selection
from kvtide.layers.packing import Fields
from kvtide.layers.torch_ops import TorchOps


class WrittenByKernel(TorchOps):
    """The torch references, but entries are written by a kernel: the bytes are the same."""

    def kv_write(self, run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
        if place.pool.tokens_per_entry > 1:
            return super().kv_write(run, place, entries)
        return keep(run, place, entries)


class TritonOps(WrittenByKernel):
    """Each operation by its kernel; what it computes, `Ops` says."""

    uses_kernels = True

    def __init__(self) -> None:
        super().__init__(Batched())

    # -- single rows -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rows.normed(x, *norm)

    def add_rms_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return rows.added(x, y, *norm)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return rows.layer_normed(x, weight, bias, eps)

    def gated(
        self, gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None
    ) -> Tensor:
        return rows.gated(gate, up, activation, limit)

    def linear_parts(self, x: Tensor, weight: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = self.arithmetic.linear(x, weight).split(list(widths), dim=1)
        return parts

    def grouped_linear(self, x: Tensor, weights: Tensor) -> Tensor:
        result = x.new_empty((len(x), *weights.shape[:2]))
        torch.bmm(x.transpose(0, 1), weights.mT, out=result.transpose(0, 1))
        return result

    def rope(
        self, x: Tensor, turns: Tensor, eps: float | None = None, *, back: bool = False
    ) -> Tensor:
        return turn(x, turns, eps, back=back)

    # -- attention -------------------------------------------------------------------------------

    def qkv_write(
        self,
        run: ForwardPass,
        place: Place,
        by_head: Tensor,
        turns: Tensor | None,
        how: Preparing,
    ) -> tuple[Tensor, Fields]:
        return keep_heads(run, place, by_head, turns, how)

    def norm_rope_write(
        self, run: ForwardPass, place: Place, x: Tensor, norm: Norm, turns: Tensor
    ) -> Tensor:
        return keep_turned(run, place, x, norm, turns)

    def paged_attention(
        self, run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: Attending
    ) -> Tensor:
        return attend_paged(run, place, queries, kept, how)

    def mla_attention(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        kept: Fields,
        how: Attending,
        selected: Selection | None,
    ) -> Tensor:
        return attend_latent(run, place, queries, how, _numbers(selected))

    def select_tokens(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        weights: Tensor,
        kept: Tensor,
        count: int,
    ) -> Selection:
        return [choose_paged(run, place, queries, weights, count)]

    def compress(
        self, run: ForwardPass, stream: CompressedStream, products: Tensor
    ) -> list[Tensor]:
        ratio = stream.ratio
        turns = run.shared(
            (stream.rope, ratio), lambda: stream.rope(run.positions // ratio * ratio)
        )
        compress(run, stream, products, turns)
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
        return [choose_paged(run, stream.entries, queries, weights, count)]

    def block_attention(
        self,
        run: ForwardPass,
        window: Place,
        kept: Tensor,
        stream: CompressedStream | None,
        entries: Sequence[Tensor],
        queries: Tensor,
        how: Attending,
        selected: Selection | None,
    ) -> Tensor:
        blocks = None if stream is None else stream.entries
        return attend_blocks(run, window, kept, blocks, queries, how, _numbers(selected))

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
        convolved = convolve(run, place, conv, inputs, swished=swished)
        return convolved if swished or activation is None else activation(convolved)

    def ssd_scan(
        self, run: ForwardPass, place: Place, how: Scanning, convolved: Tensor, dt: Tensor
    ) -> Tensor:
        return scan(run, place, how, convolved, dt)

    def gated_delta(
        self, run: ForwardPass, place: Place, convolved: Tensor, forgetting: Forgetting
    ) -> Tensor:
        return associate(run, place, convolved, forgetting)

    def gated_norm(self, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
        return open_gates(x, gate, how) if how.has_kernel else super().gated_norm(x, gate, how)

    # -- mixtures of experts ---------------------------------------------------------------------

    def route(
        self,
        logits: Tensor,
        choice: Choice,
        score: Activation,
        bias: Tensor | None = None,
        *,
        told: Told | None = None,
        beside: int = 0,
    ) -> Routing:
        if moe_routing.takes(logits.shape[1], choice, score):
            return moe_routing.route(logits, choice, score, bias, told=told, beside=beside)
        return super().route(logits, choice, score, bias, told=told, beside=beside)

    def route_by_top_softmax(self, logits: Tensor, count: int) -> Routing:
        if moe_routing.takes(logits.shape[1], Choice(count), None):
            return moe_routing.route(logits, Choice(count), None, softmax_of_best=True)
        return super().route_by_top_softmax(logits, count)

    def experts(self, stack: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
        return stack.crew.ranks.total(mix(stack, x, routing)).to(x.dtype)

    # -- hyper-connections -----------------------------------------------------------------------

    def packed_mixing(self, mixing: Mixing, dtype: torch.dtype) -> Mixing:
        return hyper_connections.packed(mixing, dtype)

    def gather_streams(self, mixing: Mixing, streams: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return hyper_connections.gathered(mixing, streams, norm)

    def spread_streams(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        return hyper_connections.spread(given, streams, weights)

    def pass_streams(
        self, given: Tensor, streams: Tensor, weights: Tensor, following: Mixing, norm: Norm
    ) -> tuple[Tensor, Tensor, Tensor]:
        return hyper_connections.passed(given, streams, weights, following, norm)

    def join_streams(self, mixing: Mixing, streams: Tensor) -> Tensor:
        return hyper_connections.joined(mixing, streams)


def _numbers(selected: Selection | None) -> Tensor | None:
    return None if selected is None else selected[0]
