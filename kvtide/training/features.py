"""What a draft is trained on: the target's hidden states over prompts and answers.

The engine computes every sequence once more, without its cache, as a prompt of its own. A recorder
in the place of a drafter keeps the states that the step captures: those that the draft takes, and
the last layer's output, from which the target's logits follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.engine import Engine, RequestParams
from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.runner import StepOutput
from kvtide.engine.speculation.drafter import DraftWish, TokenDrafter
from kvtide.models.model import Decoder
from kvtide.training.generate import Answered, ProgressReport, ShowLine, open_training_cache

LOGIT_ROWS = 4096
"""Rows whose logits over the target's vocabulary are computed at a time."""
STEP_TOKENS = 16384
"""Of a step over whole sequences."""


class StateRecorder(TokenDrafter):
    """A `Drafter` that proposes nothing and writes captured states into rows of `states`."""

    def __init__(self, captures: tuple[int, ...], states: Tensor) -> None:
        self.captures, self._states = captures, states
        self._firsts: dict[int, int] = {}

    def expect(self, request: int, first: int) -> None:
        """The states of this request's tokens go to the rows from `first` on."""
        self._firsts[request] = first

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        for number, chunk in enumerate(chunks):
            begin, end, position = output.span(number)
            first = self._firsts[chunk.request.number] + position
            self._states[first : first + end - begin] = output.captured[begin:end]

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        return [() for _ in wishes]


@dataclass(frozen=True, slots=True)
class TargetStates:
    """Sequences as the target computed them, one after another: a row for every token.

    tokens   (rows,)
    states   (rows, …): what the draft takes, then the last layer's output of `width` numbers
    starts   of every sequence, its first row
    lengths  of every sequence, its tokens
    prompts  of every sequence, how many of its tokens are the prompt's
    """

    tokens: Tensor
    states: Tensor
    width: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def captured(self) -> Tensor:
        return self.states[:, : -self.width]

    @property
    def last(self) -> Tensor:
        return self.states[:, -self.width :]

    def first(self, count: int) -> TargetStates:
        """The first so many sequences."""
        return TargetStates(
            self.tokens,
            self.states,
            self.width,
            self.starts[:count],
            self.lengths[:count],
            self.prompts[:count],
        )


def target_states(
    target: Decoder,
    captures: tuple[int, ...],
    answered: Sequence[Answered],
    report: ShowLine,
    until: float = math.inf,
) -> TargetStates:
    """The states of these sequences, on the target's device and in its dtype.

    At `until`, a time of `time.monotonic`, the rest of the sequences is left out.
    """
    found = _empty_states(target, len(captures) + 1, answered)
    page, layers = target.memory.page_tokens, target.memory.layers
    longest = max(found.lengths) + 2 * page
    at_once = max(1, min(len(found), 2 * STEP_TOKENS // longest))
    cache = open_training_cache(target, (at_once + 1) * longest)
    recorder = StateRecorder((*captures, layers), found.states)
    engine = Engine(
        target,
        cache,
        chunk_tokens=max(STEP_TOKENS, longest),
        max_running=at_once,
        cuda_graphs=False,  # Steps are too large for graphs, but the last.
        drafter=recorder,
        draft_tokens=1,
    )
    begun, tokens, progress = 0, 0, ProgressReport(report)
    while begun < len(found) or not engine.idle:
        late = time.monotonic() >= until and begun > 0
        if late and engine.idle:
            break
        while begun < len(found) and engine.scheduler.waiting < at_once and not late:
            params = RequestParams(answered[begun].tokens, 0, recompute=True)
            recorder.expect(engine.submit(params).number, found.starts[begun])
            begun += 1
        engine.step()
        tokens += engine.computed
        if progress.due:
            line = f"computed hidden states of {begun:,} of {len(found):,} sequences"
            progress.say(tokens, line)
    cache.close()
    report(f"hidden states of {tokens:,} tokens take {found.states.nbytes:,} bytes")
    return found.first(begun)


def _empty_states(target: Decoder, kinds: int, answered: Sequence[Answered]) -> TargetStates:
    lengths = [len(one.tokens) for one in answered]
    device, rows = target.head.device, sum(lengths)
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return TargetStates(
        torch.tensor([token for one in answered for token in one.tokens]).to(device),
        torch.empty(rows, kinds * target.width, dtype=target.dtype, device=device),
        target.width,
        tuple(starts),
        tuple(lengths),
        tuple(len(one.prompt) for one in answered),
    )


@torch.no_grad()
def target_logits(target: Decoder, last: Tensor) -> Iterator[Tensor]:
    """The target's logits of rows of the last layer's output, some rows at a time."""
    for rows in last.split(LOGIT_ROWS):
        yield target.logits(target.closed(rows))
