"""The table of families: a config's `model_type` → the class of its forward pass.

`build` looks a config up, declares its memory and builds the model from a checkpoint's tensors.
`docs/ADDING_A_MODEL.md` says how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtide.layers import Blueprint, Weights, choose
from kvtide.layers.tensor_ranks import ALONE, TensorRanks
from kvtide.models.bamba import Bamba
from kvtide.models.deepseek import DeepSeek2, DeepSeek3, Glm4MoeLite
from kvtide.models.deepseek_dsa import DeepSeek32, GlmMoeDsa
from kvtide.models.deepseek_v4 import DeepSeekV4
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
from kvtide.models.model import Decoder, Model
from kvtide.models.multimodal import LanguageModelWeights
from kvtide.models.nemotron_h import NemotronH
from kvtide.models.qwen3_moe import Qwen3Moe
from kvtide.models.qwen3_next import Qwen3Next
from kvtide.models.smollm3 import SmolLM3
from kvtide.spec import with_draft
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare, declare_mtp, language_model

__all__ = ["FAMILIES", "Model", "build"]

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


def build(
    config: Mapping[str, object],
    weights: Weights,
    *,
    page_tokens: int | None = None,
    kv_dtype: KVDType | None = None,
    checkpoint_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    mtp: bool = False,
    draft: DraftSource | None = None,
    stage: int = 0,
    stages: int = 1,
    ranks: TensorRanks = ALONE,
) -> Decoder:
    """The model that this `config.json` describes, with these weights.

    `dtype` is what it computes in; `kv_dtype` and `page_tokens` are what its memory is declared
    with, None for the family's own. Of a multimodal model it is the language model. `mtp`: with its
    layers for multi-token prediction. `draft`: its memory also has the pools of this draft, which
    is built afterwards. It may be one of several stages, and have one of several ranks' share of
    every layer. It computes on torch's default device, where weights are: call this under
    `with device`.
    """
    name = str(config.get("model_type"))
    whole = Config(name, config)
    fields = language_model(whole)
    is_multimodal = fields is not whole
    model_type = fields.find("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.refusal(
            f"model_type {model_type!r} has no forward pass here; use one of {', '.join(FAMILIES)}"
        )
    fields = fields.beneath(family.DEFAULTS)
    memory = declare(
        config,
        model=name,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        checkpoint_tokens=checkpoint_tokens,
    )
    if mtp and draft is not None:
        raise fields.refusal("multi-token prediction and a draft are two drafts; use one of them")
    if mtp:
        memory = with_draft(memory, declare_mtp(config, memory=memory, kv_dtype=kv_dtype))
    if draft is not None:
        memory = with_draft(memory, draft.declare(fields, memory, kv_dtype))
    if is_multimodal:
        weights = LanguageModelWeights(weights)
    if (stages, ranks.count) != (1, 1):
        memory = list(memory.stages(stages, ranks.rank, ranks.count))[stage]
    ops = choose(deterministic, torch.get_default_device())
    return family(Blueprint(fields, weights, memory, ops, dtype, ranks=ranks))
