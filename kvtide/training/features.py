"""What a draft is trained on: the target's hidden states over prompts and answers.

The engine computes every sequence once more, without its cache, as a prompt of its own. A recorder
in the place of a drafter keeps the states that the step captures: those that the draft takes, and
the last layer's output, from which the target's logits follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.engine import Engine, RequestParams
from kvtide.engine.runner import StepOutput
from kvtide.engine.scheduler import ScheduledChunk
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from kvtide.models.model import Decoder
from kvtide.training.generate import CHUNK_TOKENS, Answered, Report, open_training_cache

LOGIT_ROWS = 2048
"""Rows whose logits over the target's vocabulary are computed at a time."""
REPORT_SEQUENCES = 1000


class StateRecorder(TokenDrafter):
    """A `Drafter` that proposes nothing and keeps the captured states of requests, by number."""

    def __init__(self, captures: tuple[int, ...]) -> None:
        self.captures = captures
        self._parts: dict[int, list[Tensor]] = {}

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        for number, chunk in enumerate(chunks):
            first, end, _ = output.span(number)
            # The next step may overwrite what this one captured.
            states = output.captured[first:end].clone()
            self._parts.setdefault(chunk.request.number, []).append(states)

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [() for _ in wishes]

    def take(self, number: int) -> Tensor:
        """The states of all tokens of a request, which are then forgotten."""
        return torch.cat(self._parts.pop(number))


@dataclass(frozen=True, slots=True)
class TargetStates:
    """One sequence as the target computed it, a row for every token.

    prompt    how many of the tokens are the prompt's
    captured  what the draft takes
    last      the last layer's output
    """

    tokens: Tensor
    prompt: int
    captured: Tensor
    last: Tensor


def target_states(
    target: Decoder, captures: tuple[int, ...], answered: Sequence[Answered], report: Report
) -> list[TargetStates]:
    """The states of these sequences, on the target's device and in its dtype."""
    page, layers = target.memory.page_tokens, target.memory.layers
    longest = max(len(one.tokens) for one in answered) + 2 * page
    at_once = max(1, min(len(answered), 2 * CHUNK_TOKENS // longest))
    cache = open_training_cache(target, (at_once + 1) * longest)
    recorder = StateRecorder((*captures, layers))
    engine = Engine(
        target,
        cache,
        chunk_tokens=max(CHUNK_TOKENS, longest),
        max_running=at_once,
        drafter=recorder,
        draft_tokens=1,
    )
    found = []
    for first in range(0, len(answered), at_once):
        some = answered[first : first + at_once]
        numbers = [
            engine.submit(RequestParams(one.tokens, 0, recompute=True)).number for one in some
        ]
        while not engine.idle:
            engine.step()
        for one, number in zip(some, numbers, strict=True):
            found.append(_states(one, recorder.take(number), target.width * len(captures)))
        if (first + at_once) // REPORT_SEQUENCES > first // REPORT_SEQUENCES:
            report(f"computed hidden states of {len(found):,} of {len(answered):,} sequences")
    cache.close()
    return found


def _states(one: Answered, joined: Tensor, width: int) -> TargetStates:
    assert len(joined) == len(one.tokens), "every token is computed once"
    tokens = torch.tensor(one.tokens, device=joined.device)
    return TargetStates(tokens, len(one.prompt), joined[:, :width], joined[:, width:])


@torch.no_grad()
def target_logits(target: Decoder, last: Tensor) -> Iterator[Tensor]:
    """The target's logits of rows of the last layer's output, some rows at a time."""
    for rows in last.split(LOGIT_ROWS):
        yield target.logits(target.closed(rows))
