"""Events that each rank notices by itself and that all ranks act on together.

A handoff reads pages from another thread, and a device reads a tail row at its own time: only the
rank knows when that is over. Every poll the ranks agree on what has happened on all of them, and
then do what was to follow: release a lease, or let a peer write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_SHOWN = 64
"""Events per exchange between ranks. They take turns: one may wait for ever, such as for a peer
that does not answer."""


class _Awaited(NamedTuple):
    has_happened: Callable[[], bool]
    then: Callable[[], None]


class AgreedEvents:
    """In the same order on every rank: those that were shown and wait on go to the end."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []

    def __len__(self) -> int:
        return len(self._awaited)

    def when(self, has_happened: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` in a poll soon after it has happened on all ranks."""
        self._awaited.append(_Awaited(has_happened, then))

    def verdicts(self) -> list[int]:
        return [int(each.has_happened()) for each in self._awaited[:MAX_SHOWN]]

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts, in order."""
        shown, rest = self._awaited[: len(agreed)], self._awaited[len(agreed) :]
        pairs = list(zip(shown, agreed, strict=True))
        waiting = [each for each, happened in pairs if not happened]
        self._awaited = [*rest, *waiting] if rest else waiting
        for each, happened in pairs:
            if happened:
                each.then()
