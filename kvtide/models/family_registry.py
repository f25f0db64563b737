"""The table of families: a config's `model_type` → the class of its forward pass.

`build` looks a config up, declares its memory and builds the model from a checkpoint's tensors.
`build_mtp` builds the draft that some checkpoints have beside the model (`models.mtp`).
`docs/ADDING_A_MODEL.md` says how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtide.layers import Blueprint, Weights, choose
from kvtide.layers.backend.ops import Ops
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from kvtide.models.bamba import Bamba
from kvtide.models.deepseek import DeepSeek2, DeepSeek3, DeepSeekNextToken, Glm4MoeLite
from kvtide.models.deepseek_dsa import DeepSeek32, GlmMoeDsa, SparseNextToken
from kvtide.models.deepseek_v4 import DeepSeekV4, DeepSeekV4NextToken
from kvtide.models.draft import DraftSource
from kvtide.models.falcon_h1 import FalconH1
from kvtide.models.gemma2 import Gemma2
from kvtide.models.gemma3 import Gemma3
from kvtide.models.gpt_oss import GptOss
from kvtide.models.granite_hybrid import GraniteHybrid
from kvtide.models.kimi_linear import KimiLinear
from kvtide.models.lfm2 import Lfm2
from kvtide.models.llama import Llama
from kvtide.models.mixtral import Mixtral
from kvtide.models.model import Decoder, Model, max_positions
from kvtide.models.mtp import NextTokenDraft
from kvtide.models.multimodal import LanguageModelWeights
from kvtide.models.nemotron_h import NemotronH
from kvtide.models.qwen3_moe import Qwen3Moe
from kvtide.models.qwen3_next import Qwen3Next, Qwen3NextToken
from kvtide.models.smollm3 import SmolLM3
from kvtide.spec import with_draft
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare, declare_mtp, language_model, mtp_layers
from kvtide.spec.residency import ALL_RESIDENT, Residency

__all__ = [
    "FAMILIES",
    "MTP",
    "Model",
    "build",
    "build_mtp",
    "has_mtp",
    "longest_sequence",
    "mtp_remark",
]

FAMILIES: dict[str, type[Decoder]] = {
    "bamba": Bamba,
    "deepseek_v2": DeepSeek2,
    "deepseek_v3": DeepSeek3,
    "deepseek_v32": DeepSeek32,
    "deepseek_v4": DeepSeekV4,
    "falcon_h1": FalconH1,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "glm4_moe_lite": Glm4MoeLite,
    "glm_moe_dsa": GlmMoeDsa,
    "gpt_oss": GptOss,
    "granitemoehybrid": GraniteHybrid,
    "kimi_linear": KimiLinear,
    "lfm2": Lfm2,
    "llama": Llama,
    "mistral": Llama,
    "mixtral": Mixtral,
    "nemotron_h": NemotronH,
    "qwen2": Llama,
    "qwen3": Llama,
    "qwen3_5_moe_text": Qwen3Next,
    "qwen3_5_text": Qwen3Next,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "smollm3": SmolLM3,
}

MTP: dict[str, type[NextTokenDraft]] = {
    "deepseek_v3": DeepSeekNextToken,
    "deepseek_v32": SparseNextToken,
    "deepseek_v4": DeepSeekV4NextToken,
    "glm4_moe_lite": DeepSeekNextToken,
    "glm_moe_dsa": SparseNextToken,
    "qwen3_5_moe_text": Qwen3NextToken,
    "qwen3_5_text": Qwen3NextToken,
    "qwen3_next": Qwen3NextToken,
}
"""Families whose checkpoints may have a layer for multi-token prediction, and its draft."""


@dataclass(frozen=True, slots=True)
class _Published:
    """A language model as it was published: alone, or in a multimodal checkpoint.

    `weights` are its own under a language model's names, `fields` its config, completed.
    """

    name: str
    fields: Config
    weights: Weights
    family: type[Decoder]

    @classmethod
    def of(cls, config: Mapping[str, object], weights: Weights) -> _Published:
        name = str(config.get("model_type"))
        whole = Config(name, config)
        fields = language_model(whole)
        model_type = fields.find("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise fields.refusal(
                f"model_type {model_type!r} has no forward pass here; use one of "
                f"{', '.join(FAMILIES)}"
            )
        if fields is not whole:
            weights = LanguageModelWeights(weights)
        return cls(name, fields.beneath(family.DEFAULTS), weights, family)

    def find_draft(self) -> type[NextTokenDraft]:
        """The class of its MTP draft; a checkpoint without one is refused."""
        draft = MTP.get(str(self.fields.find("model_type")))
        if draft is None:
            raise self.fields.refusal(
                "its family has no layer for multi-token prediction here; use --speculate ngram or "
                f"eagle3, or one of {', '.join(MTP)}"
            )
        if not self.weights.has(name := draft.first_tensor(self.fields)):
            raise self.fields.refusal(
                f"the checkpoint has no tensor {name}, and so no layer for multi-token prediction; "
                "use --speculate ngram or eagle3"
            )
        return draft


def build(
    config: Mapping[str, object],
    weights: Weights,
    *,
    page_tokens: int | None = None,
    kv_dtype: KVDType | None = None,
    checkpoint_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    resident: Residency = ALL_RESIDENT,
    draft_tokens: int = 0,
    mtp: bool = False,
    draft: DraftSource | None = None,
    stage: int = 0,
    stages: int = 1,
    ranks: TensorRanks = ALONE,
    ops: Ops | None = None,
) -> Decoder:
    """The model that this `config.json` describes, with these weights.

    `dtype` is what it computes in; `kv_dtype` and `page_tokens` are what its memory is declared
    with, None for the family's own. `resident` says which of its pools live on the host, beside
    so many draft tokens in a step. Of a multimodal model it is the language model. `mtp`, `draft`:
    its memory also has the pools of the draft that `build_mtp` gives, or of this one; a draft is
    built afterwards. It may be one of several stages, and have one of several ranks' share of
    every layer. It computes on torch's default device, where weights are: call this under
    `with device`. `ops` are what it computes with, if not what is `choose`n there.
    """
    published = _Published.of(config, weights)
    memory = declare(
        config,
        model=published.name,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        checkpoint_tokens=checkpoint_tokens,
    )
    memory = resident.of(memory, draft_tokens)
    if mtp and draft is not None:
        raise published.fields.refusal(
            "multi-token prediction and a draft are two drafts; use one of them"
        )
    if mtp:
        published.find_draft()
        memory = with_draft(memory, declare_mtp(config, memory=memory, kv_dtype=kv_dtype))
    if draft is not None:
        memory = with_draft(memory, draft.declare(published.fields, memory, kv_dtype))
    if (stages, ranks.count) != (1, 1):
        memory = list(memory.stages(stages, ranks.rank, ranks.count))[stage]
    if ops is None:
        ops = choose(deterministic, torch.get_default_device())
    return published.family(
        Blueprint(published.fields, published.weights, memory, ops, dtype, ranks=ranks)
    )


def longest_sequence(config: Mapping[str, object], weights: Weights) -> int:
    """Tokens of the longest sequence of the model that `build` gives."""
    return max_positions(_Published.of(config, weights).fields)


def has_mtp(config: Mapping[str, object], weights: Weights) -> bool:
    """Whether `build_mtp` finds a draft in this checkpoint."""
    published = _Published.of(config, weights)
    draft = MTP.get(str(published.fields.find("model_type")))
    if draft is None or not mtp_layers(config):
        return False
    return published.weights.has(draft.first_tensor(published.fields))


def mtp_remark(config: Mapping[str, object], weights: Weights) -> str:
    """What the draft of `build_mtp` does otherwise than its config asks, for the line at a
    server's start; empty if nothing, and without a draft."""
    if not has_mtp(config, weights):
        return ""
    published = _Published.of(config, weights)
    return published.find_draft().remark(published.fields)


def build_mtp(config: Mapping[str, object], weights: Weights, target: Decoder) -> NextTokenDraft:
    """The draft that the checkpoint of this target has: its layer for multi-token prediction.

    `target` is what `build(config, weights, mtp=True)` gives, whole or the last of its stages. The
    draft has its embedding and head, and is on its device, in its dtype and arithmetic, on its
    ranks.
    """
    published = _Published.of(config, weights)
    draft = published.find_draft()
    if target.memory.end_layer - target.memory.layers != 1 or not target.is_last:
        raise published.fields.refusal(
            f"the memory of {target.memory.model} has no pools for its layer for multi-token "
            "prediction; build the target with mtp=True, and the draft beside its last stage"
        )
    blueprint = target.draft_blueprint(published.fields, published.weights)
    with target.head.device:
        return draft(target, blueprint)
