"""The order of work on a device: a lane's copies against the model's kernels.

A CUDA lane has a stream of its own, ordered against the model's stream by events. On a CPU the work
is done when the call returns, so there is nothing to order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

DeviceEvent = torch.cuda.Event | None
"""A point in a stream; None on a CPU."""
_HIGH_PRIORITY = -1
"""Priority of a lane's stream; other streams have 0."""


class Timeline(Protocol):
    def fence(self) -> DeviceEvent:
        """The end of the work that the calling thread has queued so far."""

    def inside(self, after: DeviceEvent) -> AbstractContextManager[object]:
        """Work issued in this context belongs to the lane, and comes after the fence."""

    def record(self) -> DeviceEvent:
        """The point in the lane's work that has been reached now."""

    def follow(self, event: DeviceEvent) -> None:
        """Order the calling thread's next work after a point of the lane."""

    def passed(self, event: DeviceEvent) -> bool:
        """Whether the lane's work up to this point is done."""

    def join(self, event: DeviceEvent) -> None:
        """Block until it is."""


class HostTimeline:
    def fence(self) -> DeviceEvent:
        return None

    def inside(self, after: DeviceEvent) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> DeviceEvent:
        return None

    def follow(self, event: DeviceEvent) -> None:
        """The work is done already."""

    def passed(self, event: DeviceEvent) -> bool:
        return True

    def join(self, event: DeviceEvent) -> None:
        """The work is done already."""


class CudaTimeline:
    """A lane's stream has a higher priority than the model's, so that the two never share one of
    the device's few work queues: a shared queue would order copies after a whole step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)

    def fence(self) -> DeviceEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def inside(self, after: DeviceEvent) -> AbstractContextManager[object]:
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def record(self) -> DeviceEvent:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def follow(self, event: DeviceEvent) -> None:
        assert event is not None
        torch.cuda.current_stream(self._stream.device).wait_event(event)

    def passed(self, event: DeviceEvent) -> bool:
        return event is not None and event.query()

    def join(self, event: DeviceEvent) -> None:
        assert event is not None
        event.synchronize()
