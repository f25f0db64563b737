"""A lane: one direction of the link, with a thread that issues copies in order, and tickets.

Issuing a large copy takes the driver longer than a step can spare, so the engine's thread only
submits a job. A lane is supervised: an exception fails its job and is counted, and the lane
continues.

A job's legs are issued one after another. A waiter waits for the leg it needs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtide.transfer.strided import Strided
from kvtide.transfer.timeline import DeviceEvent, Timeline


class TransferError(RuntimeError):
    """A copy that a waiter needs failed, or missed its deadline."""


class Backend(Protocol):
    """Issues copies on the current stream, or does them at once."""

    name: str

    def issue(self, works: Sequence[Strided], legs: int) -> Iterator[None]:
        """Issue the works leg by leg; yields when all of a leg was issued."""


class Ticket:
    """A handle to a submitted job. `error` is the reason of its failure."""

    def __init__(self, timeline: Timeline, legs: int, deadline: float) -> None:
        self.deadline = deadline
        self.error: BaseException | None = None
        self._timeline = timeline
        self._legs = legs
        self._issued: list[DeviceEvent] = []
        self._changed = threading.Condition()

    def wait(self, leg: int) -> None:
        """Order the caller's next work after a leg of the job."""
        leg = range(self._legs)[leg]
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: len(self._issued) > leg, max(0.0, self.deadline - time.monotonic())
            )
        if self.error is not None:
            raise TransferError(f"the copy failed: {self.error}") from self.error
        if not in_time:
            raise TransferError("the copy missed its deadline")
        self._timeline.follow(self._issued[leg])

    def wait_issued(self, timeout_s: float) -> None:
        """Wait until the first leg was issued, or for `timeout_s`: the lane's thread needs the
        interpreter to issue copies."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._issued) > 0, timeout_s)

    def join(self) -> None:
        """Block until the job is done, if all of it was issued."""
        if len(self._issued) == self._legs and self._issued[-1] is not None:
            self._timeline.join(self._issued[-1])

    def first_leg_done(self) -> bool:
        return len(self._issued) > 0 and self._timeline.passed(self._issued[0])

    def done(self) -> bool:
        """Whether the job no longer touches memory, however it ended."""
        issued = self._issued
        return len(issued) == self._legs and self._timeline.passed(issued[-1])

    def leg_issued(self) -> None:
        """One more leg was issued."""
        event = self._timeline.record()
        with self._changed:
            self._issued.append(event)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake all waiters: no further leg of this job will be issued.

        If the device cannot record an event, the job never counts as done.
        """
        self.error = error
        event: DeviceEvent = None
        with suppress(RuntimeError):
            event = self._timeline.record()
        with self._changed:
            self._issued += [event] * (self._legs - len(self._issued))
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Job:
    """`blocks` keeps the memory of the works' addresses alive until the job has run."""

    ticket: Ticket
    works: Sequence[Strided]
    legs: int
    after: DeviceEvent
    blocks: Sequence[torch.Tensor] = ()

    def run(self, timeline: Timeline, backend: Backend) -> None:
        with timeline.inside(self.after):
            for _ in backend.issue(self.works, self.legs):
                self.ticket.leg_issued()


class Lane:
    def __init__(self, name: str, timeline: Timeline, backend: Backend) -> None:
        self.name = name
        self.timeline = timeline
        self.failures = 0
        self._backend = backend
        self._closed = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"kvtide-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        assert not self._closed, "the lane is closed"
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Issue what was submitted, then end the thread; False if it did not end in time."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run(self.timeline, self._backend)
            except BaseException as error:  # Even an exit ends the job and not the lane.
                self.failures += 1
                job.ticket.fail(error)
