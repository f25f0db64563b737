"""Accept length on prompts that training has not seen: what the engine gives with the draft.

Every verify step has as many drafts as asked for, except at an answer's end. While a draft is
trained, `predicted_accept_length` says the same from the target's hidden states over greedy
answers, in one pass of the draft in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from kvtide.engine import Engine, RequestParams
from kvtide.engine.request import Request
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
    at_once: int = 90
    temperature: float = 0.0

    @property
    def answers(self) -> AnswerPlan:
        """How these prompts are answered, with a draft and without: once."""
        return AnswerPlan(
            self.max_tokens,
            count=1,
            temperature=self.temperature,
            at_once=self.at_once,
            cuda_graphs=False,  # Their capture takes longer than these few steps.
            samples_all=True,
        )


def measure_held_out(
    target: Decoder,
    draft: DraftModel,
    files: Sequence[EncodedPrompts],
    plan: HeldOutPlan,
    stop_ids: frozenset[int],
    until: float = math.inf,
) -> list[HeldOut]:
    """The accept length of every file's prompts; answers end at `until`, of `time.monotonic`."""
    if not files:
        return []
    asked = [prompt for file in files for prompt in file.prompts]
    at_once = min(plan.at_once, len(asked))
    longest = max(map(len, asked)) + plan.max_tokens + 2 * target.memory.page_tokens
    cache = open_training_cache(target, (at_once + 1) * longest)
    engine = Engine(
        target,
        cache,
        chunk_tokens=CHUNK_TOKENS,
        max_running=at_once,
        cuda_graphs=plan.answers.cuda_graphs,
        drafter=ModelDrafter(draft, draft.captures, cache, target.vocabulary),
        draft_tokens=plan.draft_tokens,
        fixed_drafts=True,
    )
    requests = [
        engine.submit(
            RequestParams(prompt, plan.max_tokens, plan.answers.sampling(number, 0), stop_ids)
        )
        for number, prompt in enumerate(asked)
    ]
    while not engine.idle and time.monotonic() < until:
        engine.step()
    for request in requests:
        engine.abort(request)
    cache.close()
    left = iter(requests)
    return [_counted(file.category, list(islice(left, len(file.prompts)))) for file in files]


def _counted(category: str, requests: Sequence[Request]) -> HeldOut:
    steps = sum(request.verify_steps for request in requests)
    accepted = sum(request.accepted_drafts for request in requests)
    return HeldOut(category, len(requests), steps, steps + accepted)


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
