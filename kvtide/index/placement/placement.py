"""Checkpoint placement: at which boundaries windows and recurrent states are kept.

Pools with a finite reach make a boundary resumable only where their last pages before it are
kept. A `Placement` names the boundaries; `plan` turns them into segments of pages that are kept in
the same anchors. The end of a request is the natural checkpoint: the next turn of the conversation
resumes there. Prompts also diverge where no request ended. A request that matches tokens there and
finds no checkpoint (`IndexLease.branches`) leaves one when it passes that point.
`learned_placement` learns where prompts diverge before they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

PlannedSegment = tuple[int, int, tuple[int, ...]]
"""First page, end page, and the anchors that keep these pages."""


class Placement:
    """Chooses page boundaries in (start, end] to make resumable, for a request that computes them.

    `branches` are boundaries where this prompt is known to diverge from others.
    """

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        raise NotImplementedError

    def note_placed(self, start: int, end: int, count: int) -> None:
        """A request that computes pages (start, end] got slots for so many checkpoints."""

    def note_branch(self, at: int, stop: int) -> None:
        """A prompt is the first to diverge at page `at` from one that was computed to `stop`."""


class LastPage(Placement):
    """Only where a request ends."""

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        return (end,)


class Branches(Placement):
    """Also where this prompt is known to diverge from an earlier one."""

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        return (*branches, end)


@dataclass(frozen=True, slots=True)
class EveryPages(Placement):
    """Also at branches and at every multiple of `pages` pages."""

    pages: int

    def checkpoints(self, start: int, end: int, branches: Sequence[int]) -> Iterable[int]:
        first = (start // self.pages + 1) * self.pages
        return (*branches, *range(first, end, self.pages), end)


def plan(
    start: int,
    end: int,
    open_end: int,
    checkpoints: Iterable[int],
    reaches: tuple[int | None, ...],
) -> list[PlannedSegment]:
    """What a request computes, cut into segments whose pages are kept in the same anchors.

    Pages [start, end) are full and will be committed; [end, open_end) is the page being filled,
    a segment of its own in which every anchor needs a slot. `reaches` gives each anchor's reach
    in pages. A page is kept by an anchor if the next checkpoint reaches back to it; if the next
    one does not, no later one does.
    """
    everywhere, steps, histories = _kept(reaches)
    segments: list[PlannedSegment] = []
    at = start
    stops = sorted({stop for stop in checkpoints if start < stop <= end}) if steps else ()
    for stop in stops:
        for reach, kept in steps:
            if stop - reach > at:
                segments.append((at, stop - reach, kept))
                at = stop - reach
        if segments and segments[-1][2] == everywhere:
            segments[-1] = (segments[-1][0], stop, everywhere)
        else:
            segments.append((at, stop, everywhere))
        at = stop
    if at < end:
        segments.append((at, end, histories))
    if end < open_end:
        segments.append((end, open_end, everywhere))
    return segments


@cache
def _kept(
    reaches: tuple[int | None, ...],
) -> tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]]:
    """All anchors; per finite reach, longest first, the anchors that keep pages before it; the
    histories."""
    everywhere = tuple(range(len(reaches)))
    finite = sorted({reach for reach in reaches if reach is not None}, reverse=True)
    steps = tuple(
        (reach, tuple(a for a in everywhere if (r := reaches[a]) is None or r > reach))
        for reach in finite
    )
    return everywhere, steps, tuple(a for a in everywhere if reaches[a] is None)
