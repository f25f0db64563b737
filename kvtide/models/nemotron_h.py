"""Nemotron-H: layers of one part each, a Mamba2 mixer, attention, an MLP, or experts.

The memory and the weights tell which one a layer is. There is no rotation; MLPs and experts have no
gate. Experts may have a narrower width than the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtide.layers import Attention, Blueprint, ForwardPass
from kvtide.layers.backend.arithmetic import Arithmetic
from kvtide.layers.backend.kernel_args import Routing, RoutingRule
from kvtide.layers.dense import Linear
from kvtide.layers.elementwise import Activation
from kvtide.layers.mamba import Mamba2
from kvtide.layers.moe import Experts, Mixture, Router
from kvtide.models.model import Decoder, Layer
from kvtide.spec.config import Config


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """`first` is the up projection; nothing is clamped."""

    arithmetic: Arithmetic
    first: Linear
    down: Linear
    activation: Activation
    limit: ClassVar[None] = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.arithmetic.rowwise(self.activation, self.first(x)))


def _mlp(blueprint: Blueprint) -> PlainMLP:
    up, down = blueprint.columns("up_proj"), blueprint.rows("down_proj")
    return PlainMLP(blueprint.arithmetic, up, down, blueprint.activation())


@dataclass(frozen=True, slots=True)
class NarrowExperts:
    """Experts of a narrower width than the model."""

    experts: Experts
    narrow: Linear
    widen: Linear

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self.widen(self.experts(self.narrow(x), routing))


def _experts(blueprint: Blueprint) -> Mixture:
    router = Router(blueprint.under("gate"), _routing_rule(blueprint.config))
    shared, names = _mlp(blueprint.under("shared_experts")), ("up_proj", "down_proj")
    under = blueprint.under("experts")
    if not blueprint.has("fc1_latent_proj.weight"):
        return Mixture.numbered(router, under, shared, *names)
    experts = Experts.numbered(under, router.experts, *names)
    narrow, widen = blueprint.linear("fc1_latent_proj"), blueprint.linear("fc2_latent_proj")
    return Mixture(router, NarrowExperts(experts, narrow, widen), shared)


def _routing_rule(config: Config) -> RoutingRule:
    return RoutingRule(
        config.count("num_experts_per_tok"),
        groups=config.count("n_group", default=1),
        allowed=config.count("topk_group", default=1),
        renormalised=bool(config.values.get("norm_topk_prob", True)),
        scale=config.number("routed_scaling_factor", default=1.0),
    )


@dataclass(frozen=True, slots=True)
class Stateless:
    """A part without state, called as a layer."""

    part: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return self.part(x)


class NemotronHLayer:
    def __init__(self, blueprint: Blueprint, number: int) -> None:
        self.norm = blueprint.norm("norm")
        self.mixer = _mixer(blueprint.under("mixer"), number)

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        return x + self.mixer(self.norm(x), run)


def _mixer(blueprint: Blueprint, number: int) -> Layer:
    if blueprint.keeps(number, "k"):
        return Attention(blueprint, number, None)
    if blueprint.keeps(number, "ssm"):
        return Mamba2(blueprint, number)
    return Stateless(_experts(blueprint) if blueprint.has("gate.weight") else _mlp(blueprint))


class NemotronH(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "num_experts_per_tok": 2,
    }
    BASE = "backbone"
    EMBEDDING = "embeddings.weight"
    FINAL_NORM = "norm_f"

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        act = base.config.find("mamba_hidden_act")
        if act not in (None, "silu"):
            raise base.config.refusal(f"`mamba_hidden_act` is {act!r}; only silu is known here")
        return [NemotronHLayer(each, number) for number, each in base.layers()]
