"""A lane without a thread: the test runs each copy, or makes it fail; and a device without a clock:
the test says when its work is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import cast

from kvtide.transfer.lane import Backend, Job
from kvtide.transfer.timeline import DeviceEvent, HostTimeline, Timeline


class HandRunTimeline(HostTimeline):
    """A device that works when a test calls it; a fence is the number of the work behind it."""

    def __init__(self) -> None:
        self.queued = 0
        self._works: deque[Callable[[], None]] = deque()

    def queue(self, work: Callable[[], None]) -> None:
        self._works.append(work)
        self.queued += 1

    def work(self, works: int | None = None) -> None:
        """Do the next works, or all that are queued."""
        for _ in range(len(self._works) if works is None else works):
            self._works[0]()
            self._works.popleft()

    def fence(self) -> DeviceEvent:
        return cast(DeviceEvent, self.queued + 1)

    def passed(self, event: DeviceEvent) -> bool:
        return event is None or cast(int, event) <= self.queued - len(self._works) + 1


class HandRunLane:
    """Jobs wait in `jobs`, oldest first, and are not run before their fence has passed."""

    def __init__(self, backend: Backend, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or HostTimeline()
        self.failures = 0
        self.jobs: deque[Job] = deque()
        self._backend = backend
        self._under_way: Iterator[None] | None = None

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def run(self, jobs: int = 1) -> int:
        """Do the next jobs in full; how many there were."""
        done = 0
        while self.jobs and done < jobs and self.timeline.passed(self.jobs[0].after):
            self.run_legs(self.jobs[0].legs)
            done += 1
        return done

    def run_legs(self, legs: int) -> None:
        """Do some more legs of the next job, if its fence has passed."""
        job = self.jobs[0]
        if not self.timeline.passed(job.after):
            return
        if self._under_way is None:
            self._under_way = self._backend.issue(job.works, job.legs)
        try:
            for _ in islice(self._under_way, legs):
                job.ticket.leg_issued()
        except Exception as error:
            self.fail(error)
        else:
            if job.ticket.done():
                self._leave()

    def fail(self, error: Exception) -> None:
        """The next job fails; of its legs no more are done than were."""
        self.failures += 1
        self.jobs[0].ticket.fail(error)
        self._leave()

    def _leave(self) -> None:
        self.jobs.popleft()
        self._under_way = None

    def close(self, timeout_s: float) -> bool:
        self.run(len(self.jobs))
        return True
