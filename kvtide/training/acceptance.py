"""How often drafts are accepted when tokens are sampled: with shared noise, as the engine drafts,
and by rejection sampling, as others do.

The engine samples target and draft with the same Gumbel noise: each takes the token with the
highest log-probability plus noise. A draft is accepted if both take the same one. They both take x
with the probability 1 / Σ_y max(p(y) / p(x), q(y) / q(x)).
Rejection sampling accepts a draft x with min(1, p(x) / q(x)), together Σ min(p, q), and samples
another token from the rest if not: the text then depends on the draft, which the engine's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.training.batches import PaddedBatch
from kvtide.training.eagle3_training import DraftTraining
from kvtide.training.features import TargetStates, target_logits

ROWS = 256
"""Rows over the target's vocabulary at a time."""
SEQUENCES = 16


Method = Callable[[Tensor, Tensor], Tensor]
"""From rows of the target's and the draft's probabilities, (rows, tokens), to how probable it is
that each row's draft is accepted."""


def rejection_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Σ min(p, q)."""
    return torch.minimum(target, draft).sum(-1)


def shared_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """The probability that the same noise samples the same token from both rows.

    In ascending order of p / q the maximum is q's for tokens before x, p's from x on.
    """
    order = (target.log() - draft.log()).nan_to_num(nan=0.0).argsort(-1)
    p, q = target.gather(-1, order), draft.gather(-1, order)
    before, beyond = q.cumsum(-1) - q, p.flip(-1).cumsum(-1).flip(-1)
    both = p * q
    return torch.where(both > 0, both / (before * p + beyond * q), 0.0).sum(-1)


SHARED, REJECTION = "shared noise", "rejection"
METHODS: Mapping[str, Method] = {SHARED: shared_acceptance, REJECTION: rejection_acceptance}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Means over positions of the target's own answers, by the names of `METHODS`.

    first    how often a first draft is accepted
    lengths  tokens per verify step with all drafts, as far as the drafts before are the tokens of
             the answer
    """

    positions: int
    first: Mapping[str, float]
    lengths: Mapping[str, float]


@torch.no_grad()
def expected_acceptance(
    training: DraftTraining, states: TargetStates, temperature: float
) -> Acceptance:
    """Over answers that the target sampled at this temperature."""
    found = []
    for first in range(0, len(states), SEQUENCES):
        some = range(len(states))[first : first + SEQUENCES]
        found.append(_batch_acceptance(training, PaddedBatch.of(states, some), temperature))
    each = torch.cat(found)
    chances, lengths = each[:, :, 0].mean(0), 1 + each.cumprod(-1).sum(-1).mean(0)
    return Acceptance(len(each), _named(chances), _named(lengths))


def _named(values: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in zip(METHODS, values, strict=True)}


def _batch_acceptance(training: DraftTraining, batch: PaddedBatch, temperature: float) -> Tensor:
    """(positions, methods, drafts) at positions all of whose drafts are in the answer."""
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
            parts.append(torch.stack([method(p, q) for method in METHODS.values()], -1))
        steps.append(torch.cat(parts))
    return torch.stack(steps, -1)
