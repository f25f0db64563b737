"""The operations that layers are made of, and which implementation of them runs.

A model has one `Ops`, which `choice.choose` makes: `TorchOps` computes each operation by its torch
reference, `TritonOps` by its kernel. A layer calls `self.ops.paged_attention(...)` and does not
know which it has. `arithmetic` says in which order the references and all plain matmuls add up.

Operations over a `ForwardPass` read and write the state of all sequences of the step, through the
pages of a `Place`. Operations that are made of others have their body here; an implementation may
do them in one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import (
    AttentionParams,
    AttentionParts,
    CompressedStream,
    ConvWeights,
    DeltaGates,
    ExpertStack,
    FixedExperts,
    GatedNorm,
    Norm,
    Projection,
    QKVParams,
    Routing,
    RoutingRule,
    ScanParams,
    StreamMixing,
)
from kvtide.layers.elementwise import Activation
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.packing import Fields

Selection = list[Tensor]
"""What an indexer selects, for the attention of the same `Ops`.

The reference has a mask for every sequence, (queries, entries). Kernels have one tensor of entry
numbers for all queries of the step, (queries, count), -1 where there are fewer.
"""


class Ops(ABC):
    """uses_kernels  whether Triton kernels run, so that a forward pass can be a CUDA graph, and
    layers prepare their weights for them"""

    arithmetic: Arithmetic
    uses_kernels: bool

    # -- single rows -----------------------------------------------------------------------------

    @abstractmethod
    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    @abstractmethod
    def add_rms_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def gated(
        self, gate: Tensor, up: Tensor, activation: Activation, limit: float | None = None
    ) -> Tensor:
        """activation(gate) · up, both of them (tokens, width), or a gate (tokens, 1) for a row.

        Neither factor exceeds the limit.
        """

    def gated_mlp(
        self,
        x: Tensor,
        gate_up: Projection,
        down: Projection,
        activation: Activation,
        limit: float | None = None,
    ) -> Tensor:
        """`gated` between two projections, of which the first gives both factors side by side."""
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(self.gated(gate, up, activation, limit))

    @abstractmethod
    def linear_parts(self, x: Tensor, weight: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        """Rows of x times the rows of weight, cut into so many columns each."""

    @abstractmethod
    def grouped_linear(self, x: Tensor, weights: Tensor) -> Tensor:
        """Every group of x (tokens, groups, in) times its own weights (groups, out, in)."""

    @abstractmethod
    def rope(self, x: Tensor, cos_sin: Tensor, eps: float | None = None) -> Tensor:
        """Rotates neighbouring pairs of the last dimensions of x (tokens, heads, dim).

        x may be written over. `eps` is that of an RMS norm over each head that comes before; None:
        there is none.
        """

    @abstractmethod
    def rope_back(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Undoes `rope`; x may be written over."""

    # -- attention -------------------------------------------------------------------------------

    @abstractmethod
    def kv_write(self, run: ForwardPass, place: Place, entries: Mapping[str, Tensor]) -> Fields:
        """Writes the step's entries to their pages, and returns them as they were written."""

    @abstractmethod
    def qkv_write(
        self,
        run: ForwardPass,
        place: Place,
        by_head: Tensor,
        cos_sin: Tensor | None,
        how: QKVParams,
    ) -> tuple[Tensor, Fields]:
        """Queries, and keys and values as they were written, from a projection's output.

        by_head  (tokens, heads + 2 · KV heads, dim)
        cos_sin    what a `Rope` gives for the step's positions, None without a rotation
        """

    @abstractmethod
    def norm_rope_write(
        self, run: ForwardPass, place: Place, x: Tensor, norm: Norm, cos_sin: Tensor
    ) -> Tensor:
        """Norms, rotates and writes the vectors x (tokens, dim), and returns what was written."""

    @abstractmethod
    def paged_attention(
        self, run: ForwardPass, place: Place, queries: Tensor, kept: Fields, how: AttentionParams
    ) -> Tensor:
        """Attention of queries (tokens, heads, dim) over pages, and over what the step wrote."""

    def self_attention(
        self,
        run: ForwardPass,
        place: Place,
        x: Tensor,
        parts: AttentionParts,
        cos_sin: Tensor | None,
    ) -> Tensor:
        """`qkv_write` and `paged_attention` between two projections."""
        by_head = parts.qkv(x).unflatten(1, (-1, place.field("k").shape[1]))
        queries, kept = self.qkv_write(run, place, by_head, cos_sin, parts.preparing)
        return parts.out(self.paged_attention(run, place, queries, kept, parts.how).flatten(1))

    @abstractmethod
    def mla_attention(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        kept: Fields,
        how: AttentionParams,
        selected: Selection | None,
    ) -> Tensor:
        """Attention of all heads over one latent a token: (tokens, heads, latent)."""

    @abstractmethod
    def select_tokens(
        self,
        run: ForwardPass,
        place: Place,
        queries: Tensor,
        weights: Tensor,
        kept: Tensor,
        count: int,
    ) -> Selection:
        """The `count` tokens that an indexer scores highest for each query.

        queries (tokens, heads, dim), weights (tokens, heads), kept: the step's index keys
        """

    @abstractmethod
    def compress(
        self, run: ForwardPass, stream: CompressedStream, values_gates: Tensor
    ) -> list[Tensor]:
        """Writes the entries of the blocks that the step closes, and the means of open blocks.

        values_gates  of every token, side by side, in fp32
        Returns the closed entries of every sequence; none where kernels read them from their pages.
        """

    @abstractmethod
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
        """As `select_tokens`, of the entries of a compressed stream; `scale` multiplies weights.

        entries  what `compress` returned
        """

    @abstractmethod
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
        """Attention over a window of tokens and over entries of a stream, one vector for all heads.

        Without a selection, a query sees all blocks that are closed at its position.
        """

    @abstractmethod
    def swap_in(self, run: ForwardPass, place: Place, selected: Selection) -> Selection:
        """Brings selected entries of a hot pool to the device, and new ones to the host.

        It comes after the step's entries are written, and before attention, which takes the
        selection that it returns: for kernels, places in the arena in place of entry numbers.
        """

    # -- recurrent layers ------------------------------------------------------------------------

    @abstractmethod
    def causal_conv(
        self,
        run: ForwardPass,
        place: Place,
        conv: ConvWeights,
        inputs: Tensor,
        activation: Activation | None = None,
    ) -> Tensor:
        """The convolution of inputs (tokens, channels), from and to the recurrent states.

        In fp32 by the reference, in the inputs' dtype by the kernel.
        """

    @abstractmethod
    def ssd_scan(
        self, run: ForwardPass, place: Place, how: ScanParams, convolved: Tensor, dt: Tensor
    ) -> Tensor:
        """Mamba2's recurrence over x, B and C side by side: (tokens, heads · dim) in fp32."""

    @abstractmethod
    def gated_delta(
        self, run: ForwardPass, place: Place, convolved: Tensor, gates: DeltaGates
    ) -> Tensor:
        """The gated delta rule over queries, keys and values side by side.

        (tokens, heads, values) in fp32.
        """

    @abstractmethod
    def gated_norm(self, x: Tensor, gate: Tensor, how: GatedNorm) -> Tensor:
        """A norm by group and a gate, of (tokens, channels) each: in the dtype of the gate."""

    # -- mixtures of experts ---------------------------------------------------------------------

    @abstractmethod
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
        """Each token's experts: those with the best scores, or the `fixed` ones.

        Every token also goes to the `beside` experts after the last one that has a score.
        """

    @abstractmethod
    def route_by_top_softmax(self, logits: Tensor, count: int) -> Routing:
        """The largest `count` logits, and a softmax over those alone."""

    @abstractmethod
    def experts(self, stack: ExpertStack, x: Tensor, routing: Routing) -> Tensor:
        """Σ weight · expert(x) over the experts of all ranks."""

    # -- hyper-connections -----------------------------------------------------------------------

    @abstractmethod
    def packed_mixing(self, mixing: StreamMixing, dtype: torch.dtype) -> StreamMixing:
        """The same for streams in this dtype, as the operations below take it."""

    @abstractmethod
    def gather_streams(
        self, mixing: StreamMixing, streams: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """A sublayer's input after its norm, and the weights with which its output goes back."""

    @abstractmethod
    def spread_streams(self, given: Tensor, streams: Tensor, weights: Tensor) -> Tensor:
        """The streams after a sublayer."""

    @abstractmethod
    def join_streams(self, mixing: StreamMixing, streams: Tensor) -> Tensor:
        """One stream of all of them."""
