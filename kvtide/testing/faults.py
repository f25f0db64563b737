"""A backend that fails at chosen legs."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from kvtide.transfer.lane import Backend
from kvtide.transfer.strided import Strided


class FaultError(Exception):
    """Put there by a test."""


class FaultyBackend:
    """Copies like the backend it wraps, except for the legs whose numbers are named.

    Legs are numbered over all jobs, as they come.

    raises    these raise before they copy anything
    halves    these copy half of their pages, and then raise
    kills     these end the thread they run on
    `hold` is a gate: while it is closed (`hold.clear()`), legs wait there.
    """

    name = "faulty"

    def __init__(
        self,
        backend: Backend,
        raises: Container[int] = (),
        halves: Container[int] = (),
        kills: Container[int] = (),
    ) -> None:
        self.legs = 0
        self.hold = threading.Event()
        self.hold.set()
        self._backend = backend
        self._raises, self._halves, self._kills = raises, halves, kills

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        issuing = self._backend.issue(works, legs)
        for leg in range(legs):
            number, self.legs = self.legs, self.legs + 1
            self.hold.wait()
            if number in self._kills:
                raise SystemExit("killed by a test")
            if number in self._raises:
                raise FaultError(f"leg {number}")
            if number in self._halves:
                self._half(works, legs, leg)
                raise FaultError(f"leg {number}, halfway")
            next(issuing)
            yield

    def _half(self, works: Sequence[Strided], legs: int, leg: int) -> None:
        """Copy the first half of the pages, of all legs up to this one."""
        halves = [
            Strided(
                w.table, *(index[: len(index) // 2] for index in (w.source_index, w.target_index))
            )
            for w in works
        ]
        for _ in islice(self._backend.issue(halves, legs), leg + 1):
            pass
