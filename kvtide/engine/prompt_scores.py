"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.runner import StepOutput
from kvtide.engine.sampler import score
from kvtide.engine.staging import Staging

SCORED = 512
"""Prompt tokens scored at a time: each needs a row of logits."""


def score_prompt(chunk: ScheduledChunk, number: int, output: StepOutput, staging: Staging) -> None:
    """Score the prompt's tokens that follow the chunk's, if the request asks for that."""
    request, end = chunk.request, chunk.end
    prompt, count = request.params.tokens, request.params.score
    if count is not None:
        following = prompt[request.computed + 1 : end + 1]
        for first in range(0, len(following), SCORED):
            some = following[first : first + SCORED]
            rows = output.rows(number, first, len(some))
            request.scores += score(rows, some, count, staging)
