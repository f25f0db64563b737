"""The training of a draft: recurrent steps over the target's hidden states, soft targets.

At step s a row at position t takes the token at t + 1 + s and predicts the one at t + 2 + s: what
the target's logits at t + 1 + s say of it, as far as the draft has the tokens. Step 0 has the
target's features, later steps the draft's own, as in serving. Rows count whose predicted token
belongs to an answer and whose greedy token the draft has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from kvtide.models.model import Decoder
from kvtide.training.features import TargetStates, target_logits
from kvtide.training.trainable_eagle3 import TrainableEagle3

STEP_WEIGHT = 0.8
"""The weight of a recurrent step's loss, against that of the step before."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """`steps` and `minutes`: whichever ends first.

    recurrent     recurrent steps, as many as tokens are drafted
    batch_tokens  of a step's sequences, padding included
    """

    steps: int = 3000
    minutes: float | None = None
    rate: float = 1e-3
    warm_up: int = 50
    recurrent: int = 3
    batch_tokens: int = 8192
    seed: int = 0

    def rate_at(self, step: int, progress: float) -> float:
        """Warm-up, then a cosine down to a twentieth."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """`top_1`: of every recurrent step, how often the draft's first choice was the target's."""

    number: int
    loss: float
    top_1: tuple[float, ...]


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
    def of(cls, states: Sequence[TargetStates]) -> PaddedBatch:
        device = states[0].tokens.device
        return cls(
            pad_sequence([one.tokens for one in states], batch_first=True),
            pad_sequence([one.captured for one in states], batch_first=True),
            pad_sequence([one.last for one in states], batch_first=True),
            torch.tensor([len(one.tokens) for one in states], device=device),
            torch.tensor([one.prompt for one in states], device=device),
        )

    def ahead(self, by: int) -> Tensor:
        """The tokens so many positions further on; 0 beyond the end."""
        return functional.pad(self.tokens[:, by:], (0, min(by, self.tokens.shape[1])))

    def counted(self, step: int) -> Tensor:
        """Rows of a recurrent step whose predicted token is in an answer."""
        predicted = torch.arange(self.tokens.shape[1], device=self.tokens.device) + 2 + step
        return (predicted >= self.prompts[:, None]) & (predicted < self.ends[:, None])


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """What the target says after every position: probabilities of the draft's tokens, and the
    greedy token's number among them, -1 where the draft lacks it."""

    probabilities: Tensor
    greedy: Tensor

    @classmethod
    def of(cls, target: Decoder, batch: PaddedBatch, vocabulary: Tensor | None) -> SoftTargets:
        """`vocabulary`: the target's token of each of the draft's."""
        probabilities, greedy = [], []
        for logits in target_logits(target, batch.last.flatten(0, 1)):
            best = logits.argmax(-1)
            if vocabulary is not None:
                logits = logits[:, vocabulary]
                found = torch.searchsorted(vocabulary, best).clamp(max=len(vocabulary) - 1)
                best = torch.where(vocabulary[found] == best, found, -1)
            probabilities.append(logits.softmax(-1))
            greedy.append(best)
        shape = batch.tokens.shape
        whole = torch.cat(probabilities).unflatten(0, shape)
        return cls(whole, torch.cat(greedy).unflatten(0, shape))


class DraftTraining:
    """A draft beside its target. `vocabulary`: the target's token of each of the draft's."""

    def __init__(
        self,
        draft: TrainableEagle3,
        target: Decoder,
        vocabulary: Tensor | None,
        plan: TrainingPlan,
    ) -> None:
        self.draft, self._target, self._plan = draft, target, plan
        device = target.head.weight.device
        self._vocabulary = None if vocabulary is None else vocabulary.to(device)
        self._device, self._random = device, Random(plan.seed)
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            draft.parameters(), plan.rate, (0.9, 0.95), weight_decay=0.0, fused=fused
        )

    def loss(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and of every recurrent step how often the first choice is right."""
        targets = SoftTargets.of(self._target, batch, self._vocabulary)
        steps = range(self._plan.recurrent)
        embedding = self._target.embedding
        tokens = [functional.embedding(batch.ahead(1 + step), embedding).float() for step in steps]
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            hidden = self.draft(batch.captured.float(), tokens)
            losses, right = [], []
            for step in steps:
                counted = batch.counted(step)
                rows = counted[:, : counted.shape[1] - 1 - step]
                wanted = targets.probabilities[:, 1 + step :][rows]
                greedy = targets.greedy[:, 1 + step :][rows]
                logits = self.draft.logits(hidden[step][:, : rows.shape[1]][rows]).float()
                known = (greedy >= 0).float()
                entropy = -(wanted * logits.log_softmax(-1)).sum(-1)
                losses.append(STEP_WEIGHT**step * (entropy * known).sum() / known.sum().clamp(1))
                right.append((logits.argmax(-1) == greedy).float().mean())
        return torch.stack(losses).sum(), torch.stack(right).detach()

    def run(
        self, states: Sequence[TargetStates], report: Callable[[TrainingStep], None], every: int
    ) -> TrainingStep:
        """Train as the plan says; a report after every so many steps. Returns the last step."""
        self.draft.train()
        began, step, progress = time.monotonic(), 0, 0.0
        batches: list[list[TargetStates]] = []
        while progress < 1:
            batches = batches or self._batches(states)
            for group in self._optimizer.param_groups:
                group["lr"] = self._plan.rate_at(step, progress)
            loss, right = self.loss(PaddedBatch.of(batches.pop()))
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            self._optimizer.step()
            step += 1
            progress = self._progress(step, time.monotonic() - began)
            if step % every == 0 or progress >= 1:
                done = TrainingStep(step, loss.item(), tuple(right.tolist()))
                report(done)
        self.draft.eval()
        return done

    def _progress(self, step: int, seconds: float) -> float:
        """The fraction of the plan that is done."""
        of_time = 0.0 if self._plan.minutes is None else seconds / (60 * self._plan.minutes)
        return max(step / self._plan.steps, of_time)

    def _batches(self, states: Sequence[TargetStates]) -> list[list[TargetStates]]:
        """All sequences once, those of like length together, in random order."""
        order = sorted(states, key=lambda one: (len(one.tokens), self._random.random()))
        batches: list[list[TargetStates]] = [[]]
        for one in order:
            if batches[-1] and (len(batches[-1]) + 1) * len(one.tokens) > self._plan.batch_tokens:
                batches.append([])
            batches[-1].append(one)
        self._random.shuffle(batches)
        return batches
