"""Events that each rank notices by itself and that all ranks act on together.

A handoff reads pages from another thread, and a device reads a tail row at its own time: only the
rank knows when that is over. Every poll the ranks agree on what has happened on all of them, and
then do what was to follow: release a lease, or let a peer write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_SHOWN = 64
"""Events per exchange between ranks; older ones come first."""


class _Awaited(NamedTuple):
    has_happened: Callable[[], bool]
    then: Callable[[], None]


class AgreedEvents:
    """Oldest first, as on every rank."""

    def __init__(self) -> None:
        self._awaited: list[_Awaited] = []

    def __len__(self) -> int:
        return len(self._awaited)

    def when(self, has_happened: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` in the first poll in which it has happened on all ranks."""
        self._awaited.append(_Awaited(has_happened, then))

    def verdicts(self) -> list[int]:
        return [int(each.has_happened()) for each in self._awaited[:MAX_SHOWN]]

    def settle(self, agreed: Sequence[int]) -> None:
        """Act on the agreed verdicts, in order."""
        shown, rest = self._awaited[: len(agreed)], self._awaited[len(agreed) :]
        pairs = list(zip(shown, agreed, strict=True))
        self._awaited = [*(each for each, happened in pairs if not happened), *rest]
        for each, happened in pairs:
            if happened:
                each.then()
