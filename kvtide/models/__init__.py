"""One file per family: the forward pass over the pools that `spec.families` declares for it.

`family_registry` looks a config's `model_type` up in one table, declares the memory, and builds the
model from a checkpoint's tensors. `docs/ADDING_A_MODEL.md` describes how to add a row.

Families: `bamba`, `deepseek`, `deepseek_dsa`, `deepseek_v4`, `falcon_h1`, `gemma2`, `gemma3`,
`gpt_oss`, `granite_hybrid`, `kimi_linear`, `lfm2`, `llama`, `mixtral`, `nemotron_h`, `qwen3_moe`,
`qwen3_next`, `smollm3`
`model`               the interface of models, and the decoder that families build on
`draft`               the interface of drafts, and the hidden states of a target that they take
`eagle3`              EAGLE3 drafts; `draft_checkpoint` opens one and refuses what does not fit
`mtp`                 drafts that a checkpoint has beside the model: its next-token layer
`checkpoint`          a model on disk: `safetensors_folder`, or a file that `gguf` reads
`weight_digest`       what stands for weights, in keys of stored pages
`quantized_weights`   published weights in few bits, read as numbers: `fp8`, `mxfp4`
`renamed_weights`     weights under other names: `deepseek_v4_names`, `multimodal`
`outlined_weights`    shapes, dtypes and forms alone, to build a model that has no bytes
`tokenizer`           text to tokens and back; `token_bytes` of each token
`chat`                chat templates: `chat_templates`, `tool_templates`, `developer_role`
`spoken_tools`        tools, calls and results in words, for templates that know none
`default_model`       the model to try things with
`model_errors`        what cannot be read or used
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.models.family_registry import (
        FAMILIES,
        Model,
        build,
        build_mtp,
        has_mtp,
        longest_sequence,
        mtp_remark,
    )

__all__ = ["FAMILIES", "Model", "build", "build_mtp", "has_mtp", "longest_sequence", "mtp_remark"]


def __getattr__(name: str) -> Any:
    """The registry imports every family, and with them torch, which `models.gguf` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module("kvtide.models.family_registry"), name)
