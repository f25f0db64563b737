"""The training of a draft: recurrent steps over the target's hidden states, soft targets.

At step s a row at position t takes the token at t + 1 + s and predicts the one at t + 2 + s: what
the target's logits at t + 1 + s say of it, as far as the draft has the tokens. Step 0 has the
target's features, later steps the draft's own, as in serving. Rows count whose predicted token
belongs to an answer and whose greedy token the draft has.

On a CUDA device matrices are multiplied in bf16; weights, residuals and their sums are fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from kvtide.models.model import Decoder
from kvtide.training.batches import PaddedBatch, SoftTargets, batches_of
from kvtide.training.features import TargetStates
from kvtide.training.trainable_eagle3 import TrainableEagle3

STEP_WEIGHT = 0.8
"""The weight of a recurrent step's loss, against that of the step before."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """`steps`: at the most; the time of the whole command may end before.

    recurrent     recurrent steps, as many as tokens are drafted
    batch_tokens  of a step's sequences, padding included
    """

    steps: int = 3000
    rate: float = 1e-3
    warm_up: int = 50
    recurrent: int = 3
    batch_tokens: int = 8192
    seed: int = 0

    def rate_at(self, step: int, progress: float) -> float:
        """Warm-up, then a cosine down to a fiftieth."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Means over the steps since the last report.

    top_1          of every recurrent step, how often the draft's first choice was the target's
    accept_length  tokens of a verify step with as many drafts as recurrent steps
    tokens_s       tokens of sequences trained on in a second
    """

    number: int
    loss: float
    top_1: tuple[float, ...]
    accept_length: float
    tokens_s: float


class BatchLoss(NamedTuple):
    """`hits`: (sequences, positions, recurrent steps), whether a row's first choice is right.

    top_1          of every recurrent step, the fraction of counted rows that hit
    accept_length  one more than the drafts accepted, on average over positions
    """

    loss: Tensor
    top_1: Tensor
    accept_length: Tensor
    hits: Tensor

    @property
    def figures(self) -> Tensor:
        return torch.cat([self.loss.detach()[None], self.top_1, self.accept_length[None]])


class DraftTraining:
    """A draft beside its target. `vocabulary`: the target's token of each of the draft's."""

    def __init__(
        self,
        draft: TrainableEagle3,
        target: Decoder,
        vocabulary: Tensor | None,
        plan: TrainingPlan,
    ) -> None:
        self.draft, self.target, self._plan = draft, target, plan
        device = target.head.device
        self._vocabulary = None if vocabulary is None else vocabulary.to(device)
        self._device, self._random = device, Random(plan.seed)
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            draft.parameters(), plan.rate, (0.9, 0.95), weight_decay=0.0, fused=fused
        )

    def loss(self, batch: PaddedBatch) -> BatchLoss:
        """The loss of a batch, and what the draft got right."""
        targets = SoftTargets.of(self.target, batch, self._vocabulary)
        steps = range(self._plan.recurrent)
        hits = torch.zeros(*batch.tokens.shape, len(steps), dtype=torch.bool, device=self._device)
        losses, top_1 = [], []
        for step, hidden in enumerate(self.hidden(batch)):
            counted = batch.counted(step).nonzero(as_tuple=True)
            wanted = targets.row_of[counted[0], counted[1] + 1 + step]
            greedy = targets.greedy[wanted]
            logits = self.draft_logits(hidden[counted])
            known = (greedy >= 0).float()
            entropy = -(targets.probabilities[wanted] * logits.log_softmax(-1)).sum(-1)
            losses.append(STEP_WEIGHT**step * (entropy * known).sum() / known.sum().clamp(1))
            right = logits.argmax(-1) == greedy
            hits[(*counted, torch.full_like(counted[0], step))] = right
            top_1.append(right.sum() / max(1, len(greedy)))
        # Rows all of whose drafts are in the answer.
        whole = batch.counted(0) & batch.counted(len(steps) - 1)
        accepted = (hits.cumprod(-1).sum(-1) * whole).sum() / whole.sum().clamp(1)
        return BatchLoss(torch.stack(losses).sum(), torch.stack(top_1), 1 + accepted, hits)

    def hidden(self, batch: PaddedBatch) -> list[Tensor]:
        """The draft's hidden states of every recurrent step."""
        embedding = self.target.embedding
        tokens = [embedding(batch.ahead(1 + step)).float() for step in range(self._plan.recurrent)]
        with self._mixed_precision():
            found: list[Tensor] = self.draft(batch.captured.float(), tokens)
        return found

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Over the draft's tokens, in fp32."""
        with self._mixed_precision():
            return self.draft.logits(hidden).float()

    def _mixed_precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda")

    @property
    def predicted_tokens(self) -> Tensor:
        """The target's token of each of the draft's."""
        if self._vocabulary is not None:
            return self._vocabulary
        return torch.arange(self.target.head.tokens, device=self._device)

    def run(
        self,
        states: TargetStates,
        report: Callable[[TrainingStep], None],
        every: int,
        until: float = math.inf,
    ) -> TrainingStep:
        """Train as the plan says, to `until` at the most, a time of `time.monotonic`; a report
        after every so many steps. Returns the last one."""
        self.draft.train()
        began, step, progress = time.monotonic(), 0, 0.0
        batches: list[list[int]] = []
        meter = _Meter(self._plan.recurrent + 2, self._device)
        while progress < 1:
            batches = batches or batches_of(states, self._plan.batch_tokens, self._random)
            for group in self._optimizer.param_groups:
                group["lr"] = self._plan.rate_at(step, progress)
            batch = PaddedBatch.of(states, numbers := batches.pop())
            found = self.loss(batch)
            self._optimizer.zero_grad()
            found.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            self._optimizer.step()
            meter.add(found.figures, sum(states.lengths[number] for number in numbers))
            step += 1
            of_time = (time.monotonic() - began) / max(1e-9, until - began)
            progress = max(step / self._plan.steps, of_time)
            if step % every == 0 or progress >= 1:
                done = meter.read(step)
                report(done)
        self.draft.eval()
        return done


class _Meter:
    """Sums of `BatchLoss.figures`, which stay on the device until they are read."""

    def __init__(self, figures: int, device: torch.device) -> None:
        self._sums = torch.zeros(figures, device=device)
        self._clear()

    def _clear(self) -> None:
        self._sums.zero_()
        self._steps, self._tokens, self._began = 0, 0, time.monotonic()

    def add(self, figures: Tensor, tokens: int) -> None:
        self._sums += figures
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def read(self, number: int) -> TrainingStep:
        """The means, from which it begins anew."""
        loss, *top_1, accept_length = (self._sums / self._steps).tolist()
        rate = self._tokens / max(1e-9, time.monotonic() - self._began)
        self._clear()
        return TrainingStep(number, loss, tuple(top_1), accept_length, rate)
