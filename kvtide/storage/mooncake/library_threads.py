"""Threads that call the library, so that no caller waits past its deadline.

A call of the library cannot be interrupted. The caller waits until its deadline and then gives the
call up; the thread is *stuck* until the library returns. The number of threads is limited: when all
of them are stuck, calls are refused at once, until one returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class GivenUpError(Exception):
    """The deadline passed. `began`: the library still runs the call and uses its memory."""

    def __init__(self, began: bool) -> None:
        super().__init__("given up")
        self.began = began


class CallRefusedError(Exception):
    """No thread takes the call; the message names the reason."""


class CallState(Enum):
    WAITING = "no thread has begun it"
    RUNNING = "the library runs it"
    STUCK = "given up by its caller, while the library still runs it"
    OVER = "it ended, or was given up before it began"


STEPS = {
    (CallState.WAITING, CallState.RUNNING),
    (CallState.WAITING, CallState.OVER),
    (CallState.RUNNING, CallState.OVER),
    (CallState.RUNNING, CallState.STUCK),
    (CallState.STUCK, CallState.OVER),
}


class _Job(Generic[T]):
    """A call.

    WAITING ──> RUNNING ──> OVER
       │           └──> STUCK ──> OVER
       └──> OVER
    """

    def __init__(self, call: Callable[[], T], afterwards: Callable[[], None]) -> None:
        self.call = call
        self.afterwards = afterwards
        self.state = CallState.WAITING
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.answer: T

    def run(self) -> None:
        try:
            self.answer = self.call()
        except BaseException as error:  # A worker's loop: what was raised goes to the caller.
            self.error = error
        finally:
            self.afterwards()


class LibraryThreads:
    """At most `size` threads. All waiting and counting is done under one lock."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._name = name
        self._lock = threading.Lock()
        self._work_came = threading.Condition(self._lock)
        self._thread_ended = threading.Condition(self._lock)
        self._jobs: deque[_Job[object]] = deque()
        self._threads = 0
        self._idle = 0
        self._stuck = 0
        self._closed = False

    @property
    def stuck(self) -> int:
        return self._stuck

    def run(
        self,
        call: Callable[[], T],
        deadline: float,
        afterwards: Callable[[], None] = lambda: None,
    ) -> T:
        """What `call` returns or raises, unless the deadline passes first.

        `afterwards` is called once the library has nothing to do with the call any more: when it
        ended, however long that took, or when it was given up before it began.
        """
        job = _Job(call, afterwards)
        try:
            self._submit(job)
        except CallRefusedError:
            afterwards()
            raise
        if not job.ended.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(job)
        if job.error is not None:
            raise job.error
        return job.answer

    def finish(self, last: Callable[[], None], seconds: float) -> bool:
        """Take no more calls, and call `last` when the library has returned from all of them.

        Waits for so many seconds; False: it goes on by itself, as calls are stuck.
        """
        with self._lock:
            self._closed = True
            self._work_came.notify_all()
        ended = threading.Event()

        def await_all() -> None:
            with self._lock:
                self._thread_ended.wait_for(lambda: self._threads == 0)
            last()
            ended.set()

        threading.Thread(target=await_all, name=f"{self._name}-end", daemon=True).start()
        return ended.wait(seconds)

    # -- jobs ---------------------------------------------------------------------------------

    def _submit(self, job: _Job[T]) -> None:
        with self._lock:
            if self._closed:
                raise CallRefusedError("it is closed")
            if self._stuck == self.size:
                raise CallRefusedError(f"{self.size} calls are stuck in the library; wait for them")
            self._jobs.append(job)  # type: ignore[arg-type]
            if self._idle < len(self._jobs) and self._threads < self.size:
                self._threads += 1
                name = f"{self._name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._work_came.notify()

    def _give_up(self, job: _Job[T]) -> None:
        with self._lock:
            if job.state is CallState.OVER:
                return  # It returned at the last moment.
            began = job.state is CallState.RUNNING
            self._step(job, CallState.STUCK if began else CallState.OVER)
        if not began:
            job.afterwards()
        raise GivenUpError(began)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._lock:
                self._step(job, CallState.OVER)
            job.ended.set()
        with self._lock:
            self._threads -= 1
            self._thread_ended.notify_all()

    def _next(self) -> _Job[object] | None:
        with self._lock:
            while True:
                self._idle += 1
                self._work_came.wait_for(lambda: self._jobs or self._closed)
                self._idle -= 1
                if not self._jobs:
                    return None
                job = self._jobs.popleft()
                if job.state is CallState.WAITING:
                    self._step(job, CallState.RUNNING)
                    return job

    def _step(self, job: _Job[T], state: CallState) -> None:
        assert (job.state, state) in STEPS
        self._stuck += (state is CallState.STUCK) - (job.state is CallState.STUCK)
        job.state = state
