"""A step as it is scheduled: a chunk of tokens of each request that takes part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.engine.request import Request


def unread_draft(number: int) -> int:
    """Stands for a draft that only the device knows: the one of this number of its drafts."""
    return -1 - number


class ScheduledChunk(NamedTuple):
    """A request's tokens up to `end`, in one step, and drafts behind them.

    Drafts below 0 are `unread_draft`s. A chunk that ends past the request's known tokens has the
    one that the current step samples last.
    """

    request: Request
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def is_sampled(self) -> bool:
        """The host knows the chunk's tokens, drafts aside."""
        return self.end <= self.request.length

    @property
    def start(self) -> int:
        """The tokens before the chunk, until it is computed."""
        return self.request.computed if self.is_sampled else self.request.length

    @property
    def tokens(self) -> int:
        """How many, drafts included, until they are computed."""
        return self.end - self.start + len(self.drafts)

    @property
    def new(self) -> list[int]:
        """The tokens themselves, 0 for one that is not sampled yet; then the drafts."""
        known = self.request.tokens[self.start : self.end] if self.is_sampled else (0,)
        return [*known, *self.drafts]

    @property
    def completes(self) -> bool:
        """All of the request's tokens are then computed: the next one is sampled."""
        return self.end == self.request.length


def with_drafts(chunks: Iterable[ScheduledChunk], left: int) -> Iterator[ScheduledChunk]:
    """Chunks that all decode, with as many drafts as the step has tokens left."""
    for chunk in chunks:
        drafts = chunk.request.drafts[:left] if chunk.completes else ()
        left -= len(drafts)
        yield chunk._replace(drafts=drafts)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The chunks of the step after the current one, whose slots are taken.

    frees_slots  a request ends with the token that the current step samples
    max_accepted the most drafts of the current step that one request may accept: by so many tokens
                 the device moves its chunk
    """

    chunks: list[ScheduledChunk]
    frees_slots: bool
    max_accepted: int = 0

    @property
    def has_prefill(self) -> bool:
        return any(chunk.tokens > 1 for chunk in self.chunks)
