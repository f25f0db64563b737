"""What operations take: the values that a layer hands to a torch reference or to a Triton kernel.

Everything here is data. `ops.Ops` names the operations; the reference of each stands in
`layers/reference/` and its kernel in `layers/kernels/` under the same file name, and both take
these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvtide.layers.backend.packed_weight import Weight
from kvtide.layers.elementwise import Activation, sigmoid, swish
from kvtide.layers.forward import ForwardPass, Place
from kvtide.layers.rope import Rope
from kvtide.layers.tensor_ranks import TensorRanks
from kvtide.spec import Field
from kvtide.spec.config import Config


class Norm(NamedTuple):
    """An RMS norm over the last axis."""

    weight: Tensor
    eps: float


class Projection(Protocol):
    """A linear layer. `ranks` are those that hold a shard of its inputs."""

    @property
    def held(self) -> Weight: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def ranks(self) -> TensorRanks: ...

    def __call__(self, x: Tensor) -> Tensor: ...


# -- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """`window` counts the query itself; `sinks` are logits by head (fp32); `cap` limits scores by a
    tanh."""

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    cap: float | None = None

    def first_seen(self, position: int) -> int:
        """The first token that a query at this position sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class QKVParams:
    """What happens to heads between their projection and attention: norms of each head, and a gain
    of keys before their rotation."""

    kv_heads: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    key_gain: float = 1.0


@dataclass(frozen=True, slots=True)
class CompressedStream:
    """A compressor without its projection.

    entries   one for every block of tokens
    own       the mean of the block that the next token belongs to
    overlap   the sums of that block for the next one's mean, where blocks overlap
    position  (tokens of a block, channels): added to gates
    dtype     what the model computes in: means are rounded to it, as are norm and rotation
    """

    entries: Place
    own: Place
    overlap: Place | None
    position: Tensor
    norm: Norm
    rope: Rope
    dtype: torch.dtype

    @property
    def ratio(self) -> int:
        """Tokens of a block."""
        return self.entries.pool.tokens_per_entry

    @property
    def width(self) -> int:
        """Channels of an entry."""
        return len(self.norm.weight)


# -- recurrent layers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A causal convolution: taps (taps, channels) and bias in fp32; `kept` are the fields of the
    last inputs, part by part."""

    taps: Tensor
    bias: Tensor | None
    kept: tuple[Field, ...]

    def rounded(self, run: ForwardPass, place: Place, inputs: Tensor) -> Tensor:
        """Inputs, rounded as a later step reads them."""
        return run.rounded(place, self.kept[0].name, inputs) if self.kept else inputs


@dataclass(frozen=True, slots=True)
class ScanParams:
    """Parameters of a Mamba2 mixer by head, in fp32, and the bounds of time steps."""

    dt_bias: Tensor
    decay: Tensor
    skip: Tensor
    dt_limits: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """Attention by head between the projections before and behind it."""

    qkv: Projection
    out: Projection
    preparing: QKVParams
    how: AttentionParams


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Time steps, (tokens, heads) or (tokens, heads · keys), before their bias and softplus;
    strengths, (tokens, heads), before their sigmoid; the decay by head."""

    dt: Tensor
    dt_bias: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """groups      of channels, each normed by itself
    weight      the norm's: (channels of a group), or (groups, channels); None without a norm
    norm_first  before the gate opens
    """

    groups: int
    weight: Tensor | None
    eps: float = 0.0
    norm_first: bool = True
    activation: Activation = swish

    @property
    def has_kernel(self) -> bool:
        return self.activation in (swish, sigmoid)


# -- mixtures of experts -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of every token and their weights: (tokens, k) each."""

    experts: Tensor
    weights: Tensor

    def beside(self, first: int, count: int) -> Routing:
        """With `count` more experts for every token, numbered from `first`, of weight one."""
        if count == 0:
            return self
        more = torch.arange(
            first, first + count, dtype=self.experts.dtype, device=self.experts.device
        ).expand(len(self.experts), -1)
        weights = torch.cat([self.weights, torch.ones_like(more, dtype=self.weights.dtype)], dim=1)
        return Routing(torch.cat([self.experts, more], dim=1), weights)


@dataclass(frozen=True, slots=True)
class FixedExperts:
    """Experts by token id, whatever their scores: `table` has a row (k) for every id."""

    table: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are selected by their scores, and what weight each gets.

    count            experts of a token
    groups, allowed  only experts of the best `allowed` of so many groups are selected
    group_depth      a group's score is the sum of its so many best experts
    renormalised     weights add up to one, before `scale`
    """

    count: int
    groups: int = 1
    allowed: int = 1
    group_depth: int = 2
    renormalised: bool = True
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The experts that this rank has, of those that all ranks have together."""

    own: range
    ranks: TensorRanks

    @classmethod
    def of(cls, config: Config, ranks: TensorRanks, count: int) -> ExpertGroup:
        each, rest = divmod(count, ranks.count)
        if rest:
            raise config.refusal(
                f"{count} experts do not divide over {ranks.count} tensor ranks; use fewer ranks, "
                "or as many as divide them"
            )
        return cls(range(ranks.rank * each, (ranks.rank + 1) * each), ranks)

    def shard(self, stacked: Tensor) -> Tensor:
        """This rank's experts of a weight with an axis for experts, as a copy."""
        own = stacked[self.own.start : self.own.stop]
        return stacked if len(own) == len(stacked) else own.clone()


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """What an expert computes between its two projections.

    activation  of the gate, or of the whole output where there is no gate
    gated       the first half is a gate for the second
    limit       clamps both halves
    gain        σ(gain · x) in a swish
    offset      added to the second half
    """

    activation: Activation = swish
    gated: bool = True
    limit: float | None = None
    gain: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One projection of every expert: (experts, outputs, inputs), and a bias (experts, outputs)."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """This rank's experts, each two projections with a gating between them.

    A gated expert's first projection gives gate and up, side by side. The last `beside` experts
    are a shared MLP, which every token goes to.
    """

    group: ExpertGroup
    gate_up: ExpertWeights
    down: ExpertWeights
    gating: ExpertActivation
    beside: int = 0


# -- hyper-connections ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamMixing:
    """How a token's mixing weights come from its streams.

    project  (outputs, all streams) in fp32; kernels take what `Ops.packed_mixing` makes of it
    scales, base  for every output, fp32
    eps      of weights; norm_eps of the norm before the projection
    rounds   of Sinkhorn normalisation of the mixing matrix; 0 where there is no matrix
    """

    project: Tensor
    scales: Tensor
    base: Tensor
    eps: float
    norm_eps: float
    rounds: int = 0
