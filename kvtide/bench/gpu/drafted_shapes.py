"""Models of real shapes beside a draft, all with random weights.

A draft's pools change the memory of its target. The model that decodes without drafts has the same
weights and the memory of the target alone, so that it pays nothing for a draft that it lacks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvtide.bench.gpu.shapes import RandomWeights, Shape, deepseek_v4_flash, qwen3_8b
from kvtide.models import build, build_mtp
from kvtide.models.checkpoint import Checkpoint
from kvtide.models.draft import DraftModel
from kvtide.models.draft_checkpoint import DraftCheckpoint
from kvtide.models.model import Decoder
from kvtide.models.safetensors_folder import WeightOutline
from kvtide.models.weight_digest import Stored
from kvtide.spec.config import Config
from kvtide.spec.families import declare

DRAFT_VOCABULARY = 32_000
"""Tokens that a published EAGLE3 draft of an 8B model may predict."""


class DraftedModel(NamedTuple):
    """`plain`: the target's weights, without pools for the draft."""

    target: Decoder
    draft: DraftModel
    plain: Decoder


Built = tuple[Decoder, DraftModel]


@dataclass(frozen=True, slots=True)
class DraftedShape:
    """`drafter`: what the draft is, for tables."""

    shape: Shape
    drafter: str
    builder: Callable[[Shape, torch.device, torch.dtype], Built]

    @property
    def name(self) -> str:
        return self.shape.name

    def build(self, device: torch.device, dtype: torch.dtype) -> DraftedModel:
        with device:
            target, draft = self.builder(self.shape, device, dtype)
        plain = copy.copy(target)
        plain.memory = declare(
            self.shape.config, model=self.name, page_tokens=self.shape.page_tokens
        )
        return DraftedModel(target, draft, plain)


# -- EAGLE3 -----------------------------------------------------------------------------------


class _DraftWeights(RandomWeights):
    """Random weights that know their names, as those of a file do."""

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ) -> None:
        patterns = {re.escape(name): shape for name, shape in tensors.items()}
        super().__init__(patterns, device, dtype)
        self._names = tuple(tensors)

    def names(self) -> Collection[str]:
        return self._names

    def stored(self, name: str) -> Stored:
        tensor = self.get(name).cpu()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        return Stored(f"{tensor.dtype} {tuple(tensor.shape)}", data, data.size // len(tensor))

    def outline(self, name: str) -> WeightOutline:
        return WeightOutline(self.get(name).dtype)


def _eagle3_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of the target's size."""
    same = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "rope_theta"),
    )
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target["vocab_size"] // 2),
        **{name: target[name] for name in same},
    }


def _eagle3_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = (config[f] for f in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f] * dim for f in ("num_attention_heads", "num_key_value_heads"))
    drafted = config["draft_vocab_size"]
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        "d2t": (drafted,),
        **{f"midlayer.{norm}.weight": (hidden,) for norm in norms},
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }


def _with_eagle3(shape: Shape, device: torch.device, dtype: torch.dtype) -> Built:
    config = _eagle3_config(shape.config)
    weights = _DraftWeights(_eagle3_tensors(config), device, dtype)
    checkpoint = Checkpoint(Path("random"), config, weights, {})
    draft = DraftCheckpoint(checkpoint, Config("draft", config))
    target = build(
        shape.config,
        RandomWeights(shape.tensors(shape.config), device, dtype),
        page_tokens=shape.page_tokens,
        dtype=dtype,
        draft=draft,
    )
    return target, draft.build(target)


# -- multi-token prediction -------------------------------------------------------------------


def _with_mtp(shape: Shape, device: torch.device, dtype: torch.dtype) -> Built:
    config = {**shape.config, "num_nextn_predict_layers": 1}
    weights = RandomWeights(shape.tensors(config), device, dtype)
    target = build(config, weights, page_tokens=shape.page_tokens, dtype=dtype, mtp=True)
    return target, build_mtp(config, weights, target)


def qwen3_8b_eagle3() -> DraftedShape:
    return DraftedShape(qwen3_8b(), "EAGLE3", _with_eagle3)


def deepseek_v4_flash_mtp() -> DraftedShape:
    return DraftedShape(deepseek_v4_flash(), "MTP", _with_mtp)
