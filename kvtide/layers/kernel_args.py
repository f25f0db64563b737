"""What operations take: the values that a layer hands to a torch reference or to a Triton kernel.

Everything here is data. `ops.Ops` names the operations; the reference of each stands in `layers/`
and its kernel in `layers/kernels/` under the same file name, and both take these values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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


# -- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attending:
    """How a layer attends. `window` counts the query itself; `sinks` are logits by head (fp32);
    `cap` is a limit that scores come near and never reach."""

    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    cap: float | None = None

    def first_seen(self, position: int) -> int:
        """The first token that a query at this position sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True, slots=True)
class QKVParams:
    """What a layer does with its heads: norms where there are any, of each head by itself, and what
    keys are multiplied by before they turn."""

    kv_heads: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    key_gain: float = 1.0


@dataclass(frozen=True, slots=True)
class CompressedStream:
    """What a compressor is made of, after its projection.

    entries   one for every block of tokens
    own       the mean of the block that the next token belongs to
    overlap   what that block has put into the next one's mean so far, where blocks overlap
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
    """A causal convolution: taps (taps, channels) and bias in fp32, and the fields that keep the
    last inputs, part by part."""

    taps: Tensor
    bias: Tensor | None
    kept: tuple[Field, ...]

    def rounded(self, run: ForwardPass, place: Place, inputs: Tensor) -> Tensor:
        """Inputs with the precision in which a later step will see them."""
        return run.rounded(place, self.kept[0].name, inputs) if self.kept else inputs


@dataclass(frozen=True, slots=True)
class ScanParams:
    """A Mamba2 mixer's own numbers, by head, in fp32; and the bounds of time steps."""

    dt_bias: Tensor
    decay: Tensor
    skip: Tensor
    dt_limits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Before their functions: time steps, (tokens, heads) or (tokens, heads · keys), and
    strengths, (tokens, heads). By head the decay, and as many biases as there are time steps."""

    dt: Tensor
    dt_bias: Tensor
    decay: Tensor
    strength: Tensor


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
    """Per token: the experts chosen, (tokens, k), and each one's share."""

    experts: Tensor
    weights: Tensor

    def beside(self, first: int, count: int) -> Routing:
        """And so many more experts, numbered from the first: for every token, a share of one."""
        if count == 0:
            return self
        more = torch.arange(
            first, first + count, dtype=self.experts.dtype, device=self.experts.device
        ).expand(len(self.experts), -1)
        weights = torch.cat([self.weights, torch.ones_like(more, dtype=self.weights.dtype)], dim=1)
        return Routing(torch.cat([self.experts, more], dim=1), weights)


@dataclass(frozen=True, slots=True)
class FixedExperts:
    """Experts that tokens go to whatever their scores: `table` has a row (k) for every token."""

    table: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are chosen by their scores, and what share each gets.

    count            experts for a token
    groups, allowed  experts lie in groups, and only the best `allowed` groups may be chosen from
    group_depth      a group is as good as its so many best experts together, or all if it has fewer
    renormalised     weights are made to add up to one, before `scale`
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
        """What this rank's experts have of a weight with an axis for experts; not a view of it."""
        own = stacked[self.own.start : self.own.stop]
        return stacked if len(own) == len(stacked) else own.clone()


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """What an expert does between its two projections, with what the first one gives.

    activation  of the gate, or of everything where there is no gate
    gated       the first half is a gate for the second
    limit       what neither half may exceed
    gain        how steep a swish is
    offset      what the second half is taken plus
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

    What a gated one's first projection gives is gate and up, side by side. The last `beside` of
    them are an MLP that every token goes to.
    """

    group: ExpertGroup
    gate_up: ExpertWeights
    down: ExpertWeights
    gating: ExpertActivation
    beside: int = 0


# -- hyper-connections ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamMixing:
    """How a token's weights come from its streams.

    project  (outputs, all streams) in fp32; kernels take what `Ops.packed_mixing` makes of it
    scales, base  for every output, fp32
    eps      of weights; norm_eps of the norm before the projection
    rounds   after which rows and columns of the mixing matrix add up to one; 0: there is none
    """

    project: Tensor
    scales: Tensor
    base: Tensor
    eps: float
    norm_eps: float
    rounds: int = 0
