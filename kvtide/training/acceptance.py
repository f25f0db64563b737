"""How often drafts are accepted when tokens are sampled: with shared random numbers, as the engine
drafts, and by rejection sampling, as others do.

The engine samples target and draft with one random number u: each takes the token on whose part of
its own cumulative distribution u falls, tokens in descending order of probability. A draft is
accepted if both take the same one, which happens with the probability that their parts overlap.
Rejection sampling accepts a draft x with min(1, p(x) / q(x)), together Σ min(p, q), and samples
another token from the rest if not: the text then depends on the draft, which the engine's does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.training.batches import PaddedBatch
from kvtide.training.eagle3_training import DraftTraining
from kvtide.training.features import TargetStates, target_logits

ROWS = 256
"""Rows over the target's vocabulary at a time."""
SEQUENCES = 16


def rejection_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Σ min(p, q) of each row of probabilities (rows, tokens)."""
    return torch.minimum(target, draft).sum(-1)


def shared_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """The probability that one random number samples the same token from both rows."""
    (first, end), (draft_first, draft_end) = _parts(target), _parts(draft)
    overlap = torch.minimum(end, draft_end) - torch.maximum(first, draft_first)
    return overlap.clamp(min=0).sum(-1)


def _parts(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Where each token's part of the cumulative distribution begins and ends."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ends = ordered.cumsum(-1)
    end = torch.empty_like(ends).scatter_(-1, order, ends)
    return end - probabilities, end


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Means over positions of the target's own answers.

    shared, rejection                that a first draft is accepted
    shared_length, rejection_length  tokens per verify step with all drafts, as far as the drafts
                                     before are the tokens of the answer
    """

    positions: int
    shared: float
    rejection: float
    shared_length: float
    rejection_length: float


@torch.no_grad()
def expected_acceptance(
    training: DraftTraining, states: TargetStates, temperature: float
) -> Acceptance:
    """Over answers that the target sampled at this temperature."""
    found = []
    for first in range(0, len(states), SEQUENCES):
        some = range(len(states))[first : first + SEQUENCES]
        found.append(_batch_acceptance(training, PaddedBatch.of(states, some), temperature))
    # (positions, 2, drafts): shared and rejection.
    each = torch.cat(found)
    lengths = 1 + each.cumprod(-1).sum(-1).mean(0)
    shared, rejection = each[:, :, 0].mean(0).tolist()
    return Acceptance(len(each), shared, rejection, *lengths.tolist())


def _batch_acceptance(training: DraftTraining, batch: PaddedBatch, temperature: float) -> Tensor:
    """(positions, 2, drafts) at positions all of whose drafts are in the answer."""
    hidden = training.hidden(batch)
    rows = (batch.counted(0) & batch.counted(len(hidden) - 1)).nonzero(as_tuple=True)
    steps = []
    for step, states in enumerate(hidden):
        last = batch.last[rows[0], rows[1] + 1 + step]
        drafted = training.draft_logits(states[rows])
        parts = []
        for some, logits in zip(last.split(ROWS), drafted.split(ROWS), strict=True):
            (wanted,) = target_logits(training.target, some)
            p = (wanted.double() / temperature).softmax(-1)
            q = torch.zeros_like(p)
            q[:, training.predicted_tokens] = (logits.double() / temperature).softmax(-1)
            parts.append(torch.stack([shared_acceptance(p, q), rejection_acceptance(p, q)], -1))
        steps.append(torch.cat(parts))
    return torch.stack(steps, -1)
