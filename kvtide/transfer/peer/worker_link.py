"""A link whose library blocks: a thread of its own calls it, so that the deadline is ours.

A call of a library cannot be interrupted. At the deadline the write is given up and the link is
dead; the thread stays in the call until the library returns, and only this link waits for it.

    QUEUED ──> RUNNING ──> OVER
       │          └──────> GIVEN_UP ──> OVER
       └──────> OVER
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

import numpy as np

from kvtide.transfer.peer.send_staging import STAGING_BYTES, Requests, SendStaging
from kvtide.transfer.peer.transport import PendingWrite, TransportError, WriteBatch


class WriteState(Enum):
    QUEUED = "the thread has not begun it"
    RUNNING = "the library runs it"
    GIVEN_UP = "its deadline has passed, while the library runs it"
    OVER = "it ended, or was given up before it began"


WRITE_STEPS = {
    (WriteState.QUEUED, WriteState.RUNNING),
    (WriteState.QUEUED, WriteState.OVER),
    (WriteState.RUNNING, WriteState.OVER),
    (WriteState.RUNNING, WriteState.GIVEN_UP),
    (WriteState.GIVEN_UP, WriteState.OVER),
}

MoveRequests = Callable[[Requests, float], None]
"""Write with the library until a deadline; raises TransportError."""


class WorkerLink:
    """`bases` and `sizes` are the receiver's regions, as the library addresses them."""

    poll_s = 500e-6

    def __init__(
        self,
        name: str,
        bases: list[int],
        sizes: list[int],
        transfer: MoveRequests,
        staging: SendStaging,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """`let_go` is called once, when the link is closed and the library has returned."""
        self._name = name
        self._bases, self._sizes = np.array(bases, np.int64), sizes
        self._transfer = transfer
        self._staging = staging
        self._let_go = let_go
        self._writes: deque[_Write] = deque()
        self._changed = threading.Condition()
        self._dead: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"kvtide-{name}", daemon=True)
        self._thread.start()

    def begin(self, batch: WriteBatch, timeout_s: float) -> PendingWrite:
        batch.check(self._sizes)
        write = _Write(self, batch, timeout_s)
        with self._changed:
            if self._dead is not None:
                raise TransportError(f"{self._name}: {self._dead}", silent=True)
            self._writes.append(write)
            self._changed.notify()
        return write

    def alive(self) -> bool:
        return self._dead is None

    def close(self) -> None:
        with self._changed:
            self._dead = self._dead or "the link is closed"
            self._closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the library has returned from all calls of a closed link."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- a write's steps, under the lock ------------------------------------------------------

    def poll(self, write: _Write) -> bool:
        with self._changed:
            if write.state is WriteState.OVER:
                if write.error is not None:
                    raise write.error
                return True
            if time.monotonic() <= write.deadline:
                return False
            reason = f"not written within {write.timeout_s:g} s"
            began = write.state is WriteState.RUNNING
            if began:
                self._dead = self._dead or "an earlier write did not end"
            write.step(WriteState.GIVEN_UP if began else WriteState.OVER)
        raise TransportError(f"{self._name}: {reason}", silent=not began)

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while (write := self._next()) is not None:
            error: TransportError | None = None
            try:
                self._run(write)
            except TransportError as failed:
                error = failed
            except Exception as failed:  # A library's: what it did is not known.
                error = TransportError(f"{type(failed).__name__}: {failed}", silent=False)
            with self._changed:
                if error is not None:
                    write.error = TransportError(f"{self._name}: {error}", silent=error.silent)
                    if not error.silent:
                        self._dead = self._dead or "an earlier write failed"
                write.step(WriteState.OVER)
        self._staging.close()
        self._let_go()

    def _next(self) -> _Write | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return None
                write = self._writes.popleft()
                if write.state is WriteState.OVER:
                    continue
                if self._dead is not None:
                    write.error = TransportError(f"{self._name}: {self._dead}", silent=True)
                    write.step(WriteState.OVER)
                    continue
                write.step(WriteState.RUNNING)
                return write

    def _run(self, write: _Write) -> None:
        batch = write.batch
        requests = self._staging.requests(batch, self._bases[batch.region] + batch.target)
        if requests is not None:
            self._transfer(requests, write.deadline)
            return
        for part in batch.parts(STAGING_BYTES):
            target = self._bases[part.region] + part.target
            self._transfer(self._staging.gathered(part, target, write.deadline), write.deadline)


class _Write:
    """A write of a worker's link. Steps are made under the link's lock."""

    def __init__(self, link: WorkerLink, batch: WriteBatch, timeout_s: float) -> None:
        self.batch = batch
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.state = WriteState.QUEUED
        self.error: TransportError | None = None
        self._link = link

    def poll(self) -> bool:
        return self._link.poll(self)

    def step(self, state: WriteState) -> None:
        assert (self.state, state) in WRITE_STEPS
        self.state = state
