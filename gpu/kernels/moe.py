"""MoE experts and routing at published sizes: our kernels beside torch's grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.layers.backend.arithmetic import Deterministic
from kvtide.layers.backend.kernel_args import (
    ExpertActivation,
    ExpertGroup,
    ExpertStack,
    ExpertWeights,
    Routing,
    RoutingRule,
)
from kvtide.layers.elementwise import sigmoid, softmax
from kvtide.layers.kernels import moe_experts as kernels
from kvtide.layers.kernels import moe_routing as routes
from kvtide.layers.reference.moe_routing import route
from kvtide.layers.tensor_ranks import ALONE

Timed = tuple[Callable[[], object], float, float]
"""The call to time, the bytes it must move, and its FLOPs."""


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    inputs: int
    width: int

    def weights(self) -> ExpertStack:
        return ExpertStack(
            ExpertGroup(range(self.experts), ALONE),
            gate_up=self._projection(self.width * 2, self.inputs),
            down=self._projection(self.inputs, self.width),
            gating=ExpertActivation(),
        )

    def _projection(self, outputs: int, inputs: int) -> ExpertWeights:
        size = (self.experts, outputs, inputs)
        weight = torch.randn(*size, device="cuda", dtype=torch.bfloat16)
        return ExpertWeights(weight.mul_(inputs**-0.5))

    def routing(self, tokens: int) -> Routing:
        logits = torch.randn(tokens, self.experts, device="cuda")
        return routes.route(logits, RoutingRule(self.top_k), softmax)

    def cost(self, tokens: int, routing: Routing) -> tuple[float, float]:
        """Bytes of the weights of used experts, of inputs and outputs; and FLOPs."""
        touched, pairs = len(routing.experts.unique()), tokens * self.top_k
        moved = 2 * (touched * 3 * self.inputs * self.width + 2 * tokens * self.inputs)
        moved += 2 * pairs * 2 * (self.width + self.inputs)
        return moved, 2 * pairs * 3 * self.inputs * self.width


GOAL_DECODE = Shape(256, 8, 4096, 2048)
GOAL_PREFILL = Shape(64, 8, 4096, 2048)
QWEN3 = Shape(128, 8, 2048, 768)


def ours(shape: Shape, tokens: int) -> Timed:
    torch.manual_seed(0)
    experts, routing = shape.weights(), shape.routing(tokens)
    x = torch.randn(tokens, shape.inputs, device="cuda", dtype=torch.bfloat16)
    return lambda: kernels.mix_experts(experts, x, routing), *shape.cost(tokens, routing)


def grouped(shape: Shape, tokens: int) -> Timed:
    """Torch's grouped GEMM, with pairs in order beforehand and routing weights left out."""
    torch.manual_seed(0)
    experts, routing = shape.weights(), shape.routing(tokens)
    x = torch.randn(tokens, shape.inputs, device="cuda", dtype=torch.bfloat16)
    expert_of_pair = routing.experts.flatten().long()
    source = expert_of_pair.sort(stable=True).indices // shape.top_k
    ends = torch.bincount(expert_of_pair, minlength=shape.experts).cumsum(0).to(torch.int32)
    up, down = (stack.weight.transpose(1, 2) for stack in (experts.gate_up, experts.down))
    grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm

    def run() -> Tensor:
        gate, value = grouped_mm(x[source], up, offs=ends).chunk(2, dim=-1)
        return grouped_mm(functional.silu(gate) * value, down, offs=ends)

    return run, *shape.cost(tokens, routing)


def part(shape: Shape, tokens: int, name: str, *, described: bool = True) -> Timed:
    """One kernel by itself; `described`: with tensor descriptors, where its tiles have them."""
    torch.manual_seed(0)
    experts, routing = shape.weights(), shape.routing(tokens)
    x = torch.randn(tokens, shape.inputs, device="cuda", dtype=torch.bfloat16)
    own, pairs = experts.group.own, tokens * shape.top_k
    tiles = kernels.tiles_for(pairs, shape.experts, x.dtype)
    tiles = replace(tiles, described=tiles.described and described)
    order = kernels.arrange(routing.experts, own, tiles.rows)
    up, down, gating = experts.gate_up, experts.down, experts.gating
    inner = kernels.project(x, up, order, tiles, shape.top_k, gating)
    given = kernels.project(inner, down, order, tiles)
    touched = len(routing.experts.unique())
    area = shape.inputs * shape.width
    wide = 2 * pairs * shape.inputs
    return {
        "arrange": (lambda: kernels.arrange(routing.experts, own, tiles.rows), 12.0 * pairs, 0.0),
        "up": (
            lambda: kernels.project(x, up, order, tiles, shape.top_k, gating),
            4.0 * touched * area,
            4.0 * pairs * area,
        ),
        "down": (
            lambda: kernels.project(inner, down, order, tiles),
            2.0 * touched * area + wide,
            2.0 * pairs * area,
        ),
        "gather": (
            lambda: kernels.gather(given, routing, own, x.dtype),
            wide + wide / shape.top_k,
            0.0,
        ),
    }[name]


def routed(experts: int, tokens: int, rule: RoutingRule, *, kernel: bool) -> Timed:
    torch.manual_seed(0)
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda")
    moved = 4.0 * tokens * (experts + 2 * rule.count)
    if kernel:
        return lambda: routes.route(logits, rule, sigmoid, bias), moved, 0.0
    plain = Deterministic()
    return lambda: route(plain, logits, rule, sigmoid, bias), moved, 0.0


def _rows() -> list[tuple[str, Callable[[], Timed]]]:
    rows: list[tuple[str, Callable[[], Timed]]] = []
    sizes = [
        ("256 experts", GOAL_DECODE, (64,)),
        ("64 experts", GOAL_PREFILL, (8192,)),
        ("qwen3-30b", QWEN3, (1, 64, 512, 8192)),
    ]
    for name, shape, counts in sizes:
        for tokens in counts:
            rows.append((f"{name}, {tokens}", partial(ours, shape, tokens)))
            for piece in ("arrange", "up", "down", "gather"):
                label = f"{name}, {tokens}: {piece}"
                rows.append((label, partial(part, shape, tokens, piece)))
            for piece in ("up", "down") if tokens > 64 else ():
                rows.append(
                    (
                        f"{name}, {tokens}: {piece}, without tensor descriptors",
                        partial(part, shape, tokens, piece, described=False),
                    )
                )
            rows.append((f"{name}, {tokens}: grouped_mm", partial(grouped, shape, tokens)))
    rule = RoutingRule(8, groups=8, allowed=4, scale=2.5)
    for tokens in (1, 64, 8192):
        for kernel in (True, False):
            label = f"routing {tokens} to 8 of 256{'' if kernel else ', torch'}"
            rows.append((label, partial(routed, 256, tokens, rule, kernel=kernel)))
    return rows


ROWS = _rows()
