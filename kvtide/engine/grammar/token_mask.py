"""Which tokens a row may sample, a bit each, and how they are applied to logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.staging import Staging

TokenMask = NDArray[np.uint32]
"""A bit per token of a vocabulary, the lowest first; of one row, or (rows, words)."""


def apply_masks(logits: Tensor, masks: Sequence[TokenMask | None], staging: Staging) -> None:
    """Rule out the tokens that each row's mask does not allow, in place."""
    masked = [row for row, mask in enumerate(masks) if mask is not None]
    if not masked:
        return
    found = np.stack([mask for mask in masks if mask is not None])
    (words,) = staging.to_device(found.view(np.int32))
    if len(masked) == len(masks):
        mask_logits(logits, words)
        return
    rows = staging.indices(masked)
    some = logits[rows]
    mask_logits(some, words)
    logits[rows] = some


def mask_logits(logits: Tensor, words: Tensor) -> None:
    """-inf where a token's bit is 0, in place; `words` is (rows, words) in int32."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, -torch.inf)
