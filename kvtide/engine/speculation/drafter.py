"""What proposes drafts: the interface that `Speculation` calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtide.engine.request import Request
from kvtide.engine.runner import StepOutput
from kvtide.engine.scheduler import ScheduledChunk
from kvtide.models.draft import DraftModel


class DraftWish(NamedTuple):
    """A request whose next step decodes, and how many drafts it may have: its lease has slots for
    so many."""

    request: Request
    limit: int


class Drafter(Protocol):
    """Proposes drafts for requests.

    cost      what a draft costs, in decode steps of one request: its own pass and its row of the
              verify step
    captures  the layers of the target whose inputs it takes, as of `CapturedStates`
    writes    the sidecar pools that `extend` writes
    model     the draft model, where there is one on this rank
    """

    cost: float
    captures: tuple[int, ...]
    writes: tuple[str, ...]
    model: DraftModel | None

    def extend(self, chunks: Sequence[ScheduledChunk], output: StepOutput) -> None:
        """A step of these chunks has run, and its tokens are sampled and accepted."""

    def propose(self, wishes: Sequence[DraftWish]) -> list[tuple[int, ...]]:
        """Up to `limit` drafts for each."""
