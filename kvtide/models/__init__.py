"""One file per family: the forward pass over the pools that `spec.families` declares for it.

`build` looks a config's `model_type` up in one table, declares the memory, and builds the model
from a checkpoint's tensors. `docs/ADDING_A_MODEL.md` says how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtide.layers import Blueprint, Weights, choose
from kvtide.models.falcon_h1 import FalconH1
from kvtide.models.gemma3 import Gemma3
from kvtide.models.gpt_oss import GptOss
from kvtide.models.llama import Llama
from kvtide.models.model import Decoder, Model
from kvtide.models.multimodal import LanguageModelWeights
from kvtide.spec.config import Config
from kvtide.spec.families import KVDType, declare, language_model

__all__ = ["FAMILIES", "Model", "Weights", "build"]

FAMILIES: dict[str, type[Decoder]] = {
    "falcon_h1": FalconH1,
    "gemma3_text": Gemma3,
    "gpt_oss": GptOss,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
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
) -> Model:
    """The model that this `config.json` describes, with these weights.

    `dtype` is what it computes in; `kv_dtype` and `page_tokens` are what its memory is declared
    with, None for the family's own. Of a multimodal model it is the language model.
    """
    name = str(config.get("model_type"))
    whole = Config(name, config)
    fields = language_model(whole)
    model_type = fields.find("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.refusal(
            f"model_type {model_type!r} has no forward pass here; use one of {', '.join(FAMILIES)}"
        )
    memory = declare(
        config,
        model=name,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        checkpoint_tokens=checkpoint_tokens,
    )
    if fields is not whole:
        weights = LanguageModelWeights(weights)
    arithmetic = choose(deterministic)
    return family(Blueprint(fields.beneath(family.DEFAULTS), weights, memory, arithmetic, dtype))
