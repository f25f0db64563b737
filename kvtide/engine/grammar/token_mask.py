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
    if masked:
        found = np.stack([mask for mask in masks if mask is not None])
        (words,) = staging.to_device(found.view(np.int32))
        mask_rows = staging.kernels.mask_logits if staging.kernels is not None else mask_logits
        mask_rows(logits, words, staging.indices(masked))


def mask_logits(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """-inf where a token's bit is 0, in place.

    words  (masks, words) int32: a bit per token, the lowest first
    rows   (masks,): the row of each mask
    """
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)
