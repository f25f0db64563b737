"""Batches of training: sequences side by side, and what the target says after their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from kvtide.models.model import Decoder
from kvtide.training.features import TargetStates, target_logits


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences side by side, padded at their ends: (sequences, positions, …).

    ends     tokens of each sequence
    prompts  tokens of each prompt
    """

    tokens: Tensor
    captured: Tensor
    last: Tensor
    ends: Tensor
    prompts: Tensor

    @classmethod
    def of(cls, states: TargetStates, numbers: Sequence[int]) -> PaddedBatch:
        """The sequences of these numbers. Padding repeats a sequence's last states."""
        device = states.tokens.device
        facts = [(states.starts[n], states.lengths[n], states.prompts[n]) for n in numbers]
        starts, ends, prompts = torch.tensor(facts, device=device).unbind(1)
        positions = torch.arange(max(end for _, end, _ in facts), device=device)
        within = positions < ends[:, None]
        rows = starts[:, None] + torch.minimum(positions, ends[:, None] - 1)
        both = states.states[rows]
        tokens = torch.where(within, states.tokens[rows], 0)
        width = states.width
        return cls(tokens, both[..., :-width], both[..., -width:], ends, prompts)

    def ahead(self, by: int) -> Tensor:
        """The tokens so many positions further on; 0 beyond the end."""
        return functional.pad(self.tokens[:, by:], (0, min(by, self.tokens.shape[1])))

    @property
    def before_answers(self) -> Tensor:
        """Positions whose next token is in an answer."""
        return self._in_answers(1)

    def counted(self, step: int) -> Tensor:
        """Rows of a recurrent step whose predicted token is in an answer."""
        return self._in_answers(2 + step)

    def _in_answers(self, ahead: int) -> Tensor:
        """Positions so many tokens before one of an answer."""
        there = torch.arange(self.tokens.shape[1], device=self.tokens.device) + ahead
        return (there >= self.prompts[:, None]) & (there < self.ends[:, None])


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """What the target says after positions before an answer's tokens, a row for each of them.

    probabilities  of the draft's tokens
    greedy         the greedy token's number among them, -1 where the draft lacks it
    row_of         (sequences, positions): the row of a position
    """

    probabilities: Tensor
    greedy: Tensor
    row_of: Tensor

    @classmethod
    def of(cls, target: Decoder, batch: PaddedBatch, vocabulary: Tensor | None) -> SoftTargets:
        """`vocabulary`: the target's token of each of the draft's."""
        rows = batch.before_answers
        found, chosen = [], []
        for logits in target_logits(target, batch.last[rows]):
            best = logits.argmax(-1)
            if vocabulary is not None:
                logits = logits[:, vocabulary]
                near = torch.searchsorted(vocabulary, best).clamp(max=len(vocabulary) - 1)
                best = torch.where(vocabulary[near] == best, near, -1)
            found.append(logits.softmax(-1))
            chosen.append(best)
        row_of = rows.flatten().cumsum(0).view(rows.shape) - 1
        return cls(torch.cat(found), torch.cat(chosen), row_of)


def batches_of(states: TargetStates, batch_tokens: int, random: Random) -> list[list[int]]:
    """Numbers of all sequences once, those of like length together, in random order."""
    lengths = states.lengths
    order = sorted(range(len(states)), key=lambda one: (lengths[one], random.random()))
    batches: list[list[int]] = [[]]
    for one in order:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[one] > batch_tokens:
            batches.append([])
        batches[-1].append(one)
    random.shuffle(batches)
    return batches
