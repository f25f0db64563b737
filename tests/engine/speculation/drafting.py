"""Drafters for tests, with a chosen rate of errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from torch import Tensor

from kvtide.engine.chunks import ScheduledChunk
from kvtide.engine.graphs.graph_capture import GraphCapture
from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.speculation.drafter import (
    Drafter,
    DraftLimits,
    DraftWish,
    TokenDrafter,
    UnreadDrafts,
    UnreadStep,
)
from tests.models.tiny import VOCABULARY

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""The answer to each prompt."""
Seen = dict[tuple[int, ...], tuple[int, ...]]
"""The drafts behind each run of tokens."""


class Asking:
    """Stands for a request whose drafts are counted."""

    def __init__(self, number: int = 0, speculate: bool = True) -> None:
        self.number, self.length = number, 10
        self.params = SimpleNamespace(speculate=speculate)


class ErringDrafter(TokenDrafter):
    """Knows the answers, and drafts each token of one with the chance of an error."""

    def __init__(self, answers: Answers, errors: float, seed: int = 0) -> None:
        self._answers, self._errors = answers, errors
        self._random = random.Random(seed)
        self.proposed = 0

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        drafts = [self._proposed(wish) for wish in wishes]
        self.proposed += sum(map(len, drafts))
        return drafts

    def _proposed(self, wish: DraftWish) -> tuple[int, ...]:
        request = wish.request
        done = request.length - len(request.params.tokens)
        rest = self._answers[request.params.tokens][done : done + wish.limit]
        count = self._random.randint(0, wish.limit)
        return tuple(self._drafted(token) for token in rest[:count])

    def _drafted(self, token: int) -> int:
        wrong = self._random.random() < self._errors
        return (token + self._random.randrange(1, VOCABULARY)) % VOCABULARY if wrong else token


class ConsistentDrafter:
    """Passes drafts on, and asserts that equal tokens always get equal ones, wherever their pages
    came from. `compared`: how often there were some to compare with; `behind`: how often drafts
    were launched before the host had read what was sampled."""

    def __init__(self, inner: Drafter, seen: Seen) -> None:
        self._inner, self.seen = inner, seen
        self.cost, self.captures, self.writes = 0.0, inner.captures, inner.writes
        self.model = inner.model
        self.compared = self.behind = 0

    def use_graphs(self, capture: GraphCapture, limits: DraftLimits) -> None:
        self._inner.use_graphs(capture, limits)

    def warm_up(self, longest: int) -> None:
        self._inner.warm_up(longest)

    def extend(
        self, chunks: Sequence[ScheduledChunk], output: StepOutput, wishes: Sequence[DraftWish]
    ) -> None:
        self._inner.extend(chunks, output, wishes)

    def captured(self, output: StepOutput, number: int) -> Callable[[], list[Tensor]] | None:
        return self._inner.captured(output, number)

    def resume(self, request: Request) -> None:
        self._inner.resume(request)

    def extend_resumed(self, wishes: Sequence[DraftWish], captured: Sequence[Tensor]) -> None:
        self._inner.extend_resumed(wishes, captured)

    def draft_ahead(self, step: UnreadStep, wishes: Sequence[DraftWish]) -> UnreadDrafts | None:
        drafts = self._inner.draft_ahead(step, wishes)
        self.behind += drafts is not None
        return drafts

    @property
    def can_draft_ahead(self) -> bool:
        return self._inner.can_draft_ahead

    def undo_ahead(self, request: Request) -> None:
        self._inner.undo_ahead(request)

    @property
    def unread(self) -> UnreadDrafts | None:
        return self._inner.unread

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        proposed = self._inner.propose(wishes)
        for wish, drafts in zip(wishes, proposed, strict=True):
            before = self.seen.setdefault(tuple(wish.request.tokens), drafts)
            self.compared += before is not drafts
            common = min(len(before), len(drafts))
            assert drafts[:common] == before[:common], "another draft of the same tokens"
        return proposed
