"""Mixtral: the plain decoder, with experts in every MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvtide.layers import Blueprint
from kvtide.layers.backend.kernel_args import RoutingRule
from kvtide.layers.rope import rope, rope_parameters
from kvtide.models.model import Decoder, Layer
from kvtide.models.qwen3_moe import SparseLayer, SparseMLP


class Mixtral(Decoder):
    DEFAULTS: ClassVar[Mapping[str, object]] = {
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }

    def build_layers(self, base: Blueprint) -> Sequence[Layer]:
        rotation = rope(rope_parameters(base.config), base.head_dim)
        rule = RoutingRule(base.config.count("num_experts_per_tok"))
        layers = []
        for number, each in base.layers():
            experts = SparseMLP(each.under("block_sparse_moe"), rule, "w1", "w3", "w2")
            layers.append(SparseLayer(each, number, rotation, experts))
        return layers
