"""The tokens that a draft may predict: those that the target uses most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.training.generate import Answered


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """`tokens`: the target's token of each of the draft's, ascending. `coverage`: the fraction of
    the counted text that they make up."""

    tokens: Tensor
    target_tokens: int
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """Of each of the draft's tokens, how far ahead of it the target's is."""
        return self.tokens - torch.arange(len(self.tokens), device=self.tokens.device)

    @property
    def t2d(self) -> Tensor:
        """Of each of the target's tokens, whether the draft has it."""
        known = torch.zeros(self.target_tokens, dtype=torch.bool, device=self.tokens.device)
        known[self.tokens] = True
        return known


def choose_vocabulary(
    answered: Iterable[Answered], count: int | None, target_tokens: int
) -> DraftVocabulary | None:
    """The `count` tokens that answers use most; of equally frequent ones, the lower.

    None where the draft has all of the target's tokens.
    """
    if count is None:
        return None
    return extended_vocabulary(answered, torch.empty(0, dtype=torch.long), count, target_tokens)


def extended_vocabulary(
    answered: Iterable[Answered], known: Tensor, count: int, target_tokens: int
) -> DraftVocabulary:
    """These tokens, and of the others those that answers use most, `count` in all."""
    counts = _counts(answered, target_tokens)
    ranks = counts.clone()
    ranks[known] = torch.iinfo(ranks.dtype).max
    order = torch.sort(ranks, descending=True, stable=True).indices
    return _covering(order[:count].sort().values, counts)


def _counts(answered: Iterable[Answered], target_tokens: int) -> Tensor:
    answers = [torch.tensor(one.answer, dtype=torch.long) for one in answered]
    return torch.bincount(torch.cat(answers), minlength=target_tokens)


def _covering(tokens: Tensor, counts: Tensor) -> DraftVocabulary:
    covered = int(counts[tokens].sum()) / max(1, int(counts.sum()))
    return DraftVocabulary(tokens, len(counts), covered)
