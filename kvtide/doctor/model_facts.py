"""What a model needs: its memory as a server on this device declares it, and its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtide.doctor.built_weights import weight_bytes
from kvtide.models.checkpoint import Checkpoint, open_checkpoint
from kvtide.spec import ModelMemory, SpecError, catalog
from kvtide.spec.families import KVDType, declare

WANTED_PAGE_BYTES = 64 << 10
"""Smaller pages waste the link and the disk."""
MAX_PAGE_TOKENS = 256
"""A prompt's last page is computed again: larger pages cost more of that than they save."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`path`: what `kvtide serve` is given; None for a built-in description without weights.

    active_params  that a token passes through, as far as known: else all; None: not known
    weights_bytes  as a server's layers keep them, on one device; None: not known
    own_page_tokens  the family's page size; `memory` has the one that fits
    """

    name: str
    path: Path | None
    memory: ModelMemory
    own_page_tokens: int
    active_params: int | None
    weights_bytes: int | None


def model_facts(model: str, on_gpu: bool) -> ModelFacts:
    """On a GPU a server computes in bf16, on a CPU in fp32."""
    kv_dtype = KVDType.BF16 if on_gpu else KVDType.FP32
    if not Path(model).exists():
        memory = catalog.resolve(model, None, kv_dtype.value)
        active = catalog.active_params(model)
        return ModelFacts(model, None, memory, memory.page_tokens, active, None)
    path = Path(model).resolve()
    checkpoint = open_checkpoint(path)
    memory = _memory(checkpoint, None, kv_dtype)
    own = memory.page_tokens
    page_tokens = _page_tokens(checkpoint, memory, kv_dtype)
    if page_tokens != own:
        memory = _memory(checkpoint, page_tokens, kv_dtype)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    weights = weight_bytes(checkpoint, torch.device(device), dtype)
    active = None if checkpoint.gguf is not None else catalog.active_params(model)
    return ModelFacts(path.name, path, memory, own, active or _params(checkpoint), weights)


def _memory(checkpoint: Checkpoint, page_tokens: int | None, kv_dtype: KVDType) -> ModelMemory:
    name = str(checkpoint.config.get("model_type"))
    return declare(checkpoint.config, model=name, page_tokens=page_tokens, kv_dtype=kv_dtype)


def _page_tokens(checkpoint: Checkpoint, memory: ModelMemory, kv_dtype: KVDType) -> int:
    """The family's page size, doubled while its largest page is small."""
    found = memory.page_tokens
    while _page_bytes(memory) < WANTED_PAGE_BYTES and 2 * memory.page_tokens <= MAX_PAGE_TOKENS:
        try:
            memory = _memory(checkpoint, 2 * memory.page_tokens, kv_dtype)
        except SpecError:
            break
        found = memory.page_tokens
    return found


def _page_bytes(memory: ModelMemory) -> int:
    return max(memory.at_rest.slot_bytes(anchor.name) for anchor in memory.anchors)


def _params(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors, scales of quantised ones included: a little too many then."""
    weights = checkpoint.weights
    names = {name.removesuffix("_blocks") for name in weights.names()}
    return sum(math.prod(weights.shape(name)) for name in names)
