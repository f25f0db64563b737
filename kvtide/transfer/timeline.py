"""The order of work on a device, seen from a lane that copies beside it.

A CUDA lane has a stream of its own and speaks to the model's stream through events. On a CPU the
work is done when the call returns, so there is nothing to order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Event = torch.cuda.Event | None
"""A point in somebody's work; None where work is done as soon as it was issued."""
_HIGHER = -1
"""Than 0, which other streams have."""


class Timeline(Protocol):
    def fence(self) -> Event:
        """What the calling thread has queued so far; the lane can be told to come after it."""

    def inside(self, after: Event) -> AbstractContextManager[object]:
        """Work issued in this context belongs to the lane, and comes after the fence."""

    def record(self) -> Event:
        """The point in the lane's work that has been reached now."""

    def follow(self, event: Event) -> None:
        """Make the calling thread's coming work wait for a point of the lane."""

    def passed(self, event: Event) -> bool:
        """Whether the lane's work up to this point is done."""

    def join(self, event: Event) -> None:
        """Wait until it is."""


class HostTimeline:
    def fence(self) -> Event:
        return None

    def inside(self, after: Event) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return None

    def follow(self, event: Event) -> None:
        """It was done before it could be named."""

    def passed(self, event: Event) -> bool:
        return True

    def join(self, event: Event) -> None:
        """It was done before it could be named."""


class CudaTimeline:
    """Streams share a device's few queues of work. That of a lane has a higher priority than the
    model's, so the two share none: there its copies would come after a whole step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=_HIGHER)

    def fence(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def inside(self, after: Event) -> AbstractContextManager[object]:
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def follow(self, event: Event) -> None:
        assert event is not None
        torch.cuda.current_stream(self._stream.device).wait_event(event)

    def passed(self, event: Event) -> bool:
        return event is not None and event.query()

    def join(self, event: Event) -> None:
        assert event is not None
        event.synchronize()
