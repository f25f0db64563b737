"""Which tokens a row may sample, a bit each, and how they are applied to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtide.engine.staging import Staging

TokenMasks = NDArray[np.uint32]
"""(rows, words): a bit per token of a vocabulary, the lowest first."""


class RowMask(NamedTuple):
    """A row of masks that may still be computed: `wait` gives all of them, as int32, on the host.
    Rows of one step have the same `wait`."""

    wait: Callable[[], Tensor]
    row: int


def apply_masks(logits: Tensor, masks: Sequence[RowMask | None], staging: Staging) -> None:
    """Rule out the tokens that each row's mask does not allow, in place."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return
    words, numbers = given[0].wait(), [mask.row for mask in given]
    if numbers != list(range(len(words))):
        words = words[numbers]
    rows = staging.indices([row for row, mask in enumerate(masks) if mask is not None])
    mask_rows = staging.kernels.mask_logits if staging.kernels is not None else mask_logits
    mask_rows(logits, staging.upload(words), rows)


def mask_logits(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """-inf where a token's bit is 0, in place.

    words  (masks, words) int32: a bit per token, the lowest first
    rows   (masks,): the row of each mask
    """
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)
