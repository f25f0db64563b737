"""Notices a step that does not end, on every rank: heartbeats (`rank_channels`) show a frozen
process only.

If one rank's step does not end, those of all others wait for it. So a report says where the step is
and whether that is a wait for other ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_OWN, _COLLECTIVES = "kvtide.", "torch.distributed"
_LOOKS = 8
"""The watch looks so many times within the limit, and at least once a second."""


@dataclass(frozen=True, slots=True)
class StuckStep:
    """`place`: the function that the step is in. `waits`: it waits for other ranks there."""

    seconds: float
    place: str
    waits: bool


class StepClock:
    """Runs while a step does. The engine's thread sets it, and the watch reads it."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: tuple[float, int] | None = None

    def __enter__(self) -> None:
        self._running = time.monotonic(), threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._running = None

    def stuck(self, limit_s: float) -> StuckStep | None:
        """The running step, if it has taken longer than this."""
        running = self._running
        if running is None or (seconds := time.monotonic() - running[0]) <= limit_s:
            return None
        place, waits = _place(sys._current_frames().get(running[1]))
        return StuckStep(seconds, place, waits)


class StepWatch:
    """Calls `report` once, on a thread of its own, when a step has taken longer than the limit."""

    def __init__(
        self, clock: StepClock, limit_s: float, report: Callable[[StuckStep], None]
    ) -> None:
        self._clock, self._limit_s, self._report = clock, limit_s, report
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="kvtide-step-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._limit_s / _LOOKS)):
            if (stuck := self._clock.stuck(self._limit_s)) is not None:
                self._report(stuck)
                return


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost function of this package, and whether it has called a collective."""
    waits = False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OWN):
            code = frame.f_code
            return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})", waits
        waits |= module.startswith(_COLLECTIVES)
        frame = frame.f_back
    return "a thread that has ended", False
