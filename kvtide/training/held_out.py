"""Accept length on prompts that training has not seen: what the engine gives with the draft.

Answers are greedy. Every verify step has as many drafts as asked for, except at an answer's end.
While a draft is trained, `predicted_accept_length` says the same from the target's hidden states
over these answers, in one pass of the draft in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtide.engine import Engine, RequestParams
from kvtide.engine.speculation.model_drafter import ModelDrafter
from kvtide.models.draft import DraftModel
from kvtide.models.model import Decoder
from kvtide.training.batches import PaddedBatch
from kvtide.training.eagle3_training import DraftTraining
from kvtide.training.features import TargetStates
from kvtide.training.generate import CHUNK_TOKENS, AnswerPlan, open_training_cache
from kvtide.training.prompts import EncodedPrompts

AT_ONCE = 16
"""Sequences of a prediction's batch."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What verify steps gave on one category. `tokens`: accepted drafts, and one more a step."""

    category: str
    prompts: int
    steps: int
    tokens: int

    @property
    def accept_length(self) -> float:
        """Tokens per verify step."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class HeldOutPlan:
    max_tokens: int = 128
    draft_tokens: int = 3
    at_once: int = 64

    @property
    def greedy(self) -> AnswerPlan:
        """How these prompts are answered without a draft."""
        return AnswerPlan(self.max_tokens, count=1, at_once=self.at_once)


def measure_held_out(
    target: Decoder,
    draft: DraftModel,
    files: Sequence[EncodedPrompts],
    plan: HeldOutPlan,
    stop_ids: frozenset[int],
    until: float = math.inf,
) -> list[HeldOut]:
    """The accept length of every file's prompts; answers end at `until`, of `time.monotonic`."""
    return [_measured(target, draft, file, plan, stop_ids, until) for file in files]


def _measured(
    target: Decoder,
    draft: DraftModel,
    file: EncodedPrompts,
    plan: HeldOutPlan,
    stop_ids: frozenset[int],
    until: float,
) -> HeldOut:
    at_once = min(plan.at_once, len(file.prompts))
    longest = max(map(len, file.prompts)) + plan.max_tokens + 2 * target.memory.page_tokens
    cache = open_training_cache(target, (at_once + 1) * longest)
    drafter = ModelDrafter(draft, draft.captures, cache, target.vocabulary)
    drafter.cost = 0.0  # So that the number of drafts never falls.
    engine = Engine(
        target,
        cache,
        chunk_tokens=CHUNK_TOKENS,
        max_running=at_once,
        drafter=drafter,
        draft_tokens=plan.draft_tokens,
    )
    requests = [
        engine.submit(RequestParams(prompt, plan.max_tokens, stop_ids=stop_ids))
        for prompt in file.prompts
    ]
    while not engine.idle and time.monotonic() < until:
        engine.step()
    for request in requests:
        engine.abort(request)
    cache.close()
    lengths = engine.accept_lengths
    assert lengths is not None, "the engine was made with a drafter"
    steps = sum(counts.total() for counts in lengths.steps.values())
    return HeldOut(file.category, len(file.prompts), steps, lengths.accepted + steps)


# -- in training ---------------------------------------------------------------------------------


@torch.no_grad()
def predicted_accept_length(training: DraftTraining, states: TargetStates) -> float:
    """Tokens per verify step over these greedy answers, with the draft as it is now.

    A walk over every answer: a verify step accepts the drafts behind a row up to the first that is
    not the target's, and gives one token more.
    """
    steps = tokens = 0
    for first in range(0, len(states), AT_ONCE):
        some = range(len(states))[first : first + AT_ONCE]
        hits = training.loss(PaddedBatch.of(states, some)).hits
        for number, accepted in zip(some, hits.cumprod(-1).sum(-1).tolist(), strict=True):
            # The first token of an answer comes without drafts, and so does the last if it is left.
            row, end = states.prompts[number] - 1, states.lengths[number] - 2
            while row < end - 1:
                given = min(1 + accepted[row], end - row)
                steps, tokens, row = steps + 1, tokens + given, row + given
    return tokens / steps if steps else 0.0
