"""Acceptance: drafted tokens are compared with those that the target sampled.

A draft is accepted if it equals the sampled token and all drafts before it are accepted. The host
compares once it has read a step's tokens. Behind a verify step that it has yet to read, the device
does the same by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.runner import UnreadTokens
from kvtide.engine.sampling.sampler import SampledToken
from kvtide.engine.staging import Staging


def accept_drafts(chunk: ScheduledChunk, sampled: Sequence[SampledToken]) -> Sequence[SampledToken]:
    """The sampled tokens up to the first that was not drafted.

    `sampled` has the token after the chunk's last one, and one after every draft, or after the
    first ones.
    """
    count, max_accepted = 0, min(len(chunk.drafts), len(sampled) - 1)
    while count < max_accepted and sampled[count].token == chunk.drafts[count]:
        count += 1
    return sampled[: count + 1]


def accepted_on_device(
    chunks: Sequence[ScheduledChunk], tokens: Tensor, longest: int, staging: Staging
) -> UnreadTokens:
    """As `accept_drafts` does on the host, of all chunks; none has more drafts than `longest`."""
    table = np.full((len(chunks), 1 + longest), -1)
    counts = [1 + len(chunk.drafts) for chunk in chunks]
    table[:, 0] = np.cumsum(counts) - counts
    for row, chunk in zip(table, chunks, strict=True):
        row[1 : 1 + len(chunk.drafts)] = chunk.drafts
    (there,) = staging.to_device(table)
    places = there[:, :1] + torch.arange(longest, device=there.device)
    same = tokens[places.clamp(max=len(tokens) - 1)] == there[:, 1:]
    accepted = same.int().cumprod(1).sum(1).int()
    firsts = dict(zip((c.request for c in chunks), table[:, 0].tolist(), strict=True))
    return UnreadTokens(tokens, firsts, accepted)
